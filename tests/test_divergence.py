"""Divergence against an independent computation, and its edges."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from calib.windows import Windows
from eval.divergence import window_divergence
from formats.reader import load_model


def windows(count: int = 3, length: int = 20) -> Windows:
    ids = torch.randint(0, 256, (count, length), generator=torch.Generator().manual_seed(0)).numpy()
    return Windows(
        ids=ids,
        span=(0, count * length),
        length=length,
        stride=length,
        bos="none",
        digest="",
        corpus_sha256="",
        tokenizer_digest="",
        purpose="evaluation",
    )


def test_a_model_diverges_from_itself_by_nothing(tiny_model: Callable[[str], Path]) -> None:
    model = load_model(tiny_model("llama"))
    found = window_divergence(model, model, windows())
    assert found.mean_nats == 0
    assert found.top1 == 1


def test_kl_is_that_of_the_probabilities_in_float64(tiny_model: Callable[[str], Path]) -> None:
    one, two = load_model(tiny_model("llama")), load_model(tiny_model("llama"))
    with torch.no_grad():
        for parameter in two.parameters():
            parameter.mul_(1.3)
    found = window_divergence(one, two, windows())
    total = 0.0
    for row in windows().ids:
        p, q = (
            torch.softmax(m(torch.from_numpy(row)[None], use_cache=False).logits[0].double(), -1).detach().numpy()
            for m in (one, two)
        )
        total += float((p * np.log(p / q)).sum())
    assert found.mean_nats == pytest.approx(total / 60, rel=1e-3)
    assert list(found.positions) == [20, 20, 20]


def test_positions_without_a_finite_value_are_counted(tiny_model: Callable[[str], Path]) -> None:
    one, two = load_model(tiny_model("llama")), load_model(tiny_model("llama"))
    with torch.no_grad():
        two.lm_head.weight[0, 0] = float("nan")
    found = window_divergence(one, two, windows())
    assert found.nonfinite == 60
    assert found.mean_nats == float("inf")
