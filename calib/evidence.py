"""Evidence: what calibration learned about the inputs of one matrix.

Evidence adds: ``a + b`` is the evidence of both data sets, so that calibration can be split over windows, processes and devices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Evidence:
    """Sums over calibration tokens (rows x of the input, ``[tokens, in]``).

    Attributes:
        tokens: number of rows.
        abs_max: largest magnitude per channel, float32 ``[in]``.
        abs_sum: sum of magnitudes per channel, float64 ``[in]``.
        gram: X^T X, float32 ``[in, in]``.
        cross: (X_float - X)^T X with the inputs of the float model on the same tokens, float32 ``[in, in]``; None: not gathered.
    """

    tokens: int
    abs_max: Tensor
    abs_sum: Tensor
    gram: Tensor
    cross: Tensor | None = None

    @classmethod
    def of(cls, inputs: Tensor) -> Evidence:
        """Evidence of one batch of inputs ``[..., in]``; every row counts once."""
        rows = inputs.detach().reshape(-1, inputs.shape[-1]).float()
        magnitude = rows.abs()
        return cls(rows.shape[0], magnitude.amax(0), magnitude.sum(0, dtype=torch.float64), rows.T @ rows)

    @classmethod
    def none(cls, width: int) -> Evidence:
        """Evidence of no token at all on inputs ``[0, width]``."""
        return cls(0, torch.zeros(width), torch.zeros(width, dtype=torch.float64), torch.zeros(width, width))

    @classmethod
    def of_pair(cls, inputs: Tensor, floats: Tensor) -> Evidence:
        """Evidence of ``inputs`` ``[..., in]`` together with what the float model has in the same places."""
        rows = inputs.detach().reshape(-1, inputs.shape[-1]).float()
        return replace(cls.of(inputs), cross=(floats.detach().reshape(rows.shape).float() - rows).T @ rows)

    def __add__(self, other: Evidence) -> Evidence:
        return Evidence(
            self.tokens + other.tokens,
            torch.maximum(self.abs_max, other.abs_max),
            self.abs_sum + other.abs_sum,
            self.gram + other.gram,
            None if self.cross is None or other.cross is None else self.cross + other.cross,
        )

    @property
    def mean_abs(self) -> Tensor:
        """Mean magnitude per channel, float32 ``[in]``."""
        return (self.abs_sum / max(self.tokens, 1)).float()

    def divided(self, factors: Tensor) -> Evidence:
        """The evidence of the same rows with channel i divided by ``factors[i]``."""
        return Evidence(
            self.tokens,
            self.abs_max / factors,
            self.abs_sum / factors.double(),
            self.gram / factors.unsqueeze(0) / factors.unsqueeze(1),
            None if self.cross is None else self.cross / factors.unsqueeze(0) / factors.unsqueeze(1),
        )
