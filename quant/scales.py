"""Stored scales: rounded to their type first, so that codes are made with the value a reader will see.

A stored scale is never zero, NaN or infinite, and negative only where the scheme has ``full`` range. Where half precision runs
out of normal numbers the scale is rounded *up* to the next subnormal, so that a tiny block is represented coarsely but not
clipped; where it overflows the scheme is refused.
Power-of-two scales are kept as their biased exponents (uint8), E4M3 scales under a float32 divisor of the whole tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quant.errors import SchemeError
from quant.grid import snap
from quant.qtensor import SCALE_DTYPES, QTensor, real_scales, to_blocks
from quant.scheme import Scheme

# Smallest positive stored scale: half precision may use its subnormals (kernels widen them exactly), the wide types may not,
# since processors that flush float32 subnormals to zero would divide by zero. For the same reason exponents start at -126, and
# a divisor is at most what keeps the smallest E4M3 scale over it a normal number.
_SMALLEST = {"f16": 2.0**-24, "bf16": 2.0**-126, "f32": 2.0**-126}
_E4M3_SMALLEST, _E4M3_LARGEST = 2.0**-9, 448.0
_SMALLEST_EXPONENT, _LARGEST_EXPONENT = -126, 127
_LARGEST_DIVISOR = 2.0**117


def store_scales(scales: Tensor, scheme: Scheme, divisor: Tensor | None = None) -> Tensor:
    """Round float32 scales to the stored type of ``scheme``, which is a floating one.

    Args:
        scales: float32, any shape; negative ones keep their sign (``full`` schemes have them).
        divisor: for E4M3 scales, what a reader will divide them by; float32 ``[1]``.

    Raises:
        SchemeError: a scale beyond the largest finite value of the stored type, with the type that would hold it.
    """
    if scheme.zero == "full":
        stored = _store_magnitudes(scales.abs(), scheme, divisor)
        return torch.where(scales < 0, -stored, stored)
    return _store_magnitudes(scales, scheme, divisor)


def _store_magnitudes(scales: Tensor, scheme: Scheme, divisor: Tensor | None) -> Tensor:
    stored = SCALE_DTYPES[scheme.scale]
    if scheme.scale == "e4m3":
        assert divisor is not None
        # Clamped before the cast: what a cast does with numbers beyond its range differs between releases and devices.
        return (scales * divisor).clamp(_E4M3_SMALLEST, _E4M3_LARGEST).to(stored)
    largest = float(scales.max()) if scales.numel() else 0.0
    if not largest <= torch.finfo(stored).max:
        raise SchemeError(
            f"{scheme}: a scale of {largest:g} overflows {scheme.scale}; store scales as bf16 or f32 (--scale-dtype)"
        )
    if scheme.scale == "f16":
        subnormal = scales < torch.finfo(stored).smallest_normal
        scales = torch.where(subnormal, torch.ceil(scales * 2.0**24) * 2.0**-24, scales)
    rounded = scales.clamp_min(_SMALLEST[scheme.scale]).to(stored)
    # Rounded up, the scale of a block at the end of float32's range would read back as infinity.
    beyond = ~torch.isfinite(rounded.float() * scheme.top)
    return torch.where(beyond, torch.nextafter(rounded, torch.zeros_like(rounded)), rounded) if bool(beyond.any()) else rounded


def power_of_two(largest: Tensor, scheme: Scheme) -> Tensor:
    """Biased exponents (uint8) of the power-of-two scales for blocks whose largest magnitude is ``largest`` (float32).

    ``floor``: 2^(floor(log2 largest) - emax), as OCP MX v1.0; numbers above the largest element are clipped. ``even``: the same
    after rounding ``largest`` to the element's mantissa, so that what would round up to the next power takes it. ``ceil``: the
    smallest power with which nothing is clipped. Beyond 2^(127 - emax) no scale is given: the largest element would read back as
    infinity, so that what lies there is clipped by any rule.
    """
    element = scheme.format
    mantissa, exponent = torch.frexp(largest)  # mantissa from 1/2 on, 0 for 0
    power = exponent - 1 - element.emax
    if scheme.rule == "even" and element.exponent_bits:
        # The next power from the number on that would round up to it: all mantissa bits set, and half a unit of the last.
        power = power + (mantissa >= 1 - 2.0 ** -(element.mantissa_bits + 2)).int()
    elif scheme.rule == "ceil":
        power = power + (mantissa > math.frexp(scheme.top)[0]).int()
    power = torch.where(largest > 0, power, torch.full_like(power, _SMALLEST_EXPONENT))
    return (power.clamp(_SMALLEST_EXPONENT, _LARGEST_EXPONENT - element.emax) + 127).to(torch.uint8)


def tensor_divisor(largest: float, scheme: Scheme, device: torch.device) -> Tensor | None:
    """float32 ``[1]`` that maps the tensor's largest magnitude to the largest E4M3 scale; None where the scheme has none."""
    if scheme.scale != "e4m3":
        return None
    found = _E4M3_LARGEST * scheme.top / largest if largest else 1.0
    return torch.tensor([min(found, _LARGEST_DIVISOR)], device=device)


def block_range(matrix: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Lower and upper end ``[rows, columns]`` (float32) of what each block's grid must reach.

    ``sym``: minus and plus the largest magnitude. ``full`` and ``zp``: the range with 0 included. ``fz``: the plain range
    (with 0 if the block is constant).

    Raises:
        SchemeError: a matrix with NaN or infinities, which no grid can hold.
    """
    blocks = to_blocks(matrix.float(), scheme)
    low, high = torch.aminmax(blocks, dim=-1)
    if not bool(torch.isfinite(low).all() & torch.isfinite(high).all()):
        raise SchemeError(f"{scheme}: the matrix holds NaN or infinities; mend the checkpoint")
    if scheme.zero == "sym":
        top = torch.maximum(-low, high)
        return -top, top
    if scheme.zero in ("full", "zp"):
        return low.clamp_max(0), high.clamp_min(0)
    constant = low == high  # no range to divide: 0 is taken in, or the zero point would overflow
    return torch.where(constant, low.clamp_max(0), low), torch.where(constant, high.clamp_min(0), high)


def scales_from_range(low: Tensor, high: Tensor, scheme: Scheme, divisor: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Stored scales and zero points (``[rows, columns]`` each) of a grid that spans ``low`` .. ``high``.

    The zero point is computed with the *stored* scale. For ``fz`` it is float32 and unbounded, as in the source text's lab 4.

    Raises:
        SchemeError: a scale that the stored type cannot hold, or a range from low to high that float32 cannot.
    """
    if scheme.scale == "e8m0":
        return power_of_two(high, scheme), None
    if scheme.zero == "full":
        return store_scales(_signed_scales(low, high, scheme), scheme), None
    if scheme.symmetric:
        return store_scales(high / scheme.top, scheme, divisor), None
    span = high - low
    if not bool(torch.isfinite(span).all()):
        raise SchemeError(f"{scheme}: a block reaches from {float(low.min()):g} to {float(high.max()):g}; use a symmetric scheme")
    scales = store_scales(span / scheme.code_max, scheme)
    zeros = torch.round(-low / scales.float())
    if scheme.zero == "fz":
        return scales, zeros
    return scales, zeros.clamp(0, scheme.code_max).to(torch.uint8)


def _signed_scales(low: Tensor, high: Tensor, scheme: Scheme) -> Tensor:
    """The smallest scales with which codes -2^(b-1) .. 2^(b-1)-1 reach both ends, of the sign that needs less; else positive."""
    upright = torch.maximum(-low / -scheme.code_min, high / scheme.code_max)
    mirrored = torch.maximum(high / -scheme.code_min, -low / scheme.code_max)
    return torch.where(mirrored < upright, -mirrored, upright)


@dataclass(frozen=True, slots=True)
class BlockGrid:
    """Stored scales, zero points and divisor of one matrix, before any code is made."""

    scheme: Scheme
    scales: Tensor
    zeros: Tensor | None
    divisor: Tensor | None

    @classmethod
    def of(cls, matrix: Tensor, scheme: Scheme, shrink: Tensor | None = None, largest: float | None = None) -> BlockGrid:
        """The grid that spans each block's range, times ``shrink`` (``scheme.block_grid``) where given.

        Args:
            largest: largest magnitude of all matrices that share the tensor-level scale; by default of this one.
        """
        low, high = block_range(matrix, scheme)
        divisor = tensor_divisor(float(high.max()) if largest is None else largest, scheme, high.device)
        if largest is not None and scheme.blocks == "tensor" and scheme.symmetric:
            low, high = torch.full_like(low, -largest), torch.full_like(high, largest)
        if shrink is not None:
            low, high = low * shrink, high * shrink
        return cls(scheme, *scales_from_range(low, high, scheme, divisor), divisor)

    def qtensor(self, codes: Tensor) -> QTensor:
        return QTensor(self.scheme, codes, self.scales, self.zeros, self.divisor)

    def steps(self) -> Tensor:
        """The scales as numbers: float32 ``[rows, columns]``."""
        return real_scales(self.scales, self.scheme, self.divisor)


def encode(matrix: Tensor, scheme: Scheme, scales: Tensor, zeros: Tensor | None, divisor: Tensor | None = None) -> Tensor:
    """Snapped values ``[rows, columns, size]`` (float32, block view): the nearest numbers of the grid (``quant.grid``)."""
    blocks = to_blocks(matrix.float(), scheme)
    steps = real_scales(scales, scheme, divisor).unsqueeze(-1)
    return snap(blocks / steps, 0.0 if zeros is None else zeros.float().unsqueeze(-1), scheme)
