"""A source with outliers in its activations, and runs of the real command on it, each made once per module."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from formats.manifest import Manifest
from quant.activations import ALIASES
from tests.conftest import SIZES
from tests.test_tables import build
from tests.tiny_runs import run, write_text

IDS = torch.randint(0, 256, (3, 24), generator=torch.Generator().manual_seed(0))
W8 = ("--bits", "8", "--group-size", "channel")
SHORT = list(ALIASES)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


def outliers(model: Any) -> None:
    """Channels that stick out of every norm, as in large models."""
    for layer in model.model.layers:
        layer.input_layernorm.weight[3] = 40
        layer.post_attention_layernorm.weight[5] = 40


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("models") / "outliers", "Llama", SIZES, outliers)


@pytest.fixture(scope="module")
def made(source: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Manifest]]:
    """``made("smoothquant", "--activations", "static")``: folder and manifest of a run, each made once."""
    done: dict[tuple[str, ...], tuple[Path, Manifest]] = {}

    def make(*words: str) -> tuple[Path, Manifest]:
        if words not in done:
            folder = tmp_path_factory.mktemp("made") / "out"
            method, *options = words
            done[words] = folder, run(method, source, folder, text, *options, without=("--group-size",))
        return done[words]

    return make


def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    with torch.inference_mode():
        found: Tensor = model(ids).logits
    return found
