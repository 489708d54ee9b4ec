"""Narrower ranges without data: how far to shrink each block's range so that the weights themselves change least.

With few bits a range that spans the largest weight wastes codes on it; a little clipping costs one weight and helps the rest.
The squared error of the weights knows nothing of the inputs: where there is calibration, ``transforms.awq.search_clipping`` is
the better choice.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quant.qtensor import block_sums
from quant.quantizers.rtn import round_to_nearest
from quant.scheme import Scheme

# Two bits on bell-shaped weights are best near half of the range: the steps reach well below.
STEPS = tuple(1 - 0.05 * step for step in range(1, 15))
FINE = (-0.025, 0.025)


def search_shrink(matrix: Tensor, scheme: Scheme, largest: float | None = None) -> Tensor:
    """Factors ``scheme.block_grid`` in (0, 1] for each block's range with the least squared error of the ``[out, in]`` weights.

    Steps of 0.05, then half a step to both sides of each block's best. A block that nothing helps keeps 1. With ``largest``, of
    all matrices that share the tensor-level scale, a scale of the whole tensor stays what they have in common.
    """
    matrix = matrix.float()
    best = torch.ones(scheme.block_grid((matrix.shape[0], matrix.shape[1])), device=matrix.device)
    if largest is not None and scheme.blocks == "tensor":
        return best

    def error(shrink: Tensor) -> Tensor:
        """Squared error of every block, float64: sums over large blocks must not drown their differences."""
        change = round_to_nearest(matrix, scheme, shrink, largest).dequantise().double() - matrix
        return block_sums(change.square_(), scheme)

    lowest = error(best)
    for step in STEPS:
        best, lowest = _better(error, torch.full_like(best, step), best, lowest)
    coarse = best
    for step in FINE:
        best, lowest = _better(error, (coarse + step).clamp_max(1), best, lowest)
    return best


def _better(error: Callable[[Tensor], Tensor], tried: Tensor, best: Tensor, lowest: Tensor) -> tuple[Tensor, Tensor]:
    found = error(tried)
    return torch.where(found < lowest, tried, best), torch.minimum(found, lowest)
