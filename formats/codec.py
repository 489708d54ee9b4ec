"""What a codec is, and the registry that finds them: one file in ``formats/codecs`` is one on-disk layout.

Listing names and laying out shapes imports no torch, so that a plan with exact bytes comes before anything heavy.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from quant.activations import ActivationScheme
from quant.errors import UsageError
from quant.scheme import Scheme

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from quant.qtensor import QTensor

ENGINES_READ, OWN = "pack-quantized", "dense"


@dataclass(frozen=True, slots=True)
class Part:
    """One stored tensor of a quantised matrix: ``suffix`` replaces ``weight`` in the name; dtype is a safetensors name."""

    suffix: str
    dtype: str
    shape: tuple[int, ...]
    role: str


class Codec(Protocol):
    """QTensor <-> named parts. ``layout`` is a pure function of (scheme, shape) and is what ``pack`` must produce."""

    @property
    def name(self) -> str: ...
    @property
    def quant_method(self) -> str | None:
        """What engines know the layout's family by, or None for a layout that is this project's own."""
        ...

    @property
    def activations(self) -> ActivationScheme | None:
        """How engines round the inputs of matrices that are stored so, or None where they leave them alone."""
        ...

    def refusal(self, scheme: Scheme, shape: tuple[int, int]) -> str | None:
        """Why this layout cannot hold the scheme for that shape, or None."""
        ...

    def advice(self, scheme: Scheme) -> tuple[str, ...]:
        """Sentences on what engines need to load this scheme in this layout, beyond their defaults."""
        ...

    def layout(self, scheme: Scheme, shape: tuple[int, int]) -> tuple[Part, ...]: ...
    def pack(self, qtensor: QTensor) -> dict[str, Tensor]: ...
    def unpack(self, parts: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int]) -> QTensor: ...
    def config_group(self, scheme: Scheme, targets: list[str]) -> dict[str, Any]:
        """The entry of the output configuration that tells an engine how these modules are stored."""
        ...

    def scheme_of_group(self, group: Mapping[str, Any], scale_dtype: str) -> Scheme:
        """The inverse of ``config_group`` for a reader; ``scale_dtype`` is the safetensors dtype of the stored scales."""
        ...


def codec_names() -> tuple[str, ...]:
    """Names of all codecs, as written in configurations."""
    import formats.codecs as package

    return tuple(sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules(package.__path__)))


def get_codec(name: str) -> Codec:
    """The codec of that name. Raises UsageError with the names there are."""
    if name not in codec_names():
        raise UsageError(f"no such storage format: {name!r} (there are: {', '.join(codec_names())})")
    found: Codec = importlib.import_module(f"formats.codecs.{name.replace('-', '_')}").CODEC
    return found


def default_codec(scheme: Scheme) -> str:
    """The layout that most engines read among those that hold the scheme at all, whatever the shape of the matrix."""
    shape = (1, scheme.blocks if isinstance(scheme.blocks, int) else 1)
    return ENGINES_READ if get_codec(ENGINES_READ).refusal(scheme, shape) is None else OWN
