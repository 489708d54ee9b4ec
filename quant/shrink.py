"""Narrower ranges without data: how far to shrink each block's range so that the weights themselves change least.

With few bits a range that spans the largest weight wastes codes on it; a little clipping costs one weight and helps the rest.
The squared error of the weights knows nothing of the inputs: where there is calibration, ``transforms.awq.search_clipping`` is
the better choice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quant.qtensor import block_sums
from quant.quantizers.rtn import round_to_nearest
from quant.scheme import Scheme

# Two bits on bell-shaped weights are best near half of the range: the steps reach well below.
STEPS = tuple(1 - 0.05 * step for step in range(1, 15))
FINE = (-0.025, 0.025)


def search_shrink(matrix: Tensor, scheme: Scheme) -> Tensor:
    """Factors ``scheme.block_grid`` in (0, 1] for each block's range with the least squared error of the ``[out, in]`` weights.

    Steps of 0.05, then half a step to both sides of each block's best. A block that nothing helps keeps 1.
    """
    matrix = matrix.float()
    best = torch.ones(scheme.block_grid((matrix.shape[0], matrix.shape[1])), device=matrix.device)
    lowest = _error(matrix, scheme, best)
    for step in STEPS:
        best, lowest = _better(matrix, scheme, torch.full_like(best, step), best, lowest)
    coarse = best
    for step in FINE:
        best, lowest = _better(matrix, scheme, (coarse + step).clamp_max(1), best, lowest)
    return best


def _better(matrix: Tensor, scheme: Scheme, tried: Tensor, best: Tensor, lowest: Tensor) -> tuple[Tensor, Tensor]:
    error = _error(matrix, scheme, tried)
    return torch.where(error < lowest, tried, best), torch.minimum(error, lowest)


def _error(matrix: Tensor, scheme: Scheme, shrink: Tensor) -> Tensor:
    """Squared error of every block, float64: sums over large blocks must not drown their differences."""
    change = round_to_nearest(matrix, scheme, shrink).dequantise().double() - matrix
    return block_sums(change.square_(), scheme)
