"""Errors and intervals of losses measured on windows.

Tokens of one window are not independent, so everything is clustered by window: the standard error is the linearised one of a
ratio of totals, the interval is a percentile bootstrap that resamples whole windows (Efron and Tibshirani 1993, chapters 8 and
13). Differences are *paired*: both models on the same windows. With one window there is no error and no interval: None, not NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eval.perplexity import WindowLosses
from quant.errors import UsageError

RESAMPLES = 10_000
LEVEL = 0.95
_CHUNK_ELEMENTS = 4_000_000
"""Resampled windows held at once: 32 MB an array, whatever the number of windows."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A two-sided interval in the unit of its estimate, with what it was made by."""

    low: float
    high: float
    level: float
    method: str

    def excludes(self, value: float) -> bool:
        return not self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class Estimate:
    """Nats per prediction of one model, with the error over windows. ``mean_nats`` is infinite when nothing could be scored."""

    mean_nats: float
    standard_error: float | None
    interval: Interval | None
    windows: int
    scored_tokens: int
    flag: str | None = None


@dataclass(frozen=True, slots=True)
class Paired:
    """Difference of two models on the same windows: ``ln_ratio = ln(PPL_quantised / PPL_baseline)``, nats per prediction.

    ``ln_ratio`` is None when a loss of either model is not finite; ``flag`` then says of which. A difference of exactly zero in
    every window is flagged as well: it is what comparing a model with itself by mistake looks like.
    """

    ln_ratio: float | None
    standard_error: float | None
    interval: Interval | None
    windows: int
    scored_tokens: int
    flag: str | None = None

    @property
    def ratio(self) -> float | None:
        """PPL_quantised / PPL_baseline."""
        if self.ln_ratio is None:
            return None
        try:
            return math.exp(self.ln_ratio)
        except OverflowError:
            return math.inf

    @property
    def excludes_zero(self) -> bool | None:
        """Whether the interval lies on one side of zero; None without an interval."""
        return self.interval.excludes(0.0) if self.interval else None


def mean_loss(losses: WindowLosses, *, seed: int, resamples: int = RESAMPLES, level: float = LEVEL) -> Estimate:
    """Mean nats per prediction with its window-clustered error and bootstrap interval (of the mean, in nats).

    The exponentials of the interval's ends are the interval of the perplexity.
    """
    windows, tokens = len(losses.nats), losses.scored_tokens
    if losses.nonfinite or windows < 2:
        return Estimate(losses.mean_nats, None, None, windows, tokens, losses.flag)
    error = ratio_standard_error(losses.nats, losses.scored)
    interval = bootstrap_ratio(losses.nats, losses.scored, seed=seed, resamples=resamples, level=level)
    return Estimate(losses.mean_nats, error, interval, windows, tokens, losses.flag)


def paired_difference(
    quantised: WindowLosses, baseline: WindowLosses, *, seed: int, resamples: int = RESAMPLES, level: float = LEVEL
) -> Paired:
    """ln(PPL_quantised / PPL_baseline) with its standard error and bootstrap interval, both paired and clustered by window.

    Raises:
        UsageError: the two were not measured on the same windows.
    """
    digests = {quantised.windows_digest, baseline.windows_digest} - {""}
    if len(digests) > 1 or not np.array_equal(quantised.scored, baseline.scored):
        raise UsageError(
            f"losses on different windows cannot be compared ({_described(quantised)} against {_described(baseline)}): "
            "measure both models on the same ones"
        )
    windows, tokens = len(quantised.scored), quantised.scored_tokens
    for name, losses in (("quantised model", quantised), ("baseline", baseline)):
        if losses.nonfinite:
            return Paired(None, None, None, windows, tokens, f"{name}: {losses.flag}")
    difference = quantised.nats - baseline.nats
    estimate = float(difference.sum()) / tokens
    flag = None if difference.any() else "exactly zero in every window: the two models gave identical losses"
    if windows < 2:
        return Paired(estimate, None, None, windows, tokens, flag)
    error = ratio_standard_error(difference, quantised.scored)
    interval = bootstrap_ratio(difference, quantised.scored, seed=seed, resamples=resamples, level=level)
    return Paired(estimate, error, interval, windows, tokens, flag)


def _described(losses: WindowLosses) -> str:
    return f"{len(losses.scored)} windows, {losses.scored_tokens} predictions, digest {losses.windows_digest[:12] or 'unknown'}"


def ratio_standard_error(sums: NDArray[np.float64], weights: NDArray[np.int64]) -> float:
    """Standard error of ``sum(sums) / sum(weights)`` over clusters ``[n]``, n >= 2, by linearisation.

    With equal weights it is the textbook error of the mean of ``sums / weights`` (Cochran 1977, section 6.4).
    """
    n, total = len(sums), float(weights.sum())
    residuals = sums - weights * (float(sums.sum()) / total)
    return math.sqrt(n / (n - 1) * float(residuals @ residuals)) / total


def bootstrap_ratio(
    sums: NDArray[np.float64], weights: NDArray[np.int64], *, seed: int, resamples: int = RESAMPLES, level: float = LEVEL
) -> Interval:
    """Percentile interval of ``sum(sums) / sum(weights)`` over ``resamples`` draws of n clusters with replacement.

    The same seed gives the same draws on every machine (PCG64). Memory is bounded: draws are made in chunks.
    """
    if not 0 < level < 1 or resamples < 2:
        raise UsageError(f"an interval needs a level between 0 and 1 and 2 resamples or more, got {level} and {resamples}")
    generator = np.random.Generator(np.random.PCG64(seed))
    n = len(sums)
    step = max(1, _CHUNK_ELEMENTS // n)
    ratios = np.empty(resamples, dtype=np.float64)
    for start in range(0, resamples, step):
        stop = min(start + step, resamples)
        drawn = generator.integers(0, n, size=(stop - start, n))
        ratios[start:stop] = sums[drawn].sum(axis=1) / weights[drawn].sum(axis=1)
    low, high = np.quantile(ratios, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high), level, f"percentile bootstrap over {n} windows, {resamples} resamples, seed {seed}")
