"""Stored scales: rounded to their type first, so that codes are made with the value a reader will see.

A stored scale is never zero, NaN or infinite. Where half precision runs out of normal numbers the scale is rounded *up*
to the next subnormal, so that a tiny block is represented coarsely but not clipped; where it overflows the scheme is refused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quant.errors import SchemeError
from quant.qtensor import SCALE_DTYPES, to_blocks
from quant.scheme import Scheme

# Smallest positive stored scale: half precision may use its subnormals (kernels widen them exactly), the wide types may not,
# since processors that flush float32 subnormals to zero would divide by zero.
_SMALLEST = {"f16": 2.0**-24, "bf16": 2.0**-126, "f32": 2.0**-126}


def store_scales(scales: Tensor, scheme: Scheme) -> Tensor:
    """Round float32 scales to the stored type of ``scheme``.

    Args:
        scales: float32, any shape, not negative.

    Raises:
        SchemeError: a scale beyond the largest finite value of the stored type, with the type that would hold it.
    """
    stored = SCALE_DTYPES[scheme.scale]
    largest = float(scales.max()) if scales.numel() else 0.0
    if not largest <= torch.finfo(stored).max:
        raise SchemeError(
            f"{scheme}: a scale of {largest:g} overflows {scheme.scale}; store scales as bf16 or f32 (--scale-dtype)"
        )
    if scheme.scale == "f16":
        subnormal = scales < torch.finfo(stored).smallest_normal
        scales = torch.where(subnormal, torch.ceil(scales * 2.0**24) * 2.0**-24, scales)
    return scales.clamp_min(_SMALLEST[scheme.scale]).to(stored)


def block_range(matrix: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Lower and upper end ``[rows, columns]`` (float32) of what each block's grid must reach.

    Symmetric: minus and plus the largest magnitude. ``zp``: the range with 0 included. ``fz``: the plain range (with 0 if
    the block is constant).
    """
    blocks = to_blocks(matrix.float(), scheme)
    if scheme.symmetric:
        top = blocks.abs().amax(-1)
        return -top, top
    low, high = torch.aminmax(blocks, dim=-1)
    if scheme.zero == "zp":
        return low.clamp_max(0), high.clamp_min(0)
    constant = low == high  # no range to divide: 0 is taken in, or the zero point would overflow
    return torch.where(constant, low.clamp_max(0), low), torch.where(constant, high.clamp_min(0), high)


def scales_from_range(low: Tensor, high: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor | None]:
    """Stored scales and zero points (``[rows, columns]`` each) of a grid that spans ``low`` .. ``high``.

    The zero point is computed with the *stored* scale. For ``fz`` it is float32 and unbounded, as in the source text's lab 4.
    """
    if scheme.symmetric:
        return store_scales(high / scheme.code_max, scheme), None
    scales = store_scales((high - low) / scheme.code_max, scheme)
    zeros = torch.round(-low / scales.float())
    if scheme.zero == "fz":
        return scales, zeros
    return scales, zeros.clamp(0, scheme.code_max).to(torch.uint8)


def encode(matrix: Tensor, scheme: Scheme, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """Codes ``[rows, columns, size]`` (float32 integers, block view): nearest grid point, half to even, clamped to the grid."""
    blocks = to_blocks(matrix.float(), scheme)
    codes = torch.round(blocks / scales.float().unsqueeze(-1))
    if zeros is not None:
        codes += zeros.float().unsqueeze(-1)
    return codes.clamp_(scheme.code_min, scheme.code_max)
