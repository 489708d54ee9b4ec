"""LLM.int8 (Dettmers et al. 2022): input columns with outliers are multiplied in 16 bits, all others as int8 vector by vector.

Vector-wise means a scale per token for the inputs and one per output channel for the weights. The paper finds the outlier columns
of every batch anew and therefore keeps the weights in 16 bits beside their codes; here they are those that reach the threshold on
calibration tokens, so that each weight is stored once and the bytes are exact. No engine reads this: it is measured, not written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quant.activations import ActivationScheme
from quant.errors import SchemeError
from quant.qtensor import QTensor
from quant.quantizers.rtn import round_to_nearest
from quant.scheme import SCALE_BYTES, Scheme

THRESHOLD = 6.0
SCHEME = Scheme(8, "sym", "channel", "f16")
INPUTS = ActivationScheme("token")
_INDEX_BYTES = 4


@dataclass(frozen=True, slots=True)
class Decomposed:
    """One ``[out, in]`` matrix in two parts.

    Attributes:
        columns: int64 ``[k]``, the outlier columns in rising order; ``others`` are the rest.
        kept: float16 ``[out, k]``.
        regular: codes of the other columns, or None where there is no other.
    """

    columns: Tensor
    others: Tensor
    kept: Tensor
    regular: QTensor | None
    inputs: ActivationScheme = INPUTS

    @property
    def nbytes(self) -> int:
        """Codes, scales, 16-bit columns and a 4-byte index for each of these."""
        out = self.kept.shape[0]
        found = 2 * self.kept.numel() + _INDEX_BYTES * len(self.columns)
        if self.regular is None:
            return found
        return found + self.regular.codes.numel() + SCALE_BYTES[self.regular.scheme.scale] * out

    def product(self, inputs: Tensor) -> Tensor:
        """``inputs`` ``[..., in]`` times the transposed matrix; outlier columns stay in the type in which they come."""
        found = inputs[..., self.columns] @ self.kept.to(inputs.dtype).T
        if self.regular is None:
            return found
        return found + self.inputs.rounded(inputs[..., self.others]) @ self.regular.dequantise().to(inputs.dtype).T


def outlier_columns(largest: Tensor, threshold: float = THRESHOLD) -> Tensor:
    """Input channels, bool ``[in]``, whose largest magnitude over the calibration tokens reaches the threshold."""
    return largest >= threshold


def decompose(matrix: Tensor, outliers: Tensor, scheme: Scheme = SCHEME) -> Decomposed:
    """Split ``[out, in]`` by columns.

    Args:
        outliers: bool ``[in]``.
        scheme: 8-bit symmetric codes with a scale per output channel.

    Raises:
        SchemeError: a weight of an outlier column that float16 cannot hold, or another kind of scheme.
    """
    if not (scheme.integer and scheme.zero == "sym" and scheme.bits == 8 and scheme.blocks == "channel"):
        raise SchemeError(f"{scheme}: the regular columns are symmetric 8-bit integers with a scale per output channel")
    columns, others = (mask.nonzero().reshape(-1) for mask in (outliers, ~outliers))
    kept = matrix[:, columns].half()
    if not bool(torch.isfinite(kept).all()):
        raise SchemeError("a weight of an outlier column is beyond float16's range, or not finite")
    regular = round_to_nearest(matrix[:, others], scheme) if len(others) else None
    return Decomposed(columns, others, kept, regular)
