"""SmoothQuant (Xiao et al. 2023): move the range of activations into the weights before both are rounded.

Dividing input channel i by s_i and multiplying column i of every matrix that reads it by s_i changes nothing in exact arithmetic.
With s_i = max|X_i|^alpha / max|W_i|^(1 - alpha), outlier channels of the input shrink and the weights take their range.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SMALLEST = 1e-8


def smooth_factors(largest_input: Tensor, largest_weight: Tensor, alpha: float) -> Tensor:
    """Factors ``[in]``, above zero: inputs are divided by them, weight columns multiplied.

    Args:
        largest_input, largest_weight: largest magnitude per input channel, over the calibration tokens and over all output rows.
        alpha: 0 leaves the inputs to the weights' range, 1 the other way round.
    """
    wide = largest_input.float().clamp_min(_SMALLEST) ** alpha
    return wide / largest_weight.float().clamp_min(_SMALLEST) ** (1 - alpha)


def largest_columns(matrices: list[Tensor]) -> Tensor:
    """Largest magnitude per input channel ``[in]`` over all rows of all matrices."""
    return torch.stack([matrix.abs().amax(0) for matrix in matrices]).amax(0)
