"""What each number format can say, worked out from its table of codes: range, step after 1, smallest numbers. No torch here."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from quant.elements import ELEMENTS
from quant.scheme import MAX_BITS, MIN_BITS, Scheme


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """``use`` is ``codes`` or ``scales``. ``numbers`` counts the different finite ones; ``step`` is from 1 to the next larger.

    ``step`` is None where 1 is no number of the format or its largest one.
    """

    name: str
    use: str
    bits: int
    numbers: int
    lowest: float
    largest: float
    smallest: float
    step: float | None
    specials: int


def number_formats() -> tuple[NumberFormat, ...]:
    """Integers, float elements and scale types, every figure from all codes of the format (but for f32, from IEEE 754)."""
    integers = [Scheme(bits, "sym", "channel") for bits in range(MIN_BITS, MAX_BITS + 1)]
    integers += [Scheme(bits, zero, "channel") for zero in ("full", "zp") for bits in range(MIN_BITS, MAX_BITS + 1)]
    found = [
        _of(f"int{s.bits}-{s.zero}", "codes", s.bits, [float(c) for c in range(s.code_min, s.code_max + 1)]) for s in integers
    ]
    for name, element in ELEMENTS.items():
        top = Scheme.parse(f"{name}-channel-f32").top  # the most negative number of INT8 is never used
        values = [value for value in element.values() if not math.isfinite(value) or abs(value) <= top]
        found.append(_of(name, "codes", element.bits, values))
    halves = np.arange(1 << 16, dtype=np.uint32)
    found.append(_of("e8m0", "scales", 8, [*(2.0 ** (code - 127) for code in range(255)), math.nan]))
    found.append(_of("f16", "scales", 16, halves.astype(np.uint16).view(np.float16).astype(np.float64).tolist()))
    found.append(_of("bf16", "scales", 16, (halves << np.uint32(16)).view(np.float32).tolist()))
    single = np.finfo(np.float32)
    finite = 2 * (255 << 23) - 1  # one of the two zeros counts
    largest, smallest, step = float(single.max), float(single.smallest_subnormal), float(single.eps)
    found.append(NumberFormat("f32", "scales", 32, finite, -largest, largest, smallest, step, (1 << 32) - finite - 1))
    return tuple(found)


def _of(name: str, use: str, bits: int, values: Iterable[float]) -> NumberFormat:
    every = list(values)
    finite = sorted({value for value in every if math.isfinite(value)})
    above = [value for value in finite if value > 1]
    return NumberFormat(
        name,
        use,
        bits,
        len(finite),
        finite[0],
        finite[-1],
        min(value for value in finite if value > 0),
        above[0] - 1 if above and 1.0 in finite else None,
        sum(not math.isfinite(value) for value in every),
    )
