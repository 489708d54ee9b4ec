"""What a quantiser is, and the registry that finds them.

A quantiser is a pure function of (matrix, Scheme, Evidence); it knows no tensor names, devices or files. One file in
``quant/quantizers`` is one algorithm: the registry imports ``quant.quantizers.<name>`` and takes its ``QUANTIZER``.
Listing the names imports nothing, so that the command line can check a method before torch is loaded.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import pkgutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from quant.errors import UsageError
from quant.scheme import Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from quant.qtensor import QTensor


# A name and a value of a quantiser's own settings, for example ("damping", 0.05); the names are its field names.
Option = tuple[str, str | float | bool]


class Need(enum.Enum):
    """A statistic of a matrix's inputs that calibration can gather."""

    GRAM = "gram"
    CROSS = "cross"


@dataclass(frozen=True, slots=True)
class Note:
    """Something that did not go the plain way: it reaches the manifest and the summary."""

    kind: str
    text: str


class InputStatistics(Protocol):
    """What a quantiser may read of calibration; ``calib.evidence.Evidence`` is the real thing.

    ``tokens`` counts the rows x seen; ``gram`` is the sum of x x^T, float32 ``[in, in]``; ``cross`` that of
    (x_float - x) x^T with the rows of the float model, where these were gathered; ``mean_abs`` is the mean magnitude ``[in]``.
    """

    @property
    def tokens(self) -> int: ...
    @property
    def gram(self) -> Tensor: ...
    @property
    def cross(self) -> Tensor | None: ...
    @property
    def mean_abs(self) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """A quantised matrix and what is to be noted about it.

    ``values`` are the float values ``[out, in]`` whose rounding gave the codes, where they are not the matrix itself (columns
    that make up for the errors of others).
    """

    qtensor: QTensor
    notes: tuple[Note, ...] = ()
    values: Tensor | None = None


class Quantizer(Protocol):
    """``(matrix [out, in], scheme, evidence or None, shrink) -> Outcome``; ``needs`` says which statistics it reads.

    ``shrink`` are optional factors in (0, 1] of shape ``scheme.block_grid`` for the range of each block's grid;
    ``largest`` is the largest magnitude of all matrices that share one tensor-level scale.
    """

    @property
    def needs(self) -> frozenset[Need]: ...
    def __call__(
        self,
        matrix: Tensor,
        scheme: Scheme,
        evidence: InputStatistics | None,
        shrink: Tensor | None = None,
        largest: float | None = None,
    ) -> Outcome: ...


def quantizer_names() -> tuple[str, ...]:
    """Names of all quantisers, from the file names alone."""
    import quant.quantizers as package

    return tuple(sorted(module.name for module in pkgutil.iter_modules(package.__path__)))


def get_quantizer(name: str, options: tuple[Option, ...] = ()) -> Quantizer:
    """The quantiser of that name, with ``options`` in place of its defaults. Raises UsageError with the names there are."""
    if name not in quantizer_names():
        raise UsageError(f"no such quantiser: {name!r} (there are: {', '.join(quantizer_names())})")
    module = importlib.import_module(f"quant.quantizers.{name}")
    found: Quantizer = module.QUANTIZER
    known = [field.name for field in dataclasses.fields(found)]  # type: ignore[arg-type]  # every quantiser is a dataclass
    wrong = [option for option, _ in options if option not in known]
    if wrong:
        raise UsageError(f"{name} has no option {wrong[0]!r} (there are: {', '.join(known) or 'none'})")
    return dataclasses.replace(found, **dict(options)) if options else found  # type: ignore[type-var]
