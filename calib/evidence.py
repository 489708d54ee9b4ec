"""Evidence: what calibration learned about the inputs of one matrix.

Evidence adds: ``a + b`` is the evidence of both data sets, so that calibration can be split over windows, processes and devices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor


class Statistic(Protocol):
    """What can be gathered of a matrix's inputs: it adds, and it knows whether it is finite."""

    @property
    def tokens(self) -> int: ...
    @property
    def finite(self) -> bool: ...
    def __add__(self, other: Self) -> Self: ...


S = TypeVar("S", bound=Statistic, covariant=True)


class Gatherer(Protocol[S]):
    """Makes a statistic of one batch of inputs ``[..., in]``, or of none."""

    def of(self, inputs: Tensor) -> S: ...
    def none(self, width: int) -> S: ...


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
    def finite(self) -> bool:
        return bool(torch.isfinite(self.gram).all())

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


@dataclass(frozen=True, slots=True)
class InputRange:
    """How large the inputs of a matrix get, and some of them.

    Attributes:
        tokens: number of rows seen.
        top: the largest magnitudes per channel in falling order, float32 ``[kept, in]``.
        rows: some of the inputs, float32 ``[sampled, in]``.
        weights: how many tokens each of them stands for, float32 ``[sampled]``; their sum is ``tokens``.
    """

    tokens: int
    top: Tensor
    rows: Tensor
    weights: Tensor

    def __add__(self, other: InputRange) -> InputRange:
        kept = max(len(self.top), len(other.top))
        top = torch.cat([self.top, other.top]).sort(dim=0, descending=True).values[:kept]
        rows, weights = torch.cat([self.rows, other.rows]), torch.cat([self.weights, other.weights])
        return InputRange(self.tokens + other.tokens, top, rows, weights)

    @property
    def finite(self) -> bool:
        return bool(torch.isfinite(self.top).all())

    @property
    def largest(self) -> Tensor:
        """Largest magnitude per channel, ``[in]``; zeros where no token was seen."""
        return self.top[0]

    def percentile(self, percent: float) -> Tensor:
        """Per channel the smallest magnitude that at least ``percent`` of the tokens do not exceed (nearest rank), ``[in]``.

        Exact as long as enough of the largest were kept (``RangeGatherer``).
        """
        above = self.tokens - math.ceil(percent / 100 * self.tokens)
        return self.top[min(above, len(self.top) - 1)]


@dataclass(frozen=True, slots=True)
class RangeGatherer:
    """Gathers ``InputRange``.

    Attributes:
        kept: how many of the largest magnitudes per channel are kept; 1 is enough for the maximum.
        every: one token in so many is sampled, at the same positions of every window, so that batches do not matter. The first
            of each window is always among them and stands for itself alone: models keep huge values there.
    """

    kept: int = 1
    every: int = 0

    @classmethod
    def exact_for(cls, percent: float, tokens: int, every: int = 0) -> RangeGatherer:
        """The one whose percentile is exact for up to ``tokens`` tokens."""
        return cls(tokens - math.ceil(percent / 100 * tokens) + 1, every)

    def of(self, inputs: Tensor) -> InputRange:
        values = inputs.detach().float()
        rows = values.reshape(-1, values.shape[-1])
        if not self.every or not len(rows):
            return InputRange(len(rows), self._top(rows.abs()), rows[:0], rows.new_zeros(0))
        length = values.shape[-2]
        places = [0, *range(max(1, self.every // 2), length, self.every)]
        others = (length - 1) / max(len(places) - 1, 1)
        weights = rows.new_tensor([1.0, *[others] * (len(places) - 1)]).repeat(len(rows) // length)
        sampled = values[..., places, :].reshape(-1, values.shape[-1])
        return InputRange(len(rows), self._top(rows.abs()), sampled, weights)

    def _top(self, magnitudes: Tensor) -> Tensor:
        if self.kept == 1 and len(magnitudes):
            return magnitudes.amax(0, keepdim=True)
        top = magnitudes.topk(min(self.kept, len(magnitudes)), dim=0).values
        missing = self.kept - len(top)
        return torch.nn.functional.pad(top, (0, 0, 0, missing)) if missing else top

    def none(self, width: int) -> InputRange:
        return self.of(torch.zeros(0, width))
