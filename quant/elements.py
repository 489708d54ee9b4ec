"""Number formats of single weights: what each code means, computed from the definition of the format. No torch is imported here.

Sources: OCP Microscaling Formats (MX) v1.0 for E4M3, E5M2, E3M2, E2M3, E2M1 and INT8; the FNUZ variant as in the LLVM types
``Float8E4M3FNUZ`` (bias one larger, one NaN in place of minus zero, no infinity).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

Special = Literal["none", "ieee", "fn", "fnuz"]


@dataclass(frozen=True, slots=True)
class Element:
    """A float format: sign bit, ``exponent_bits``, ``mantissa_bits``; or with no exponent a fixed-point number (INT8 of MX).

    ``special`` says which codes are no finite numbers: none; ``ieee`` the whole last exponent (infinity, NaN); ``fn`` only the
    code with all bits set; ``fnuz`` only minus zero.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    special: Special = "none"

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def emax(self) -> int:
        """Exponent of the largest finite number."""
        return math.frexp(self.largest)[1] - 1

    @property
    def largest(self) -> float:
        return _largest(self)

    @property
    def smallest(self) -> float:
        """Smallest number above zero (subnormal where there are subnormals)."""
        return min(value for value in self.values() if value > 0)

    @property
    def epsilon(self) -> float:
        """Distance from 1 to the next larger number."""
        return min(value for value in self.values() if value > 1) - 1

    def values(self) -> tuple[float, ...]:
        """The value of each of the 2^bits codes, in order of the unsigned code; NaN and infinities included."""
        return _values(self)

    def value(self, code: int) -> float:
        """What the unsigned ``code`` means."""
        negative, rest = code >> (self.bits - 1), code & ((1 << (self.bits - 1)) - 1)
        if not self.exponent_bits:  # two's complement with an implied scale: 1 sign, 1 integer, the rest fraction bits
            return math.ldexp(code - (negative << self.bits), 1 - self.mantissa_bits)
        exponent, mantissa = rest >> self.mantissa_bits, rest & ((1 << self.mantissa_bits) - 1)
        top = (1 << self.exponent_bits) - 1
        if self.special == "ieee" and exponent == top:
            return math.nan if mantissa else math.copysign(math.inf, -negative or 1)
        if self.special == "fn" and rest == (1 << (self.bits - 1)) - 1:
            return math.nan
        if self.special == "fnuz" and negative and not rest:
            return math.nan
        fraction = mantissa / (1 << self.mantissa_bits)
        size = math.ldexp(1 + fraction, exponent - self.bias) if exponent else math.ldexp(fraction, 1 - self.bias)
        return -size if negative else size


@cache
def _values(element: Element) -> tuple[float, ...]:
    return tuple(element.value(code) for code in range(1 << element.bits))


@cache
def _largest(element: Element) -> float:
    return max(value for value in element.values() if math.isfinite(value))


ELEMENTS = {
    element.name: element
    for element in (
        Element("e4m3", 4, 3, 7, "fn"),
        Element("e5m2", 5, 2, 15, "ieee"),
        Element("e4m3fnuz", 4, 3, 8, "fnuz"),
        Element("e3m2", 3, 2, 3),
        Element("e2m3", 2, 3, 1),
        Element("e2m1", 2, 1, 1),
        Element("mxint8", 0, 7, 0),
    )
}
