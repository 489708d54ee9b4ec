"""Round to nearest: each block's grid spans the block's own range, each weight goes to the nearest grid point.

The scale is rounded to its stored type before any code is made. With ``shrink`` the range of each block is scaled down first
(clipping), as chosen by ``quant.transforms.clip``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quant.qtensor import QTensor, from_blocks
from quant.quantizer import InputStatistics, Need, Outcome
from quant.scales import block_range, encode, scales_from_range
from quant.scheme import Scheme


def round_to_nearest(matrix: Tensor, scheme: Scheme, shrink: Tensor | None = None) -> QTensor:
    """Quantise ``[out, in]`` to the nearest codes.

    Args:
        matrix: any float type; the arithmetic is float32.
        shrink: optional factors in (0, 1] of shape ``scheme.block_grid``, multiplied onto each block's range.

    Raises:
        SchemeError: a scale that the stored type cannot hold.
    """
    low, high = block_range(matrix, scheme)
    if shrink is not None:
        low, high = low * shrink, high * shrink
    scales, zeros = scales_from_range(low, high, scheme)
    codes = encode(matrix, scheme, scales, zeros).to(torch.int8 if scheme.symmetric else torch.uint8)
    return QTensor(scheme, from_blocks(codes, (matrix.shape[0], matrix.shape[1])), scales, zeros)


@dataclass(frozen=True, slots=True)
class RoundToNearest:
    """The data-free quantiser; it needs no evidence and ignores what it is given."""

    needs: frozenset[Need] = frozenset()

    def __call__(self, matrix: Tensor, scheme: Scheme, evidence: InputStatistics | None, shrink: Tensor | None = None) -> Outcome:
        return Outcome(round_to_nearest(matrix, scheme, shrink))


QUANTIZER = RoundToNearest()
