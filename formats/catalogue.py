"""The schemes that the project knows by name, with their exact bytes for given matrices and the layouts that hold them.

Everything follows from layouts; no torch is imported here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from formats.codec import codec_names, default_codec, get_codec
from formats.header import tensor_bytes
from quant.scheme import ALIASES, MAX_BITS, MIN_BITS, Scheme

Shape = tuple[int, int]
_COUNTED = ("codes", "scales", "zeros")


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A scheme for a list of matrices.

    Attributes:
        names: what it is called besides its own string.
        codecs: layouts that hold it for every one of the matrices; the first is what a run uses by default.
        refusals: why the others do not, by layout.
        ideal_bits: bits per weight of the scheme itself; ``stored_bits`` what the default layout takes for codes, scales and zero
            points of these matrices, None where no layout holds it.
        engines: families of engines that read the default layout (``quant_method``), none for the project's own.
    """

    scheme: Scheme
    names: tuple[str, ...]
    codecs: tuple[str, ...]
    refusals: dict[str, str]
    ideal_bits: float
    stored_bits: float | None
    engines: tuple[str, ...]
    advice: tuple[str, ...]


def known_schemes() -> tuple[Scheme, ...]:
    """Integers of every width in groups of 64, some other common layouts of blocks, and everything that has a name."""
    integers = [Scheme(bits) for bits in range(MIN_BITS, MAX_BITS + 1)]
    others = [Scheme(4, "sym", 32), Scheme(4, "sym", 128), Scheme(4, "zp", 64), *(Scheme(bits, "full") for bits in (2, 3, 4))]
    others += [Scheme(8, "sym", "channel"), Scheme(8, "sym", "tensor")]
    rules = [Scheme.parse(f"e2m1-b32-e8m0.{rule}") for rule in ("even", "ceil")]
    return (*integers, *others, *(Scheme.parse(text) for text in ALIASES.values()), *rules)


def catalogue_entry(scheme: Scheme, shapes: Sequence[Shape]) -> CatalogueEntry:
    """The scheme's entry for matrices ``[out, in]`` of these shapes, at least one."""
    refusals = {name: reason for name in codec_names() if (reason := _refusal(name, scheme, shapes)) is not None}
    usual = default_codec(scheme)
    held = sorted((name for name in codec_names() if name not in refusals), key=lambda name: (name != usual, name))
    elements = sum(math.prod(shape) for shape in shapes)
    first = get_codec(held[0]) if held else None
    stored = None if first is None else 8 * sum(_stored_bytes(first.name, scheme, shape) for shape in shapes) / elements
    return CatalogueEntry(
        scheme,
        tuple(name for name, text in ALIASES.items() if text == str(scheme)),
        tuple(held),
        refusals,
        sum(scheme.bits_per_weight(shape) * math.prod(shape) for shape in shapes) / elements,
        stored,
        (first.quant_method,) if first is not None and first.quant_method is not None else (),
        first.advice(scheme) if first is not None else (),
    )


def _refusal(codec: str, scheme: Scheme, shapes: Sequence[Shape]) -> str | None:
    return next((reason for shape in shapes if (reason := get_codec(codec).refusal(scheme, shape)) is not None), None)


def _stored_bytes(codec: str, scheme: Scheme, shape: Shape) -> int:
    return sum(tensor_bytes(part.dtype, part.shape) for part in get_codec(codec).layout(scheme, shape) if part.role in _COUNTED)
