"""Errors and intervals against closed forms and against a simulation whose truth is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

import eval.stats as stats
from eval.perplexity import WindowLosses
from eval.stats import bootstrap_ratio, mean_loss, paired_difference, ratio_standard_error
from quant.errors import UsageError


def losses(
    nats: list[float] | NDArray[np.float64], scored: list[int] | int = 511, nonfinite: int = 0, digest: str = ""
) -> WindowLosses:
    values = np.asarray(nats, dtype=np.float64)
    counts = np.full(len(values), scored) if isinstance(scored, int) else np.asarray(scored)
    return WindowLosses(values, counts.astype(np.int64), nonfinite, digest)


def random_losses(seed: int, n: int = 24) -> WindowLosses:
    return losses(511 * np.random.default_rng(seed).normal(3.5, 0.4, size=n))


def test_standard_error_is_the_textbook_one_for_equal_windows() -> None:
    sums = random_losses(1).nats
    means = sums / 511
    assert ratio_standard_error(sums, np.full(24, 511)) == pytest.approx(means.std(ddof=1) / math.sqrt(24), rel=1e-12)


def test_a_short_window_counts_by_its_tokens() -> None:
    """A window of 16 tokens must move neither the estimate nor the error as a window of 1,024 would."""
    long = losses([2048.0, 2150.0, 2100.0], [1024, 1024, 1024])
    with_tail = losses([2048.0, 2150.0, 2100.0, 96.0], [1024, 1024, 1024, 16])
    assert mean_loss(with_tail, seed=0).mean_nats == pytest.approx((2048 + 2150 + 2100 + 96) / 3088)
    error, before = mean_loss(with_tail, seed=0).standard_error, mean_loss(long, seed=0).standard_error
    assert error is not None
    assert before is not None
    assert error < 1.5 * before, "the error of window means, 1.0, would be 30 times as large"


def test_interval_of_two_windows_is_known_exactly() -> None:
    """Two windows resample to (a, a), (a, b), (b, b) with 1/4, 1/2, 1/4: at 95% from a to b, at 40% the mean alone."""
    sums, weights = np.array([10.0, 30.0]), np.array([10, 10])
    wide = bootstrap_ratio(sums, weights, seed=3)
    assert (wide.low, wide.high) == (1.0, 3.0)
    narrow = bootstrap_ratio(sums, weights, seed=3, level=0.4)
    assert (narrow.low, narrow.high) == (2.0, 2.0)
    unequal = bootstrap_ratio(np.array([10.0, 300.0]), np.array([10, 100]), seed=3)
    assert (unequal.low, unequal.high) == (1.0, 3.0), "each draw is divided by the tokens it drew"


def test_interval_of_many_windows_is_the_normal_one() -> None:
    sample = random_losses(2, n=400)
    error = ratio_standard_error(sample.nats, sample.scored)
    interval = bootstrap_ratio(sample.nats, sample.scored, seed=0)
    assert interval.low == pytest.approx(sample.mean_nats - 1.96 * error, abs=0.1 * error)
    assert interval.high == pytest.approx(sample.mean_nats + 1.96 * error, abs=0.1 * error)


def test_interval_covers_the_truth_as_often_as_it_says() -> None:
    """300 experiments of 24 unequal windows; a percentile interval of 24 clusters is a little narrow: 90 to 97% of 95%."""
    random = np.random.default_rng(5)
    hits = 0
    for trial in range(300):
        weights = random.integers(100, 512, size=24)
        sums = weights * random.normal(0.05, 0.2, size=24)
        hits += not bootstrap_ratio(sums, weights, seed=trial, resamples=1000).excludes(0.05)
    assert 0.90 <= hits / 300 <= 0.97


def test_chunks_do_not_change_the_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = random_losses(3, n=7)
    whole = bootstrap_ratio(sample.nats, sample.scored, seed=11, resamples=1001)
    monkeypatch.setattr(stats, "_CHUNK_ELEMENTS", 50)
    assert bootstrap_ratio(sample.nats, sample.scored, seed=11, resamples=1001) == whole
    assert bootstrap_ratio(sample.nats, sample.scored, seed=12, resamples=1001).low != whole.low


def test_pairing_removes_what_the_windows_share() -> None:
    baseline = random_losses(4)
    shift = np.random.default_rng(6).normal(0.02, 0.003, size=24)
    paired = paired_difference(losses(baseline.nats + 511 * shift), baseline, seed=0)
    unpaired = mean_loss(baseline, seed=0).standard_error
    assert paired.ln_ratio == pytest.approx(shift.mean())
    assert paired.standard_error == pytest.approx(shift.std(ddof=1) / math.sqrt(24), rel=1e-9)
    assert unpaired is not None
    assert paired.standard_error is not None
    assert unpaired > 50 * paired.standard_error
    assert paired.excludes_zero
    assert paired.ratio == pytest.approx(math.exp(shift.mean()))


def test_swapping_the_models_turns_the_sign() -> None:
    one, other = random_losses(7), random_losses(8)
    forth, back = paired_difference(one, other, seed=0), paired_difference(other, one, seed=0)
    assert forth.interval is not None
    assert back.interval is not None
    assert back.ln_ratio == -(forth.ln_ratio or 0)
    assert back.standard_error == pytest.approx(forth.standard_error)
    assert (back.interval.low, back.interval.high) == pytest.approx((-forth.interval.high, -forth.interval.low))


def test_the_same_loss_everywhere_has_no_error() -> None:
    baseline = random_losses(9)
    paired = paired_difference(losses(baseline.nats + 51.1), baseline, seed=0)
    assert paired.standard_error == pytest.approx(0, abs=1e-12)
    assert paired.interval is not None
    assert (paired.interval.low, paired.interval.high) == pytest.approx((0.1, 0.1))


def test_a_model_against_itself_is_zero_and_flagged() -> None:
    paired = paired_difference(random_losses(1), random_losses(1), seed=0)
    assert (paired.ln_ratio, paired.standard_error, paired.excludes_zero) == (0.0, 0.0, False)
    assert "identical" in (paired.flag or "")


def test_one_window_has_neither_error_nor_interval() -> None:
    """R56: None, never NaN."""
    estimate = mean_loss(losses([30.0], 6), seed=0)
    paired = paired_difference(losses([31.2], 6), losses([30.0], 6), seed=0)
    assert (estimate.mean_nats, estimate.standard_error, estimate.interval) == (5.0, None, None)
    assert paired.ln_ratio == pytest.approx(0.2)
    assert (paired.standard_error, paired.interval, paired.excludes_zero) == (None, None, None)


@pytest.mark.parametrize("broken", ["quantised model", "baseline"])
def test_a_loss_that_is_not_finite_gives_no_difference_but_a_reason(broken: str) -> None:
    bad, good = losses([10.0, 20.0], nonfinite=3), losses([11.0, 21.0])
    pair = (bad, good) if broken == "quantised model" else (good, bad)
    paired = paired_difference(*pair, seed=0)
    assert (paired.ln_ratio, paired.ratio, paired.standard_error, paired.interval) == (None, None, None, None)
    assert (paired.flag or "").startswith(f"{broken}: 3 of 1022 predictions")


@pytest.mark.parametrize(
    "other",
    [losses([1.0, 2.0, 3.0], digest="a"), losses([1.0, 2.0], [511, 510], digest="a"), losses([1.0, 2.0], digest="b")],
    ids=["count", "lengths", "digest"],
)
def test_losses_on_other_windows_are_refused(other: WindowLosses) -> None:
    with pytest.raises(UsageError, match="different windows cannot be compared"):
        paired_difference(losses([1.0, 2.0], digest="a"), other, seed=0)


@pytest.mark.parametrize("options", [{"level": 1.0}, {"level": 0.0}, {"resamples": 1}])
def test_senseless_intervals_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="level between 0 and 1"):
        bootstrap_ratio(np.array([1.0, 2.0]), np.array([1, 1]), seed=0, **options)  # type: ignore[arg-type]
