"""Scheme: the grid, the blocks and the stored scale type of one matrix.

A scheme is frozen and its string is its identity: ``Scheme.parse(str(s)) == s``. This module knows nothing of torch, of files
or of models, so that options can be checked before anything heavy is imported.

Integers: ``int<bits>-<zero>-<blocks>-<scale>``, for example ``int4-sym-g64-f16``

=========  ==========================================================================================================
bits       2 to 8
zero       ``sym``: signed codes in [-(2^(b-1)-1), 2^(b-1)-1], the *restricted* range: the most negative code is unused, so
           that a second quantisation changes nothing (but for blocks whose float16 scale is subnormal, and the last bit of
           float32 scales).
           ``full``: symmetric too, but all codes from -2^(b-1) to 2^(b-1)-1, and a scale that may be *negative*: the extra code
           goes to the side that reaches further. At 2 and 3 bits that is a third and a seventh more numbers for no more bytes.
           ``zp``: codes 0 .. 2^b-1 with a stored integer zero point in the same range; the range always includes 0.
           ``fz``: the floating zero point of the source text's lab 4: round(-min/scale), unbounded; only ``dense`` stores it.
blocks     ``g<size>`` along the input dimension (last one may be short), ``channel`` (one per output row), ``tensor``
scale      ``f16``, ``bf16`` or ``f32``: the type in which the scale is stored; codes are made with the stored scale
=========  ==========================================================================================================

Floats: ``<element>-<blocks>-<scale>``, for example ``e2m1-b32-e8m0.floor``

=========  ==========================================================================================================
element    ``e4m3``, ``e5m2``, ``e4m3fnuz``, ``e3m2``, ``e2m3``, ``e2m1``, ``mxint8`` (``quant.elements``); codes are bit patterns
blocks     ``b<size>``, ``channel`` or ``tensor``
scale      ``f16``, ``bf16``, ``f32``; or a power of two ``e8m0`` by a named rule: ``floor`` (OCP MX v1.0: the largest number's
           exponent; what lies above the largest element is clipped), ``even`` (the largest number is rounded to the element's
           mantissa first, as compressed-tensors does) or ``ceil`` (nothing is clipped); or ``e4m3.f32``: E4M3 block scales
           under one float32 divisor of the whole tensor (NVFP4)
=========  ==========================================================================================================
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, cast, get_args

from quant.elements import ELEMENTS, Element
from quant.errors import SchemeError

Zero = Literal["sym", "full", "zp", "fz"]
ZEROS: tuple[Zero, ...] = get_args(Zero)
ScaleType = Literal["f16", "bf16", "f32", "e8m0", "e4m3"]
Rule = Literal["", "floor", "even", "ceil", "f32"]
Blocks = int | Literal["channel", "tensor"]

SCALE_BYTES: dict[str, int] = {"f16": 2, "bf16": 2, "f32": 4}
_BLOCK_SCALE_BYTES = SCALE_BYTES | {"e8m0": 1, "e4m3": 1}
_RULES: dict[str, tuple[str, ...]] = {"e8m0": ("floor", "even", "ceil"), "e4m3": ("f32",)}
MIN_BITS, MAX_BITS = 2, 8

_INTEGER = re.compile(r"int(\d+)-(sym|full|zp|fz)-(?:g(\d+)|(channel|tensor))-(f16|bf16|f32)")
_FLOAT = re.compile(rf"({'|'.join(ELEMENTS)})-(?:b(\d+)|(channel|tensor))-(f16|bf16|f32|e8m0|e4m3)(?:\.(\w+))?")

# Names by which the field calls some of them; accepted wherever a scheme is named.
ALIASES = {
    "mxfp8": "e4m3-b32-e8m0.floor",
    "mxfp8-e5m2": "e5m2-b32-e8m0.floor",
    "mxfp6-e2m3": "e2m3-b32-e8m0.floor",
    "mxfp6-e3m2": "e3m2-b32-e8m0.floor",
    "mxfp4": "e2m1-b32-e8m0.floor",
    "mxint8": "mxint8-b32-e8m0.floor",
    "nvfp4": "e2m1-b16-e4m3.f32",
    "fp8": "e4m3-channel-f32",
    "fp8-tensor": "e4m3-tensor-f32",
    "fp8-fnuz": "e4m3fnuz-channel-f32",
}


@dataclass(frozen=True, slots=True)
class Scheme:
    """Grid, block layout and stored scale type of one ``[out, in]`` matrix.

    Attributes:
        bits: bits of a code; those of the element where it is none of ``int``.
        element: ``int``, or a name of ``quant.elements.ELEMENTS``.
        rule: how an ``e8m0`` scale is chosen; ``f32`` for ``e4m3`` scales under a float32 divisor.

    Raises:
        SchemeError: bits outside 2..8, a group size below 1, an unknown name, or parts that do not go together.
    """

    bits: int
    zero: Zero = "sym"
    blocks: Blocks = 64
    scale: ScaleType = "f16"
    element: str = "int"
    rule: Rule = ""

    def __post_init__(self) -> None:
        if not MIN_BITS <= self.bits <= MAX_BITS:
            raise SchemeError(f"bits must be {MIN_BITS} to {MAX_BITS}, got {self.bits}")
        if self.zero not in ZEROS:
            raise SchemeError(f"zero point kind must be one of {', '.join(ZEROS)}; got {self.zero!r}")
        if isinstance(self.blocks, int):
            if self.blocks < 1:
                raise SchemeError(f"group size must be 1 or more, or 'channel' or 'tensor'; got {self.blocks}")
        elif self.blocks not in ("channel", "tensor"):
            raise SchemeError(f"group size must be a number, 'channel' or 'tensor'; got {self.blocks!r}")
        known = SCALE_BYTES if self.element == "int" else _BLOCK_SCALE_BYTES
        if self.scale not in known:
            raise SchemeError(f"scale type must be one of {', '.join(known)}; got {self.scale!r}")
        if self.element != "int":
            self._check_element()
        elif self.rule:
            raise SchemeError(f"an integer grid has no scale rule, got {self.rule!r}")

    def _check_element(self) -> None:
        if self.element not in ELEMENTS:
            raise SchemeError(f"element must be int or one of {', '.join(ELEMENTS)}; got {self.element!r}")
        if self.bits != ELEMENTS[self.element].bits or self.zero != "sym":
            raise SchemeError(f"{self.element} has {ELEMENTS[self.element].bits} bits and no zero point")
        rules = _RULES.get(self.scale, ("",))
        if self.rule not in rules:
            raise SchemeError(f"{self.scale} scales take the rule {' or '.join(rules) or 'none'}, got {self.rule!r}")
        if self.rule and not isinstance(self.blocks, int):
            raise SchemeError(f"{self.scale} scales belong to blocks of a size, not to a {self.blocks}")

    def __str__(self) -> str:
        size = isinstance(self.blocks, int)
        if self.element == "int":
            return f"int{self.bits}-{self.zero}-{f'g{self.blocks}' if size else self.blocks}-{self.scale}"
        rule = f".{self.rule}" if self.rule else ""
        return f"{self.element}-{f'b{self.blocks}' if size else self.blocks}-{self.scale}{rule}"

    @classmethod
    def parse(cls, text: str) -> Scheme:
        """The scheme that ``text`` names, by its own string or by an alias; the inverse of ``str``. Raises SchemeError."""
        text = ALIASES.get(text, text)
        if match := _INTEGER.fullmatch(text):
            bits, zero, group, named, scale = match.groups()
            blocks = cast(Blocks, int(group) if group else named)
            return cls(int(bits), cast(Zero, zero), blocks, cast(ScaleType, scale))
        if match := _FLOAT.fullmatch(text):
            element, size, named, scale, rule = match.groups()
            blocks = cast(Blocks, int(size) if size else named)
            return cls(ELEMENTS[element].bits, "sym", blocks, cast(ScaleType, scale), element, cast(Rule, rule or ""))
        raise SchemeError(
            f"no such scheme: {text!r} (for example int4-sym-g64-f16, int8-zp-channel-f32, e2m1-b32-e8m0.floor; or a name: "
            f"{', '.join(ALIASES)})"
        )

    @property
    def integer(self) -> bool:
        return self.element == "int"

    @property
    def format(self) -> Element:
        """The float format of the codes. Raises SchemeError for integers."""
        if self.integer:
            raise SchemeError(f"{self} is an integer grid")
        return ELEMENTS[self.element]

    @property
    def symmetric(self) -> bool:
        """Whether there is no zero point: ``sym`` and ``full``."""
        return self.zero in ("sym", "full")

    @property
    def code_min(self) -> int:
        """Smallest code: -(2^(b-1)-1) for ``sym``, -2^(b-1) for ``full``, 0 with a zero point and for bit patterns."""
        if self.zero == "full":
            return -(1 << (self.bits - 1))
        return 1 - (1 << (self.bits - 1)) if self.symmetric and self.integer else 0

    @property
    def code_max(self) -> int:
        """Largest code: 2^(b-1)-1 when symmetric, 2^b-1 with a zero point and for bit patterns."""
        return (1 << (self.bits - 1)) - 1 if self.symmetric and self.integer else (1 << self.bits) - 1

    @property
    def top(self) -> float:
        """The grid's largest magnitude before scaling: of all codes of integers, of the finite numbers of floats."""
        if self.integer:
            return max(self.code_max, -self.code_min)
        return 127 / 64 if self.element == "mxint8" else self.format.largest

    @property
    def shares_range(self) -> bool:
        """Whether a float grid has a scale or divisor of the whole matrix, which fused matrices must have in common."""
        return not self.integer and (self.blocks == "tensor" or self.scale == "e4m3")

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
        per_block = 8 * _BLOCK_SCALE_BYTES[self.scale] + (0 if self.symmetric else self.bits)
        divisor = 32 if self.scale == "e4m3" else 0
        return self.bits + (per_block * rows * columns + divisor) / (shape[0] * shape[1])
