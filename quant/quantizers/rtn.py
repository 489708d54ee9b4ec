"""Round to nearest: each block's grid spans the block's own range, each weight goes to the nearest grid point.

The scale is rounded to its stored type before any code is made. With ``shrink`` the range of each block is scaled down first
(clipping), as chosen with data by ``quant.transforms.awq.search_clipping`` or without by ``quant.shrink``.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quant.grid import to_codes
from quant.qtensor import QTensor, from_blocks
from quant.quantizer import InputStatistics, Need, Outcome
from quant.scales import BlockGrid, encode
from quant.scheme import Scheme


def round_to_nearest(matrix: Tensor, scheme: Scheme, shrink: Tensor | None = None, largest: float | None = None) -> QTensor:
    """Quantise ``[out, in]`` to the nearest codes.

    Args:
        matrix: any float type; the arithmetic is float32.
        shrink: optional factors in (0, 1] of shape ``scheme.block_grid``, multiplied onto each block's range.
        largest: largest magnitude of all matrices that share the tensor-level scale; by default of this one.

    Raises:
        SchemeError: a scale that the stored type cannot hold, or a matrix that is not finite.
    """
    grid = BlockGrid.of(matrix, scheme, shrink, largest)
    snapped = encode(matrix, scheme, grid.scales, grid.zeros, grid.divisor)
    return grid.qtensor(to_codes(from_blocks(snapped, (matrix.shape[0], matrix.shape[1])), scheme))


@dataclass(frozen=True, slots=True)
class RoundToNearest:
    """The data-free quantiser; it needs no evidence and ignores what it is given."""

    needs: frozenset[Need] = frozenset()

    def __call__(
        self,
        matrix: Tensor,
        scheme: Scheme,
        evidence: InputStatistics | None,
        shrink: Tensor | None = None,
        largest: float | None = None,
    ) -> Outcome:
        return Outcome(round_to_nearest(matrix, scheme, shrink, largest))


QUANTIZER = RoundToNearest()
