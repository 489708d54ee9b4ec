"""The AWQ searches against explicit sums over tokens and brute force on tiny sizes."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from quant.quantizers.rtn import round_to_nearest
from quant.scheme import Blocks, Scheme, Zero
from quant.transforms.awq import Consumer, clip_steps, output_error, search_clipping, search_factors

ZEROS: tuple[Zero, ...] = ("sym", "full", "zp")
BLOCKS: tuple[Blocks, ...] = (32, "channel", "tensor")
ALL = [Scheme(bits, zero, blocks) for bits, zero, blocks in itertools.product(range(2, 9), ZEROS, BLOCKS)]

ALL += [Scheme.parse(name) for name in ("mxfp4", "mxfp6-e3m2", "mxfp8", "mxint8", "nvfp4", "fp8", "e2m1-b32-e8m0.even")]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def activations(tokens: int, width: int, seed: int = 0) -> Tensor:
    """Correlated channels of very different size, as after a normalisation."""
    mixing = torch.eye(width) + 0.3 * normal(width, width, seed=seed + 1) / width**0.5
    order = torch.randperm(width, generator=torch.Generator().manual_seed(seed))
    mixed: Tensor = normal(tokens, width, seed=seed) @ mixing * torch.logspace(-1.5, 1.5, width)[order]
    return mixed


def explicit_error(consumers: list[Consumer], inputs: Tensor, factors: Tensor) -> float:
    """||X D^T||^2 over all consumers in float64: D is what rounding with these factors changes."""
    total = 0.0
    for consumer in consumers:
        rounded = round_to_nearest(consumer.matrix * factors, consumer.scheme).dequantise().double() / factors.double()
        total += float((inputs.double() @ (rounded - consumer.matrix.double()).T).square().sum())
    return total


@pytest.mark.parametrize(("tokens", "width", "rows"), [(1, 8, 3), (7, 40, 5), (500, 64, 16)])
def test_gram_error_is_the_explicit_output_error(tokens: int, width: int, rows: int) -> None:
    inputs, change = activations(tokens, width), normal(rows, width, seed=5) * 0.01
    explicit = float((inputs.double() @ change.double().T).square().sum())
    assert output_error(change, inputs.T @ inputs) == pytest.approx(explicit, rel=1e-4)


@pytest.mark.parametrize("scheme", ALL, ids=str)
def test_factors_are_never_worse_than_plain_rounding_and_say_how_much_better(scheme: Scheme) -> None:
    inputs = activations(200, 64)
    consumers = [Consumer(normal(24, 64, seed=3), scheme), Consumer(normal(8, 64, seed=4) * 3, scheme)]
    choice = search_factors(consumers, inputs.T @ inputs)
    plain, found = (explicit_error(consumers, inputs, factors) for factors in (torch.ones(64), choice.factors))
    assert choice.relative_error <= 1
    assert found / plain == pytest.approx(choice.relative_error, rel=1e-2)
    assert choice.relative_error < 1 or torch.equal(choice.factors, torch.ones(64))
    assert (choice.exponents == (0.0, 0.0)) == torch.equal(choice.factors, torch.ones(64))
    assert bool((torch.isfinite(choice.factors) & (choice.factors > 0)).all())


def test_a_search_that_matters_finds_something() -> None:
    """A few large activation channels: the case that AWQ is made for."""
    inputs = normal(300, 64)
    inputs[:, ::16] *= 30
    consumers = [Consumer(normal(32, 64, seed=1), Scheme(4, "sym", 32))]
    choice = search_factors(consumers, inputs.T @ inputs)
    assert choice.relative_error < 0.5
    assert float(choice.factors[::16].min()) > float(choice.factors[1::16].max())


def test_columns_of_large_weights_get_small_factors() -> None:
    """The other exponent: equal activations, columns of very different size, one scale for all of a row."""
    matrix = normal(32, 64, seed=1) * torch.logspace(-2, 0, 64)
    inputs = normal(300, 64)
    choice = search_factors([Consumer(matrix, Scheme(4, "sym", "channel"))], inputs.T @ inputs)
    assert choice.exponents[1] > 0
    assert choice.relative_error < 0.8
    assert float(choice.factors[:16].min()) > float(choice.factors[48:].max())


def test_mixed_schemes_in_one_group_are_each_rounded_as_they_will_be_stored() -> None:
    inputs = activations(100, 64)
    consumers = [
        Consumer(normal(16, 64, seed=1), Scheme(3, "zp", 32)),
        Consumer(normal(16, 64, seed=2), Scheme(8, "sym", "channel")),
    ]
    choice = search_factors(consumers, inputs.T @ inputs)
    plain, found = (explicit_error(consumers, inputs, factors) for factors in (torch.ones(64), choice.factors))
    assert found / plain == pytest.approx(choice.relative_error, rel=1e-2)
    assert choice.relative_error < 1


@pytest.mark.parametrize("rows", [1, 8, 512])
def test_the_error_on_sampled_rows_is_never_above_plain(rows: int) -> None:
    """The promise holds for the rows that are looked at: every n-th of each consumer."""
    inputs = activations(100, 32)
    consumers = [Consumer(normal(20, 32, seed=1), Scheme(3, "sym", 16)), Consumer(normal(12, 32, seed=2), Scheme(3, "sym", 16))]
    choice = search_factors(consumers, inputs.T @ inputs, rows=rows)
    stride = max(1, 32 // rows)
    sampled = [Consumer(consumer.matrix[::stride], consumer.scheme) for consumer in consumers]
    plain, found = (explicit_error(sampled, inputs, factors) for factors in (torch.ones(32), choice.factors))
    assert found <= plain
    assert found / plain == pytest.approx(choice.relative_error, rel=1e-2)


@pytest.mark.parametrize("scheme", [Scheme(4, "sym", 32), Scheme(4, "zp", "channel"), Scheme(3, "sym", "tensor")], ids=str)
def test_r12_dead_channels_keep_factor_one(scheme: Scheme) -> None:
    inputs, matrix = activations(50, 64), normal(16, 64, seed=2)
    inputs[:, 5] = 0
    matrix[:, 3] = 0
    matrix[:, 7] = 1e-39
    choice = search_factors([Consumer(matrix, scheme)], inputs.T @ inputs)
    assert choice.factors[3] == 1
    assert choice.factors[5] == 1
    assert bool((torch.isfinite(choice.factors) & (choice.factors > 0)).all())
    assert not torch.equal(choice.factors, torch.ones(64)), "the live channels are scaled all the same"


@pytest.mark.parametrize("what", ["weights", "activations", "both"])
def test_r12_nothing_alive_means_no_scaling(what: str) -> None:
    inputs = torch.zeros(4, 32) if what != "weights" else normal(4, 32)
    matrix = torch.zeros(8, 32) if what != "activations" else normal(8, 32)
    choice = search_factors([Consumer(matrix, Scheme(4, "sym", 32))], inputs.T @ inputs)
    assert torch.equal(choice.factors, torch.ones(32))
    assert (choice.exponents, choice.relative_error) == ((0.0, 0.0), 1.0)


@pytest.mark.parametrize("spread", [1e-20, 1e20])
def test_extreme_ratios_of_activations_stay_in_range(spread: float) -> None:
    inputs = normal(64, 32)
    inputs[:, 0] *= spread**0.5
    gram = inputs.double().T @ inputs.double()
    choice = search_factors([Consumer(normal(8, 32), Scheme(4, "sym", 32, "f32"))], gram.float())
    assert bool((torch.isfinite(choice.factors) & (choice.factors > 0)).all())
    assert choice.relative_error <= 1


def test_candidates_that_the_stored_scale_type_cannot_hold_are_passed_over() -> None:
    """Plain rounding fits half precision by a factor of 3; most scalings do not: the search goes on without them."""
    inputs = normal(256, 64) * torch.logspace(-3, 3, 64)
    consumers = [Consumer(normal(64, 64) * 5e4, Scheme(4, "sym", 32, "f16"))]
    choice = search_factors(consumers, inputs.T @ inputs)
    assert choice.relative_error <= 1
    round_to_nearest(consumers[0].matrix * choice.factors, consumers[0].scheme)  # fits


def test_share_keeps_equal_factors_and_free_keeps_ones() -> None:
    """Two query heads read each value channel: four heads of 4 channels over 2 heads of values."""
    share = torch.arange(8).reshape(2, 1, 4).expand(2, 2, 4).reshape(16)
    inputs = normal(100, 16) * torch.logspace(-1, 1, 8)[share]
    free = torch.ones(16, dtype=torch.bool)
    free[1] = False
    consumers = [Consumer(normal(24, 16, seed=1), Scheme(3, "sym", 8))]
    shared = search_factors(consumers, inputs.T @ inputs, share)
    assert shared.relative_error < 1
    for channel in range(8):
        assert len(set(shared.factors[share == channel].tolist())) == 1
    bound = search_factors(consumers, inputs.T @ inputs, share, free)
    assert bound.factors[share == share[1]].tolist() == [1.0, 1.0], "what shares with a fixed channel is fixed"
    assert len(set(bound.factors.tolist())) == 8, "the others are scaled"


def block_error(change: Tensor, gram: Tensor, scheme: Scheme) -> Tensor:
    """d G_bb d^T of every block in float64, one block at a time: the objective of the clipping."""
    rows, columns = scheme.block_grid((change.shape[0], change.shape[1]))
    size = change.shape[1] if scheme.blocks == "channel" else int(scheme.blocks)
    found = torch.zeros(rows, columns, dtype=torch.float64)
    for row in range(rows):
        for column in range(columns):
            place = slice(column * size, min((column + 1) * size, change.shape[1]))
            part = change[row, place].double()
            found[row, column] = part @ gram[place, place].double() @ part
    return found


@pytest.mark.parametrize("scheme", [scheme for scheme in ALL if scheme.blocks != "tensor"], ids=str)
def test_clipping_is_never_worse_than_none_in_its_own_objective(scheme: Scheme) -> None:
    matrix, inputs = normal(6, 80, seed=scheme.bits), activations(100, 80)  # 80 columns: a short last group of 16
    matrix[0, 3] = matrix[1, 70] = 8.0
    gram = inputs.T @ inputs
    shrink = search_clipping(matrix, scheme, gram)
    assert shrink.shape == scheme.block_grid((6, 80))
    assert set(shrink.flatten().tolist()) <= {float(torch.tensor(step)) for step in clip_steps(scheme)}
    clipped = block_error(round_to_nearest(matrix, scheme, shrink).dequantise() - matrix, gram, scheme)
    plain = block_error(round_to_nearest(matrix, scheme).dequantise() - matrix, gram, scheme)
    assert bool((clipped <= plain * (1 + 1e-4)).all())
    assert scheme.bits > 4 or bool((clipped < plain * 0.999).any()), "low bits gain somewhere"


TINY = [Scheme(2, "sym", 2), Scheme(3, "zp", 3), Scheme(4, "sym", "channel"), Scheme(2, "zp", 5)]


@pytest.mark.parametrize("scheme", TINY, ids=str)
def test_clipping_is_the_best_of_all_its_steps(scheme: Scheme) -> None:
    """Brute force: every step for every block, each tried alone."""
    for seed in range(20):
        matrix, inputs = normal(2, 5, seed=seed), activations(9, 5, seed=seed)
        gram = inputs.T @ inputs
        shrink = search_clipping(matrix, scheme, gram)
        chosen = block_error(round_to_nearest(matrix, scheme, shrink).dequantise() - matrix, gram, scheme)
        best = torch.full_like(chosen, torch.inf)
        for step in clip_steps(scheme):
            tried = round_to_nearest(matrix, scheme, torch.full_like(shrink, step)).dequantise() - matrix
            best = torch.minimum(best, block_error(tried, gram, scheme))
        torch.testing.assert_close(chosen, best, rtol=1e-3, atol=1e-9)


def test_one_scale_for_all_is_not_clipped() -> None:
    matrix, inputs = normal(4, 32), activations(20, 32)
    assert search_clipping(matrix, Scheme(3, "sym", "tensor"), inputs.T @ inputs).tolist() == [[1.0]]


def test_clipping_without_activations_clips_nothing() -> None:
    assert bool((search_clipping(normal(4, 64), Scheme(3, "sym", 32), torch.zeros(64, 64)) == 1).all())
