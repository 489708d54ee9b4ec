"""Number formats, slowly: each code by the specification's own formula in exact fractions. Shares nothing with ``quant``.

OCP Microscaling Formats (MX) v1.0, section 5.3: a normal number is (-1)^S x 2^(E - bias) x (1 + M / 2^m), a subnormal one
(-1)^S x 2^(1 - bias) x M / 2^m; INT8 is two's complement times 2^-6. The FNUZ variant has a bias one larger and one NaN, 0x80.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache


@dataclass(frozen=True)
class Format:
    """``nonfinite``: codes that mean no finite number. Exponent bits 0: the fixed-point INT8 of MX."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    nonfinite: frozenset[int] = frozenset()

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits


FORMATS = {
    "e4m3": Format(4, 3, 7, frozenset({0x7F, 0xFF})),
    "e5m2": Format(5, 2, 15, frozenset({*range(0x7C, 0x80), *range(0xFC, 0x100)})),
    "e4m3fnuz": Format(4, 3, 8, frozenset({0x80})),
    "e3m2": Format(3, 2, 3),
    "e2m3": Format(2, 3, 1),
    "e2m1": Format(2, 1, 1),
    "mxint8": Format(0, 7, 0),
}
# Largest and smallest positive numbers and the largest exponent, as printed in the specification's tables 1 to 5.
PRINTED = {
    "e4m3": ("448", "1/512", 8),
    "e5m2": ("57344", "1/65536", 15),
    "e4m3fnuz": ("240", "1/1024", 7),
    "e3m2": ("28", "1/16", 4),
    "e2m3": ("15/2", "1/8", 2),
    "e2m1": ("6", "1/2", 2),
    "mxint8": ("127/64", "1/64", 0),
}


def meaning(name: str, code: int) -> Fraction | None:
    """The number that ``code`` means, None for NaN and infinities."""
    found = FORMATS[name]
    if code in found.nonfinite:
        return None
    if not found.exponent_bits:
        return Fraction(code - 256 if code >= 128 else code, 64)
    text = f"{code:0{found.bits}b}"
    exponent = int(text[1 : 1 + found.exponent_bits], 2)
    fraction = Fraction(int(text[1 + found.exponent_bits :], 2), 2**found.mantissa_bits)
    scale = two_to(max(exponent, 1) - found.bias)
    sign = -1 if text[0] == "1" else 1
    return sign * scale * (fraction if exponent == 0 else 1 + fraction)


def numbers(name: str) -> dict[int, Fraction]:
    """All codes that mean a finite number; the most negative one of INT8 is left out, which the specification allows."""
    codes = {code: meaning(name, code) for code in range(2 ** FORMATS[name].bits)}
    return {code: value for code, value in codes.items() if value is not None and not (name == "mxint8" and code == 0x80)}


@cache
def _ordered(name: str) -> list[tuple[Fraction, int]]:
    """Numbers in rising order with the parity of their code; zero once."""
    found = {value: code % 2 for code, value in numbers(name).items()}
    return sorted(found.items())


def nearest(name: str, value: Fraction) -> Fraction:
    """The number of the format next to ``value``, half way to the even code, the largest one beyond the range."""
    table = _ordered(name)
    place = bisect.bisect_left(table, (value, 0))
    around = table[max(place - 1, 0) : place + 1]
    return min((abs(number - value), odd, number) for number, odd in around)[2]


def two_to(power: int) -> Fraction:
    return Fraction(2**power) if power >= 0 else Fraction(1, 2**-power)


def floor_log2(value: Fraction) -> int:
    """The largest e with 2^e <= value."""
    power = value.numerator.bit_length() - value.denominator.bit_length()
    return power if two_to(power) <= value else power - 1


def block_power(name: str, rule: str, block: Iterable[Fraction]) -> int:
    """Exponent of the shared scale of a block that is not all zero.

    ``floor``: section 6.3 of the specification. ``ceil``: the smallest power with which nothing exceeds the largest number.
    ``even``: the largest magnitude is first rounded to the element's mantissa, half up.
    """
    top = max(abs(value) for value in block)
    largest, _, emax = PRINTED[name]
    if rule == "ceil":
        power = floor_log2(top / Fraction(largest))
        return power if Fraction(largest) * two_to(power) >= top else power + 1
    if rule == "even" and FORMATS[name].exponent_bits:
        unit = two_to(floor_log2(top) - FORMATS[name].mantissa_bits)
        top = (top / unit + Fraction(1, 2)).__floor__() * unit
    return floor_log2(top) - emax
