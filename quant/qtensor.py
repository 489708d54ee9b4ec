"""QTensor: a quantised matrix, and the block view that scales and codes share.

``weight ~ (codes - zero) * scale``, block by block. Shapes follow from the scheme: codes ``[out, in]``, scales and zeros
``scheme.block_grid((out, in))``. Arithmetic is float32 whatever the stored scale type is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quant.errors import SchemeError
from quant.scheme import Scheme

SCALE_DTYPES: dict[str, torch.dtype] = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}


@dataclass(frozen=True, slots=True)
class QTensor:
    """Codes, stored scales and zero points of one ``[out, in]`` matrix.

    Attributes:
        scheme: grid, blocks and scale type.
        codes: int8 ``[out, in]`` when symmetric, uint8 otherwise.
        scales: ``[rows, columns]`` of ``scheme.block_grid``, in the stored type; finite and above zero.
        zeros: uint8 of the same shape for ``zp``, float32 for ``fz``, None when symmetric.

    Raises:
        SchemeError: a shape or type that does not belong to the scheme, or a scale that is not finite and positive.
    """

    scheme: Scheme
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None

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
        wide = self.scales.float()
        if not bool((torch.isfinite(wide) & (wide > 0)).all()):
            raise SchemeError(f"{self.scheme}: a stored scale is zero, negative or not finite")

    @property
    def shape(self) -> tuple[int, int]:
        return (self.codes.shape[0], self.codes.shape[1])

    def to(self, device: str) -> QTensor:
        """The same on another device."""
        zeros = None if self.zeros is None else self.zeros.to(device)
        return QTensor(self.scheme, self.codes.to(device), self.scales.to(device), zeros)

    def dequantise(self) -> Tensor:
        """The float32 ``[out, in]`` matrix that the stored codes, scales and zero points mean."""
        codes = to_blocks(self.codes.float(), self.scheme)
        if self.zeros is not None:
            codes = codes - self.zeros.float().unsqueeze(-1)
        return from_blocks(codes * self.scales.float().unsqueeze(-1), self.shape)


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
