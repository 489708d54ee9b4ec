"""Rounding to nearest, slowly: Python numbers, one weight at a time, types narrowed bit by bit. Shares nothing with ``quant``."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from quant.scheme import Blocks, Scheme

TINY = 2.0**-24  # smallest half-precision number above zero
UNIT = {"f16": 2.0**-11, "bf16": 2.0**-8, "f32": 2.0**-24}  # relative error of rounding a normal number


def f32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def bf16(value: float) -> float:
    """The upper half of a float32, rounded half to even."""
    word = struct.unpack("<I", struct.pack("<f", value))[0]
    upper, lower = word >> 16, word & 0xFFFF
    upper += lower > 0x8000 or (lower == 0x8000 and upper % 2 == 1)
    return float(struct.unpack("<f", struct.pack("<I", upper << 16))[0])


def stored_scale(value: float, kind: str) -> float:
    """float32 ``value`` as the scheme promises to store it: never zero, rounded up among half precision's subnormals."""
    if kind == "f16":
        if value < 2.0**-14:
            return max(math.ceil(value / TINY), 1) * TINY
        return float(struct.unpack("<e", struct.pack("<e", value))[0])
    return max(bf16(value) if kind == "bf16" else value, 2.0**-126)


@dataclass(frozen=True)
class Block:
    scale: float
    zero: float
    codes: list[int]
    values: list[float]


def oracle_block(weights: list[float], scheme: Scheme) -> Block:
    """Python's ``round`` is half to even. A float64 quotient narrowed to float32 is the float32 quotient."""
    low, high = min(weights), max(weights)
    if scheme.zero == "sym":
        scale = stored_scale(f32(max(-low, high) / (2 ** (scheme.bits - 1) - 1)), scheme.scale)
        least, most, zero = 1 - 2 ** (scheme.bits - 1), 2 ** (scheme.bits - 1) - 1, 0
    elif scheme.zero == "full":
        half = 2 ** (scheme.bits - 1)
        below, above = max(-low, 0.0), max(high, 0.0)
        upright = max(f32(below / half), f32(above / (half - 1)))
        mirrored = max(f32(above / half), f32(below / (half - 1)))
        scale = stored_scale(min(upright, mirrored), scheme.scale) * (-1 if mirrored < upright else 1)
        least, most, zero = -half, half - 1, 0
    else:
        if scheme.zero == "zp" or low == high:
            low, high = min(low, 0.0), max(high, 0.0)
        least, most = 0, 2**scheme.bits - 1
        scale = stored_scale(f32(f32(high - low) / most), scheme.scale)
        zero = round(f32(-low / scale))
        if scheme.zero == "zp":
            zero = min(max(zero, 0), most)
    codes = [min(max(round(f32(weight / scale)) + zero, least), most) for weight in weights]
    return Block(scale, zero, codes, [f32((code - zero) * scale) for code in codes])


def blocks_of(rows: list[list[float]], blocks: Blocks) -> Iterator[tuple[tuple[int, int], list[tuple[int, int]]]]:
    """(place in the scale grid, places in the matrix) of every block."""
    width = len(rows[0])
    if blocks == "tensor":
        yield (0, 0), [(row, column) for row in range(len(rows)) for column in range(width)]
        return
    size = width if blocks == "channel" else int(blocks)
    for row in range(len(rows)):
        for start in range(0, width, size):
            yield (row, start // size), [(row, column) for column in range(start, min(start + size, width))]
