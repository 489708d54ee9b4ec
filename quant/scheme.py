"""Scheme: the grid, the blocks and the stored scale type of one matrix.

A scheme is frozen and its string is its identity: ``Scheme.parse(str(s)) == s``. This module knows nothing of torch, of files
or of models, so that options can be checked before anything heavy is imported.

Grammar: ``int<bits>-<zero>-<blocks>-<scale>``

=========  ==========================================================================================================
bits       2 to 8
zero       ``sym``: signed codes in [-(2^(b-1)-1), 2^(b-1)-1], the *restricted* range: the most negative code is unused, so
           that a second quantisation changes nothing (but for blocks whose float16 scale is subnormal, and the last bit of
           float32 scales).
           ``zp``: codes 0 .. 2^b-1 with a stored integer zero point in the same range; the range always includes 0.
           ``fz``: the floating zero point of the source text's lab 4: round(-min/scale), unbounded; never stored by a codec.
blocks     ``g<size>`` along the input dimension (last one may be short), ``channel`` (one per output row), ``tensor``
scale      ``f16``, ``bf16`` or ``f32``: the type in which the scale is stored; codes are made with the stored scale
=========  ==========================================================================================================
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, cast

from quant.errors import SchemeError

Zero = Literal["sym", "zp", "fz"]
ScaleType = Literal["f16", "bf16", "f32"]
Blocks = int | Literal["channel", "tensor"]

SCALE_BYTES: dict[str, int] = {"f16": 2, "bf16": 2, "f32": 4}
MIN_BITS, MAX_BITS = 2, 8

_PATTERN = re.compile(r"int(\d+)-(sym|zp|fz)-(?:g(\d+)|(channel|tensor))-(f16|bf16|f32)")


@dataclass(frozen=True, slots=True)
class Scheme:
    """Integer grid of ``bits`` bits, block layout and stored scale type of one ``[out, in]`` matrix.

    Raises:
        SchemeError: bits outside 2..8, a group size below 1, or an unknown name.
    """

    bits: int
    zero: Zero = "sym"
    blocks: Blocks = 64
    scale: ScaleType = "f16"

    def __post_init__(self) -> None:
        if not MIN_BITS <= self.bits <= MAX_BITS:
            raise SchemeError(f"bits must be {MIN_BITS} to {MAX_BITS}, got {self.bits}")
        if self.zero not in ("sym", "zp", "fz"):
            raise SchemeError(f"zero point kind must be sym, zp or fz, got {self.zero!r}")
        if isinstance(self.blocks, int):
            if self.blocks < 1:
                raise SchemeError(f"group size must be 1 or more, or 'channel' or 'tensor'; got {self.blocks}")
        elif self.blocks not in ("channel", "tensor"):
            raise SchemeError(f"group size must be a number, 'channel' or 'tensor'; got {self.blocks!r}")
        if self.scale not in SCALE_BYTES:
            raise SchemeError(f"scale type must be one of {', '.join(SCALE_BYTES)}; got {self.scale!r}")

    def __str__(self) -> str:
        blocks = f"g{self.blocks}" if isinstance(self.blocks, int) else self.blocks
        return f"int{self.bits}-{self.zero}-{blocks}-{self.scale}"

    @classmethod
    def parse(cls, text: str) -> Scheme:
        """The scheme that ``text`` names; the inverse of ``str``. Raises SchemeError."""
        match = _PATTERN.fullmatch(text)
        if not match:
            raise SchemeError(f"no such scheme: {text!r} (for example int4-sym-g64-f16, int8-zp-channel-f32)")
        bits, zero, group, named, scale = match.groups()
        blocks = cast(Blocks, int(group) if group else named)
        return cls(int(bits), cast(Zero, zero), blocks, cast(ScaleType, scale))

    @property
    def symmetric(self) -> bool:
        return self.zero == "sym"

    @property
    def code_min(self) -> int:
        """Smallest code: -(2^(b-1)-1) when symmetric, 0 with a zero point."""
        return 1 - (1 << (self.bits - 1)) if self.symmetric else 0

    @property
    def code_max(self) -> int:
        """Largest code: 2^(b-1)-1 when symmetric, 2^b-1 with a zero point."""
        return (1 << (self.bits - 1)) - 1 if self.symmetric else (1 << self.bits) - 1

    def block_grid(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Shape ``[rows, columns]`` of the scales of an ``[out, in]`` matrix (a short last group counts)."""
        out, width = shape
        if self.blocks == "tensor":
            return (1, 1)
        if self.blocks == "channel":
            return (out, 1)
        return (out, -(-width // self.blocks))

    def bits_per_weight(self, shape: tuple[int, int]) -> float:
        """Ideal bits per weight with dense codes, stored scales and b-bit zero points; no padding or header."""
        rows, columns = self.block_grid(shape)
        per_block = 8 * SCALE_BYTES[self.scale] + (0 if self.symmetric else self.bits)
        return self.bits + per_block * rows * columns / (shape[0] * shape[1])
