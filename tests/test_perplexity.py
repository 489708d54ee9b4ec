"""Losses of tiny random models against a float64 oracle, and what must not change them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from calib.windows import Windows
from eval.measurement import ln_ratio_measurement, perplexity_measurement, windows_record
from eval.perplexity import WindowLosses, window_losses
from eval.stats import mean_loss, paired_difference
from formats.manifest import MeasurementRecord, WindowsRecord
from quant.errors import CorpusError, UsageError
from tests.conftest import make_tiny_model

VOCABULARY = 256


@pytest.fixture(scope="module")
def model() -> Any:
    return make_tiny_model("llama")


def windows(n: int = 5, length: int = 24, tail: int | None = None, seed: int = 0) -> Windows:
    random = np.random.default_rng(seed)
    return Windows(
        ids=random.integers(0, VOCABULARY, (n, length)),
        span=(0, n * length + (tail or 0)),
        length=length,
        stride=length,
        bos="none",
        digest=f"{seed}-{n}-{length}-{tail}",
        corpus_sha256="c",
        tokenizer_digest="t",
        purpose="evaluation",
        tail=None if tail is None else random.integers(0, VOCABULARY, (tail,)),
        corpus_name="some text",
        join="rows joined by a blank line",
    )


def oracle(model: Any, ids: NDArray[np.int64]) -> float:
    """Summed loss of one window in float64, written out: no log-softmax, no cross-entropy of any library."""
    with torch.inference_mode():
        logits = model(torch.tensor(ids[None, :])).logits[0].double().numpy()
    total = 0.0
    for position in range(len(ids) - 1):
        row = logits[position]
        total += row.max() + math.log(np.exp(row - row.max()).sum()) - row[ids[position + 1]]
    return total


def test_losses_are_those_of_the_oracle_window_by_window(model: Any) -> None:
    chosen = windows(n=5, tail=7)
    found = window_losses(model, chosen)
    assert chosen.tail is not None
    expected = [oracle(model, ids) for ids in [*chosen.ids, chosen.tail]]
    assert found.nats == pytest.approx(expected, rel=1e-6)
    assert found.scored.tolist() == [23, 23, 23, 23, 23, 6]
    assert found.perplexity == pytest.approx(math.exp(sum(expected) / 121), rel=1e-6)
    assert (found.nonfinite, found.flag, found.windows_digest) == (0, None, chosen.digest)


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 100])
def test_batch_size_changes_nothing(model: Any, batch: int) -> None:
    """R54's kind: every chunk is scored, whatever the chunk size."""
    chosen = windows(n=5, tail=7)
    assert window_losses(model, chosen, batch=batch).nats == pytest.approx(window_losses(model, chosen, batch=4).nats, rel=1e-6)


def test_order_of_windows_changes_nothing(model: Any) -> None:
    chosen = windows(n=6)
    turned = replace(chosen, ids=chosen.ids[::-1].copy())
    assert window_losses(model, turned).nats[::-1] == pytest.approx(window_losses(model, chosen).nats, rel=1e-6)


def test_perplexity_is_token_weighted() -> None:
    """R52: 1,024 tokens at 2 nats and 16 at 6 give 7.858; the mean over windows would give 54.6."""
    found = WindowLosses(np.array([2048.0, 96.0]), np.array([1024, 16]))
    assert found.perplexity == pytest.approx(7.858, abs=5e-4)
    assert found.scored_tokens == 1040


def test_a_text_shorter_than_a_window_is_one_short_window(model: Any) -> None:
    """R56: 7 tokens give 6 predictions, a value and no error."""
    chosen = windows(n=0, length=24, tail=7)
    found = window_losses(model, chosen)
    assert chosen.tail is not None
    assert found.scored.tolist() == [6]
    assert found.nats[0] == pytest.approx(oracle(model, chosen.tail), rel=1e-6)
    record = perplexity_measurement(found, mean_loss(found, seed=0), windows=chosen, subject={}).record()
    assert record["value"] == pytest.approx(found.perplexity)
    assert (record["standard_error"], record["interval"], record["n"]) == (None, None, 1)


@pytest.mark.parametrize("tail", [None, 1])
def test_no_window_to_score_is_an_error(model: Any, tail: int | None) -> None:
    with pytest.raises(CorpusError, match="window"):
        window_losses(model, windows(n=0, tail=tail))


def changed_head(change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    broken = make_tiny_model("llama")
    with torch.no_grad():
        broken.lm_head.weight.copy_(change(broken.lm_head.weight))
    return broken


def test_a_loss_that_overflows_is_shown_and_flagged() -> None:
    """R59: the head times 1e5 loses thousands of nats a token: the loss is a number, the perplexity infinite with its reason."""
    found = window_losses(changed_head(lambda head: head * 1e5), windows())
    assert found.nonfinite == 0
    assert 710 < found.mean_nats < math.inf
    assert found.perplexity == math.inf
    assert "overflows exp" in (found.flag or "")
    record = perplexity_measurement(found, mean_loss(found, seed=0), windows=windows(), subject={}).record()
    assert record["value"] is None
    assert record["flag"].startswith("inf: a loss of ")
    assert float(record["settings"]["mean_nats_per_token"]) == pytest.approx(found.mean_nats)


def test_nan_is_counted_and_never_becomes_the_value() -> None:
    chosen = windows()
    found = window_losses(changed_head(lambda head: torch.full_like(head, math.nan)), chosen)
    assert found.nonfinite == found.scored_tokens == 5 * 23
    assert (found.nats == 0).all()
    assert found.perplexity == found.mean_nats == math.inf
    healthy = replace(found, nats=np.ones(5), nonfinite=0, nonfinite_by_window=None)
    record = ln_ratio_measurement(paired_difference(found, healthy, seed=0), windows=chosen, subject={}, baseline={}).record()
    assert record["value"] is None
    assert record["flag"].startswith("nan: quantised model: 115 of 115 predictions have no finite loss")


@dataclass
class _Logits:
    """A model that adds ``mask`` to the logits of another, or casts them to ``dtype``."""

    inner: Any
    mask: torch.Tensor | None = None
    dtype: torch.dtype = torch.float32
    training: bool = False

    def __call__(self, ids: torch.Tensor, use_cache: bool) -> Any:
        assert not self.training, "scored with dropout"
        logits = self.inner(ids, use_cache=use_cache).logits
        return SimpleNamespace(logits=(logits if self.mask is None else logits + self.mask).to(self.dtype))

    def parameters(self) -> Any:
        return self.inner.parameters()

    def train(self, mode: bool = True) -> None:
        self.training = mode

    def eval(self) -> None:
        self.training = False


def as_module(model: _Logits) -> torch.nn.Module:
    return cast(torch.nn.Module, model)


def test_masked_vocabulary_is_no_fault_unless_the_text_needs_it(model: Any) -> None:
    """R59: -inf logits are normal where a vocabulary is padded; only a token of the text that has one loses infinitely much."""
    chosen = windows(n=2)
    chosen = replace(chosen, ids=chosen.ids % 200)
    mask = torch.zeros(VOCABULARY)
    mask[200:] = -math.inf
    found = window_losses(as_module(_Logits(model, mask)), chosen)
    assert found.nonfinite == 0
    assert found.perplexity < window_losses(model, chosen).perplexity
    mask[chosen.ids[0, 5]] = -math.inf
    times = int((chosen.ids[:, 1:] == chosen.ids[0, 5]).sum())
    found = window_losses(as_module(_Logits(model, mask)), chosen)
    assert found.nonfinite == times > 0
    assert found.perplexity == math.inf, "leaving the infinite ones out would flatter a broken model"
    assert math.isfinite(found.mean_nats)
    assert f"{times} of 46 predictions have no finite loss (the others lose" in (found.flag or "")


def test_half_precision_that_overflows_is_counted(model: Any) -> None:
    wild = changed_head(lambda head: head * 1e6)
    assert window_losses(wild, windows()).nonfinite == 0
    assert window_losses(as_module(_Logits(wild, dtype=torch.float16)), windows()).nonfinite > 0


def test_the_loss_is_float32_whatever_the_logits_are(model: Any) -> None:
    """A loss taken in bfloat16 has steps of 1/64 and more; with float32 arithmetic only the logits' own rounding remains."""
    exact = window_losses(model, windows()).nats
    coarse = window_losses(as_module(_Logits(model, dtype=torch.bfloat16)), windows()).nats
    assert coarse == pytest.approx(exact, abs=23 * 2e-3)
    assert (coarse != exact).any()


def test_the_mode_of_the_model_is_left_as_it_was(model: Any) -> None:
    quiet = window_losses(model, windows())
    model.train()
    try:
        assert (window_losses(model, windows()).nats == quiet.nats).all()
        assert model.training
    finally:
        model.eval()
    window_losses(model, windows())
    assert not model.training
    strict = _Logits(model, training=True)
    assert (window_losses(as_module(strict), windows()).nats == quiet.nats).all()
    assert strict.training


def test_progress_counts_windows(model: Any) -> None:
    seen: list[tuple[int, int]] = []
    window_losses(model, windows(n=5, tail=7), batch=2, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(2, 6), (4, 6), (5, 6), (6, 6)]


def test_windows_the_model_cannot_hold_are_refused(model: Any) -> None:
    """R57: a learned table of positions crashes past its end, a rotary model goes on in silence; both are refused."""
    with pytest.raises(UsageError, match=r"windows of 129 tokens exceed the model's 128 positions"):
        window_losses(model, windows(n=1, length=129))
    assert math.isfinite(window_losses(model, windows(n=1, length=128)).perplexity)


def test_ids_outside_the_vocabulary_are_refused(model: Any) -> None:
    chosen = windows()
    chosen.ids[2, 3] = VOCABULARY
    with pytest.raises(UsageError, match="token id 256 is outside the vocabulary of 256"):
        window_losses(model, chosen)


def test_measurements_carry_convention_and_digests(model: Any) -> None:
    chosen = windows(n=8)
    base = window_losses(model, chosen)
    other = window_losses(changed_head(lambda head: head * 1.5), chosen)
    single = perplexity_measurement(base, mean_loss(base, seed=1), windows=chosen, subject={"model.safetensors": "s"}).record()
    pair = ln_ratio_measurement(
        paired_difference(other, base, seed=1), windows=chosen, subject={"q": "1"}, baseline={"f": "2"}
    ).record()
    assert single["interval"]["low"] < base.perplexity < single["interval"]["high"]
    assert single["standard_error"] == pytest.approx(base.perplexity * (mean_loss(base, seed=1).standard_error or 0))
    assert single["settings"] == {
        "average": "token weighted over all windows",
        "bos": "none",
        "first_scored": "1",
        "mean_nats_per_token": f"{base.mean_nats:.10g}",
        "scored_tokens": "184",
        "span_tokens": "0:192",
        "stride_tokens": "24",
        "text": "some text, rows joined by a blank line",
        "window_tokens": "24",
    }
    assert single["inputs"] == {"corpus": "c", "tokenizer": "t", "windows": chosen.digest}
    assert pair["inputs"]["baseline f"] == "2"
    assert pair["subject"] == {"q": "1"}
    assert pair["value"] == pytest.approx(math.log(other.perplexity / base.perplexity))
    assert pair["unit"] == "nats/token"


def test_the_windows_go_into_the_manifest(model: Any) -> None:
    chosen = windows(n=8, tail=7)
    record = WindowsRecord(**windows_record(chosen))
    assert (record.digest, record.span_tokens, record.length_tokens, record.count) == (chosen.digest, [0, 199], 24, 9)
    losses = window_losses(model, chosen)
    stored = MeasurementRecord(**perplexity_measurement(losses, mean_loss(losses, seed=0), windows=chosen, subject={}).record())
    assert stored.value == losses.perplexity
    assert stored.interval is not None
    assert stored.interval.level == 0.95
