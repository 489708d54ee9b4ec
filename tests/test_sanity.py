"""Broken baselines are named; verdicts are about the worse end of an interval."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from eval.perplexity import window_losses
from eval.sanity import broken_baseline, first_nonfinite, poor_baseline
from eval.stats import Interval
from eval.verdict import verdict
from formats.reader import load_model
from tests.test_language import windows


def test_a_random_model_passes_with_a_warning(tiny_model: Callable[[str], Path]) -> None:
    losses = window_losses(load_model(tiny_model("llama")), windows())
    assert broken_baseline(losses, 256) is None
    assert "frequencies of the tokens" in str(poor_baseline(losses, windows().ids))


@pytest.mark.parametrize(
    ("damage", "words"), [("head", "guessing all 256 tokens alike loses 5.545"), ("nan", "have no finite loss")]
)
def test_a_broken_model_is_named(damage: str, words: str, tiny_model: Callable[[str], Path]) -> None:
    """R59 and R95: a head x 1e4 is confidently wrong everywhere; one NaN spoils every logit."""
    model = load_model(tiny_model("llama"))
    with torch.no_grad():
        if damage == "head":
            model.lm_head.weight.mul_(1e4)
        else:
            model.lm_head.weight[7, 7] = float("nan")
    losses = window_losses(model, windows())
    assert words in str(broken_baseline(losses, 256))


def test_a_model_that_knows_the_text_gets_no_warning() -> None:
    ids = np.array([[1, 2, 3, 4]])

    class Sure(torch.nn.Module):
        def forward(self, ids: torch.Tensor, use_cache: bool = False) -> object:
            logits = 20.0 * torch.nn.functional.one_hot(ids + 1, 8).float()

            class Output:
                pass

            found = Output()
            found.logits = logits  # type: ignore[attr-defined]
            return found

    losses = window_losses(Sure(), dataclasses.replace(windows(), ids=ids, length=4))
    assert broken_baseline(losses, 8) is None
    assert poor_baseline(losses, ids) is None


@pytest.mark.parametrize(
    ("low", "high", "higher_is_worse", "answer"),
    [
        (-0.01, 0.04, True, "not inferior"),
        (0.01, 0.06, True, "undecided"),
        (0.06, 0.2, True, "inferior"),
        (-0.04, 0.3, False, "not inferior"),
        (-0.06, 0.0, False, "undecided"),
        (-0.2, -0.06, False, "inferior"),
    ],
)
def test_a_verdict_is_about_the_worse_end(low: float, high: float, higher_is_worse: bool, answer: str) -> None:
    found = verdict((low + high) / 2, Interval(low, high, 0.95, "bootstrap"), 0.05, higher_is_worse=higher_is_worse)
    assert found is not None
    assert found.answer == answer
    assert str(found).startswith(f"{answer}: worse by ")


def test_without_an_interval_there_is_no_verdict() -> None:
    assert verdict(0.0, None, 0.05, higher_is_worse=True) is None


def test_the_first_module_that_gives_no_number_is_named(tiny_model: Callable[[str], Path]) -> None:
    model = load_model(tiny_model("llama"))
    ids = windows().ids[0]
    assert first_nonfinite(model, ids) is None
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(float("inf"))
    assert first_nonfinite(model, ids) == "model.layers.1.mlp.up_proj"
