"""Smoothing against the formula written out, brute force over alphas, and numpy's percentiles."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from calib.evidence import InputRange, RangeGatherer
from quant.activations import ActivationScheme
from quant.scheme import Scheme
from quant.transforms.smoothquant import ALPHAS, SmoothConsumer, SmoothInputs, largest_columns, search_alpha, smooth_factors

W8 = Scheme(8, "sym", "channel", "f32")
SCHEMES = [ActivationScheme.parse(name) for name in ("token", "tensor", "static")]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_outliers(tokens: int, width: int, times: float = 60.0) -> Tensor:
    """Inputs with a few channels that are large in every token: the case that smoothing is made for."""
    inputs = normal(tokens, width)
    inputs[:, ::16] *= times
    return inputs


def inputs_of(rows: Tensor) -> SmoothInputs:
    largest = rows.abs().amax(0)
    return SmoothInputs(rows, torch.ones(len(rows)), largest, largest)


def explicit(consumers: list[SmoothConsumer], rows: Tensor, factors: Tensor) -> float:
    """Squared error in float64 with rounding written out: weights per row, inputs per token or with one scale."""
    total = 0.0
    for consumer in consumers:
        weight, divided = (consumer.matrix * factors).double(), (rows / factors).double()
        step = weight.abs().amax(1, keepdim=True) / 127
        shared = divided.abs().amax(1, keepdim=True) / 127
        if consumer.activations is not None and consumer.activations.sharing == "tensor":
            shared = divided.abs().max() / 127
        seen = (divided / shared).round() * shared if consumer.activations is not None else divided
        apart = seen @ ((weight / step).round() * step).T - rows.double() @ consumer.matrix.double().T
        total += float(apart.square().sum())
    return total


@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.5, 0.8, 1.0])
def test_factors_are_the_published_formula(alpha: float) -> None:
    a, w = normal(16).abs() * 10 + 0.1, normal(16, seed=1).abs() + 0.1
    expected = [x**alpha / y ** (1 - alpha) for x, y in zip(a.tolist(), w.tolist(), strict=True)]
    assert smooth_factors(a, w, alpha).tolist() == pytest.approx(expected, rel=1e-5)


def test_a_half_balances_both_sides() -> None:
    """The source text: s = sqrt(A / C), so that A / s = C s = sqrt(A C)."""
    a, c = normal(16).abs() * 100 + 0.1, normal(16, seed=1).abs() + 0.1
    s = smooth_factors(a, c, 0.5)
    torch.testing.assert_close(a / s, c * s)
    torch.testing.assert_close(a / s, (a * c).sqrt())


@pytest.mark.parametrize("activations", SCHEMES, ids=str)
def test_the_search_finds_what_brute_force_finds(activations: ActivationScheme) -> None:
    rows = with_outliers(50, 64)
    consumers = [SmoothConsumer(normal(24, 64, seed=seed) * seed, W8, activations) for seed in (1, 2)]
    choice = search_alpha(consumers, inputs_of(rows))
    weight = largest_columns([consumer.matrix for consumer in consumers])
    plain = explicit(consumers, rows, torch.ones(64))
    tried: dict[float | None, float] = {
        alpha: explicit(consumers, rows, smooth_factors(rows.abs().amax(0), weight, alpha)) / plain for alpha in ALPHAS
    }
    tried[None] = 1.0
    assert choice.alpha == min(tried, key=lambda alpha: tried[alpha])
    assert choice.relative_error == pytest.approx(tried[choice.alpha], rel=1e-2)
    assert choice.relative_error < 0.5
    expected = smooth_factors(rows.abs().amax(0), weight, choice.alpha or 0)
    torch.testing.assert_close(choice.factors, expected / expected.log().mean().exp())


def test_a_common_factor_changes_no_rounded_value() -> None:
    """Why folded factors may be centred: scales of inputs and weights take up a power of two exactly."""
    rows = with_outliers(20, 32)
    consumer = SmoothConsumer(normal(8, 32, seed=1), W8, SCHEMES[0])
    factors = smooth_factors(rows.abs().amax(0), largest_columns([consumer.matrix]), 0.5)
    assert explicit([consumer], rows, factors) == pytest.approx(explicit([consumer], rows, factors * 64), rel=1e-9)


def test_where_nothing_is_gained_nothing_is_smoothed() -> None:
    """Inputs and weights that are level already: any alpha but the one that does nothing makes it worse or leaves it."""
    rows = torch.ones(4, 8) * torch.tensor([1.0, -1.0]).repeat(4)
    matrix = torch.ones(3, 8) * torch.tensor([1.0, 1.0, -1.0, 1.0]).repeat(2)
    choice = search_alpha([SmoothConsumer(matrix + 0.5 * normal(3, 8), W8, SCHEMES[0])], inputs_of(rows))
    assert choice.relative_error <= 1
    assert choice.alpha is not None or torch.equal(choice.factors, torch.ones(8))


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_a_fixed_alpha_is_taken_and_its_error_told(alpha: float) -> None:
    rows = with_outliers(30, 32)
    consumers = [SmoothConsumer(normal(8, 32, seed=1), W8, SCHEMES[0])]
    choice = search_alpha(consumers, inputs_of(rows), (alpha,))
    assert choice.alpha == alpha
    plain = explicit(consumers, rows, torch.ones(32))
    assert choice.relative_error == pytest.approx(explicit(consumers, rows, choice.factors) / plain, rel=1e-2)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_dead_channels_and_those_that_must_not_be_scaled_keep_factor_one(alpha: float) -> None:
    rows, matrix = with_outliers(30, 32), normal(8, 32, seed=1)
    rows[:, 3] = 0
    matrix[:, 5] = 0
    free = torch.ones(32, dtype=torch.bool)
    free[7] = False
    factors = search_alpha([SmoothConsumer(matrix, W8, SCHEMES[0])], inputs_of(rows), (alpha,), free=free).factors
    assert factors[[3, 5, 7]].tolist() == [1, 1, 1]
    assert bool((torch.isfinite(factors) & (factors > 0)).all())
    assert int((factors != 1).sum()) == 29


def test_r24_shared_channels_get_one_factor_made_of_the_largest() -> None:
    """R24: grouped queries read one value channel several times; its factor covers the largest of the readers."""
    rows, matrix = with_outliers(30, 32), normal(8, 32, seed=1)
    share = torch.arange(16).repeat_interleave(2)
    factors = search_alpha([SmoothConsumer(matrix, W8, SCHEMES[0])], inputs_of(rows), (0.5,), share=share).factors
    assert torch.equal(factors[::2], factors[1::2])
    pairs = rows.abs().amax(0).reshape(16, 2).amax(1), matrix.abs().amax(0).reshape(16, 2).amax(1)
    expected = smooth_factors(*pairs, 0.5)
    torch.testing.assert_close(factors[::2], expected / expected.log().mean().exp())


def test_nothing_alive_means_no_smoothing() -> None:
    choice = search_alpha([SmoothConsumer(normal(4, 8), W8, SCHEMES[0])], inputs_of(torch.zeros(3, 8)), (0.5,))
    assert torch.equal(choice.factors, torch.ones(8))


@pytest.mark.parametrize("percent", [1.0, 50.0, 90.0, 99.0, 99.9, 100.0])
@pytest.mark.parametrize("splits", [[60], [1, 59], [17, 3, 40], [1] * 60])
def test_percentiles_are_exact_however_the_tokens_come(percent: float, splits: list[int]) -> None:
    """R62: every row counts, whatever batch it comes in and in whatever order."""
    rows = with_outliers(60, 16)
    kind = RangeGatherer.exact_for(percent, 60)
    pieces = [kind.of(piece) for piece in torch.split(rows, splits)]
    for order in (pieces, pieces[::-1]):
        found: Any = order[0]
        for piece in order[1:]:
            found = found + piece
        assert found.tokens == 60
        expected = np.percentile(rows.abs().numpy(), percent, axis=0, method="inverted_cdf")
        assert found.percentile(percent).tolist() == pytest.approx(expected.tolist())
        assert torch.equal(found.largest, rows.abs().amax(0))
        assert len(found.top) <= kind.kept


def test_sampled_rows_are_the_same_positions_of_every_window() -> None:
    windows = normal(6, 10, 4)
    found = RangeGatherer(every=4).of(windows)
    whole = found.rows
    one_by_one: Any = RangeGatherer(every=4).of(windows[:1])
    for window in windows[1:]:
        one_by_one = one_by_one + RangeGatherer(every=4).of(window[None])
    assert torch.equal(whole, windows[:, [0, 2, 6]].reshape(-1, 4))
    assert found.weights.tolist() == [1.0, 4.5, 4.5] * 6, "the first of a window is one token, the others stand for nine"
    assert torch.equal(one_by_one.weights, found.weights)
    assert torch.equal(one_by_one.rows, whole)
    assert len(RangeGatherer().of(windows).rows) == 0


@pytest.mark.parametrize("every", [1, 2, 3, 7, 10, 11, 40])
def test_weights_of_sampled_rows_sum_to_the_tokens(every: int) -> None:
    for length in (1, 2, 10):
        found = RangeGatherer(every=every).of(normal(3, length, 4))
        stands_for = 3 * length if len(found.rows) > 3 else 3
        assert float(found.weights.sum()) == pytest.approx(stands_for, rel=1e-6)
    assert RangeGatherer(every=1).of(normal(2, 5, 4)).weights.tolist() == [1.0] * 10


def test_a_row_counts_as_many_times_as_it_stands_for() -> None:
    rows = with_outliers(6, 32)
    consumers = [SmoothConsumer(normal(8, 32, seed=1), W8, SCHEMES[0])]
    weights = torch.tensor([1.0, 2.0, 3.0, 1.0, 1.0, 4.0])
    repeated = rows.repeat_interleave(weights.long(), dim=0)
    largest = rows.abs().amax(0)
    for alpha in (0.3, 0.7):
        choice = search_alpha(consumers, SmoothInputs(rows, weights, largest, largest), (alpha,))
        other = search_alpha(consumers, inputs_of(repeated), (alpha,))
        assert choice.relative_error == pytest.approx(other.relative_error, rel=1e-4)


def test_no_token_is_no_range_and_what_is_not_finite_is_seen() -> None:
    none = RangeGatherer(3).none(4)
    assert (none.tokens, none.finite, none.percentile(99).tolist()) == (0, True, [0.0] * 4)
    some = none + RangeGatherer(3).of(torch.ones(2, 4))
    assert (some.tokens, some.largest.tolist()) == (2, [1.0] * 4)
    for bad in (float("nan"), float("inf")):
        for kept in (1, 3):
            found: InputRange = RangeGatherer(kept).of(torch.tensor([[1.0, bad], [2.0, 3.0]]))
            assert not found.finite
            assert not (found + RangeGatherer(kept).of(torch.ones(2, 2))).finite
