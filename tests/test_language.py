"""Two models on the same windows: figures against plain float64, and everything that must not change them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import eval.positions
from calib.tokenizer import TextTokenizer
from calib.windows import Windows
from eval.language import compare_windows, measure_language, scored_bytes
from eval.measurement import Measurement
from eval.pair import Pair
from eval.perplexity import window_losses
from eval.positions import position_figures
from eval.stats import mean_loss
from formats.reader import load_model


def windows(count: int = 5, length: int = 24, first_scored: int = 1) -> Windows:
    ids = torch.randint(5, 250, (count, length), generator=torch.Generator().manual_seed(0)).numpy()
    return Windows(
        ids=ids,
        span=(0, count * length),
        length=length,
        stride=length,
        bos="none",
        digest="d" * 64,
        corpus_sha256="c" * 64,
        tokenizer_digest="e" * 64,
        purpose="evaluation",
        first_scored=first_scored,
    )


@pytest.fixture
def pair(tiny_model: Callable[[str], Path]) -> Pair:
    folder = tiny_model("llama")
    artefact = load_model(folder)
    with torch.no_grad():
        for parameter in artefact.parameters():
            parameter.mul_(1.2)
    tokenizer = TextTokenizer.from_folder(folder)
    return Pair(artefact, load_model(folder), tokenizer, folder, {"a": "0" * 64}, {"b": "1" * 64}, "float", batch=2)


def figures(pair: Pair, windows: Windows, **options: Any) -> dict[str, Measurement]:
    return {found.name: found for found in measure_language(pair, windows, **options).measurements}


def test_every_figure_is_that_of_the_probabilities_in_float64(pair: Pair) -> None:
    cut = windows()
    found = figures(pair, cut, floor=False)
    kl, reverse, overlap, same, nats = [], [], [], [], [0.0, 0.0]
    for row in torch.from_numpy(cut.ids):
        with torch.inference_mode():
            p, q = (m(row[None], use_cache=False).logits[0].double().softmax(-1) for m in (pair.reference, pair.artefact))
        kl += (p * (p / q).log()).sum(-1).tolist()
        reverse += (q * (q / p).log()).sum(-1).tolist()
        overlap += torch.minimum(p, q).sum(-1).tolist()
        same += (p.argmax(-1) == q.argmax(-1)).tolist()
        for side, each in enumerate((p, q)):
            nats[side] -= float(each[:-1].gather(1, row[1:, None]).log().sum())
    predictions = 5 * 23
    expected = {
        "kl": np.mean(kl),
        "reverse_kl": np.mean(reverse),
        "acceptance_overlap": np.mean(overlap),
        "top1": np.mean(same),
        "kl_max": max(kl),
        "kl_p50": np.percentile(kl, 50),
        "kl_p99": np.percentile(kl, 99),
        "perplexity": math.exp(nats[1] / predictions),
        "perplexity_reference": math.exp(nats[0] / predictions),
        "ln_perplexity_ratio": (nats[1] - nats[0]) / predictions,
        "nonfinite_positions": 0,
    }
    assert {name: found[name].value for name in expected} == pytest.approx(expected, rel=2e-4, abs=1e-6)
    sizes = scored_bytes(pair.tokenizer, cut)
    assert found["bits_per_byte"].value == pytest.approx(nats[1] / math.log(2) / sizes.sum(), rel=1e-4)
    for name in ("kl", "reverse_kl", "top1", "acceptance_overlap", "perplexity", "bits_per_byte"):
        interval = found[name].interval
        assert interval is not None
        assert interval.low <= found[name].value <= interval.high


def test_buckets_share_out_all_positions(pair: Pair) -> None:
    rows = compare_windows(pair.reference, pair.artefact, windows())
    found = figures(pair, windows(), floor=False)
    edges = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
    total = 0.0
    for low, high in itertools.pairwise(edges):
        inside = (rows.confidence >= low) & ((rows.confidence < high) | (high == 1))
        if inside.any():
            total += found[f"kl_confidence_{low:g}_{high:g}"].value * inside.sum()
    assert total / len(rows.kl) == pytest.approx(found["kl"].value)


def test_batch_chunk_and_order_change_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = windows()
    base = figures(pair, cut, floor=False)
    order = [3, 0, 4, 1, 2]
    monkeypatch.setattr(eval.positions, "CHUNK", 7)
    for other, shuffled in (
        (dataclasses.replace(pair, batch=1), cut),
        (dataclasses.replace(pair, batch=5), cut),
        (pair, dataclasses.replace(cut, ids=cut.ids[order])),
    ):
        found = figures(other, shuffled, floor=False)
        assert {name: each.value for name, each in found.items()} == pytest.approx(
            {name: each.value for name, each in base.items()}, rel=1e-5, abs=1e-6
        )


def test_padding_behind_a_window_changes_nothing_before_it(pair: Pair) -> None:
    """A causal model: what stands behind a position cannot reach it."""
    ids = torch.from_numpy(windows().ids[0])
    padded = torch.cat([ids, torch.zeros(9, dtype=torch.int64)])
    with torch.inference_mode():
        plain, longer = (
            [m(row[None], use_cache=False).logits[0] for m in (pair.reference, pair.artefact)] for row in (ids, padded)
        )
    one = position_figures(plain[0], plain[1], ids)
    two = position_figures(longer[0][:24], longer[1][:24], ids)
    torch.testing.assert_close(one.kl, two.kl, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(one.artefact_nats, two.artefact_nats, rtol=1e-5, atol=1e-6)


def test_the_losses_are_those_of_the_run(pair: Pair) -> None:
    for first_scored in (1, 13):
        cut = windows(first_scored=first_scored)
        found = figures(pair, cut, floor=False)
        losses = window_losses(pair.artefact, cut)
        assert found["perplexity"].value == pytest.approx(losses.perplexity, rel=1e-6)
        interval, expected = found["perplexity"].interval, mean_loss(losses, seed=0).interval
        assert interval is not None
        assert expected is not None
        assert interval.low == pytest.approx(math.exp(expected.low), rel=1e-6)


def test_a_short_tail_is_a_window_too(pair: Pair) -> None:
    cut = dataclasses.replace(windows(), tail=np.arange(10, 18))
    rows = compare_windows(pair.reference, pair.artefact, cut, batch=2).windows
    assert rows["positions"].tolist() == [24] * 5 + [8]
    assert rows["scored_predictions"].tolist() == [23] * 5 + [7]


def test_a_model_and_itself_are_not_apart(pair: Pair) -> None:
    """R60: exactly zero, and the paired difference says that it looks like a mistake."""
    found = figures(dataclasses.replace(pair, artefact=pair.reference), windows(), floor=False)
    assert (found["kl"].value, found["reverse_kl"].value, found["top1"].value) == (0, 0, 1)
    assert found["acceptance_overlap"].value == pytest.approx(1, abs=1e-5)
    assert "exactly zero" in str(found["ln_perplexity_ratio"].flag)


def test_masked_vocabulary_gives_no_nan() -> None:
    """R59: logits of minus infinity on both sides count as nothing; on one side only as an infinite divergence."""
    logits = torch.randn(6, 16, generator=torch.Generator().manual_seed(0))
    masked = logits.clone()
    masked[:, 3] = -math.inf
    ids = torch.tensor([0, 1, 2, 4, 5, 6])
    same = position_figures(masked, masked, ids)
    assert bool((same.kl == 0).all())
    assert bool((same.reverse_kl == 0).all())
    apart = position_figures(logits, masked, ids)
    assert bool(torch.isinf(apart.kl).all())
    assert bool(torch.isfinite(apart.reverse_kl).all())
    assert not bool(apart.finite.any())


def test_a_padded_vocabulary_is_cut_to_what_both_have() -> None:
    """R60: rows that only pad one head are no tokens."""
    logits = torch.randn(6, 16, generator=torch.Generator().manual_seed(0))
    padded = torch.cat([logits, torch.full((6, 4), 3.0)], dim=1)
    found = position_figures(logits, padded, torch.arange(6))
    assert float(found.kl.abs().max()) < 1e-6
    torch.testing.assert_close(found.artefact_nats, found.reference_nats)


def test_positions_that_are_no_number_are_counted_and_left_out(pair: Pair) -> None:
    with torch.no_grad():
        pair.artefact.lm_head.weight[0, 0] = math.nan
    found = figures(pair, windows(), floor=False)
    assert found["nonfinite_positions"].value == 5 * 24
    assert math.isnan(found["kl"].value)
    assert "no position" in str(found["kl"].flag)
    assert math.isinf(found["perplexity"].value)
    assert math.isinf(found["bits_per_byte"].value)


def test_the_noise_floor_is_the_reference_in_sixteen_bits(pair: Pair) -> None:
    found = figures(pair, windows())
    floor = found["noise_floor_kl"]
    assert 0 < floor.value < 0.01 * found["kl"].value
    assert floor.subject == pair.baseline
    assert next(pair.reference.parameters()).dtype == torch.float32  # the reference itself is left as it is
