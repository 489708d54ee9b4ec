"""QTensor: a quantised matrix, and the block view that scales and codes share.

``weight ~ (codes - zero) * scale``, block by block; on a float grid a code stands for the number that it means. Shapes follow
from the scheme: codes ``[out, in]``, scales and zeros ``scheme.block_grid((out, in))``. Arithmetic is float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quant.errors import SchemeError
from quant.grid import from_codes
from quant.scheme import Scheme

SCALE_DTYPES: dict[str, torch.dtype] = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "e8m0": torch.uint8,  # the biased exponent itself: torch's own type for it has no comparisons
    "e4m3": torch.float8_e4m3fn,
}


@dataclass(frozen=True, slots=True)
class QTensor:
    """Codes, stored scales and zero points of one ``[out, in]`` matrix.

    Attributes:
        scheme: grid, blocks and scale type.
        codes: ``[out, in]``, int8 for integers without zero points, uint8 otherwise (bit patterns for float grids).
        scales: ``[rows, columns]`` of ``scheme.block_grid``, in the stored type; finite and above zero, but of either sign for
            ``full``.
        zeros: uint8 of the same shape for ``zp``, float32 for ``fz``, None when symmetric.
        divisor: float32 ``[1]`` by which E4M3 scales are divided, None for all other scales.

    Raises:
        SchemeError: a shape or type that does not belong to the scheme; a scale that is zero, not finite, or
            negative and not ``full``.
    """

    scheme: Scheme
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    divisor: Tensor | None = None

    def __post_init__(self) -> None:
        grid = self.scheme.block_grid(self.shape)
        if tuple(self.scales.shape) != grid or self.scales.dtype != SCALE_DTYPES[self.scheme.scale]:
            raise SchemeError(
                f"{self.scheme}: scales {tuple(self.scales.shape)} {self.scales.dtype} do not fit codes {self.shape}"
            )
        if (self.zeros is None) != self.scheme.symmetric:
            raise SchemeError(f"{self.scheme}: zero points are {'missing' if self.zeros is None else 'not allowed'}")
        if self.zeros is not None and tuple(self.zeros.shape) != grid:
            raise SchemeError(f"{self.scheme}: zero points {tuple(self.zeros.shape)} do not fit codes {self.shape}")
        if (self.divisor is not None) != (self.scheme.scale == "e4m3"):
            raise SchemeError(f"{self.scheme}: a divisor of the scales is {'missing' if self.divisor is None else 'not allowed'}")
        wide = self.steps()
        if not bool((torch.isfinite(wide) & ((wide != 0) if self.scheme.zero == "full" else (wide > 0))).all()):
            raise SchemeError(f"{self.scheme}: a stored scale is zero, negative or not finite")

    @property
    def shape(self) -> tuple[int, int]:
        return (self.codes.shape[0], self.codes.shape[1])

    def to(self, device: str) -> QTensor:
        """The same on another device."""
        zeros, divisor = (None if part is None else part.to(device) for part in (self.zeros, self.divisor))
        return QTensor(self.scheme, self.codes.to(device), self.scales.to(device), zeros, divisor)

    def steps(self) -> Tensor:
        """The scales as numbers: float32 ``[rows, columns]``."""
        return real_scales(self.scales, self.scheme, self.divisor)

    def levels(self) -> Tensor:
        """What the codes mean where every scale is 1: float32 ``[out, in]``."""
        return from_blocks(self._block_levels(), self.shape)

    def _block_levels(self) -> Tensor:
        levels = to_blocks(from_codes(self.codes, self.scheme), self.scheme)
        return levels if self.zeros is None else levels - self.zeros.float().unsqueeze(-1)

    def dequantise(self) -> Tensor:
        """The float32 ``[out, in]`` matrix that the stored codes, scales and zero points mean."""
        return from_blocks(self._block_levels() * self.steps().unsqueeze(-1), self.shape)


def real_scales(scales: Tensor, scheme: Scheme, divisor: Tensor | None = None) -> Tensor:
    """Stored scales as float32 numbers: powers of two from their biased exponents, E4M3 scales divided by their divisor."""
    if scheme.scale == "e8m0":
        return torch.ldexp(torch.ones(scales.shape, device=scales.device), scales.to(torch.int32) - 127)
    wide = scales.float()
    return wide if divisor is None else wide / divisor


def to_blocks(matrix: Tensor, scheme: Scheme) -> Tensor:
    """``[out, in]`` as ``[rows, columns, size]`` blocks of the scheme.

    A short last group is filled up with copies of its last value, which change neither its minimum nor its maximum;
    ``from_blocks`` drops them again. No copy is made where the groups divide the width.
    """
    out, width = matrix.shape
    if scheme.blocks == "tensor":
        return matrix.reshape(1, 1, out * width)
    if scheme.blocks == "channel":
        return matrix.reshape(out, 1, width)
    size = int(scheme.blocks)
    missing = -width % size
    if missing:
        matrix = torch.cat([matrix, matrix[:, -1:].expand(out, missing)], dim=1)
    return matrix.reshape(out, -1, size)


def from_blocks(blocks: Tensor, shape: tuple[int, int]) -> Tensor:
    """The inverse of ``to_blocks`` for an ``[out, in]`` matrix of the given shape."""
    out, width = shape
    return blocks.reshape(out, -1)[:, :width].contiguous()


def block_sums(values: Tensor, scheme: Scheme) -> Tensor:
    """Sums ``[rows, columns]`` of an ``[out, in]`` matrix over the blocks of the scheme; a short last group sums what it has."""
    out, width = values.shape
    if scheme.blocks == "tensor":
        return values.sum().reshape(1, 1)
    size = width if scheme.blocks == "channel" else int(scheme.blocks)
    return torch.nn.functional.pad(values, (0, -width % size)).reshape(out, -1, size).sum(-1)
