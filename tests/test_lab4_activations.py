"""The second half of lab 4 on a tiny model, against the source text's own few lines written out."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from calib.windows import Windows
from eval.lab4 import Lab4, load_lab4
from eval.lab4_activations import (
    activation_misses,
    decoder_linears,
    largest_inputs,
    outliers,
    run_activation_rows,
    run_decomposition_rows,
)
from eval.perplexity import window_losses
from formats.reader import load_model

CALIBRATION = torch.randint(0, 256, (3, 20), generator=torch.Generator().manual_seed(1))


def nothing(done: int, total: int) -> None:
    return None


@pytest.fixture
def model(tiny_model: Callable[[str], Path]) -> Any:
    found = load_model(tiny_model("llama"))
    with torch.no_grad():
        for layer in found.model.layers:
            layer.input_layernorm.weight[3] = 40
    return found


@pytest.fixture
def windows() -> Windows:
    ids = np.random.default_rng(0).integers(0, 256, (5, 24))
    return Windows(ids, (0, 120), 24, 24, "none", "digest", "corpus", "tokenizer", "evaluation")


@pytest.fixture
def lab() -> Lab4:
    return load_lab4()


def quantise(value: Tensor, mode: str) -> Tensor:
    """The source text's quantiser at 8 bits, symmetric: per tensor or per row."""
    scale = value.abs().amax(1, keepdim=True) / 127 if mode == "channel" else value.abs().max() / 127
    return (value / scale.clamp_min(1e-12)).round().clamp(-127, 127) * scale.clamp_min(1e-12)


@contextmanager
def as_the_text_does(model: Any, stats: dict[str, Tensor], alpha: float | None) -> Iterator[None]:
    layers = decoder_linears(model)
    kept = {name: layer.weight.detach().clone() for name, layer in layers.items()}
    hooks = []
    for name, layer in layers.items():
        w = kept[name]
        s = torch.ones(w.shape[1])
        if alpha is not None:
            s = stats[name].clamp_min(1e-8) ** alpha / w.abs().amax(0).clamp_min(1e-8) ** (1 - alpha)
        layer.weight.data.copy_(quantise(w * s, "channel"))

        def divide(module: Any, args: tuple[Tensor, ...], s: Tensor = s) -> tuple[Tensor]:
            return (quantise(args[0] / s, "tensor"),)

        hooks.append(layer.register_forward_pre_hook(divide))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for name, layer in layers.items():
            layer.weight.data.copy_(kept[name])


def test_rows_are_the_texts_and_the_model_is_put_back(model: Any, windows: Windows, lab: Lab4) -> None:
    before = window_losses(model, windows).perplexity
    stats = largest_inputs(model, CALIBRATION)
    rows = list(run_activation_rows(model, lab, windows, stats, nothing))
    assert window_losses(model, windows).perplexity == before
    for result in rows:
        with as_the_text_does(model, stats, result.row.alpha):
            assert result.perplexity == pytest.approx(window_losses(model, windows).perplexity, rel=1e-6), result.row.label
    assert len({round(result.perplexity, 6) for result in rows}) == 3


def test_outliers_are_those_of_the_inputs_written_out(model: Any) -> None:
    seen: dict[str, Tensor] = {}
    hooks = [
        layer.register_forward_pre_hook(
            lambda module, args, name=name: seen.update({name: torch.cat([seen[name], args[0]]) if name in seen else args[0]})
        )
        for name, layer in decoder_linears(model).items()
    ]
    with torch.inference_mode():
        model(CALIBRATION)
    for hook in hooks:
        hook.remove()
    largest = largest_inputs(model, CALIBRATION)
    for name, value in seen.items():
        torch.testing.assert_close(largest[name], value.reshape(-1, value.shape[-1]).abs().amax(0), rtol=1e-5, atol=1e-6)
    found = outliers(model, largest)
    ratios = {name: float(x.max()) / sorted(x.tolist())[(len(x) - 1) // 2] for name, x in largest.items()}
    assert found.worst_layer == max(ratios, key=ratios.__getitem__)
    assert found.ratio == pytest.approx(max(ratios.values()))
    assert found.median_ratio == pytest.approx(statistics.median(ratios.values()))


@pytest.mark.parametrize("threshold", [1e-6, 6.0, 1e6])
def test_mixed_decomposition_is_two_products_per_matrix(threshold: float, model: Any, windows: Windows, lab: Lab4) -> None:
    """With every column an outlier the model is that of float16 weights; with none it is W8A8 per token."""
    row = lab.decomposition_row[0].model_copy(update={"threshold": threshold})
    before = window_losses(model, windows).perplexity
    largest = largest_inputs(model, CALIBRATION)
    (result,) = run_decomposition_rows(model, lab.model_copy(update={"decomposition_row": (row,)}), windows, largest, nothing)
    assert window_losses(model, windows).perplexity == before
    layers = decoder_linears(model)
    columns = {name: largest[name] >= threshold for name in layers}
    elements = sum(layer.weight.numel() for layer in layers.values())
    out = {name: layer.weight.shape[0] for name, layer in layers.items()}
    expected = 0
    for name, mask in columns.items():
        kept = int(mask.sum())
        others = len(mask) - kept
        expected += out[name] * others + (2 * out[name] if others else 0) + kept * (2 * out[name] + 4)
    assert result.nbytes == expected
    assert result.bits_per_weight == pytest.approx(8 * expected / elements)
    assert result.outlier_share == pytest.approx(float(torch.cat([*columns.values()]).double().mean()))
    if threshold < 1:
        assert result.perplexity == pytest.approx(before, rel=1e-3)
        assert result.perplexity != before
    elif threshold == 6.0:
        assert 0 < result.outlier_share < 1


def test_every_figure_that_differs_is_named(lab: Lab4) -> None:
    """On the published model the text's figures are demanded, on the embedded one those that came out here."""
    from eval.lab4 import ActivationResult, DecompositionResult

    for published in (True, False):
        found = lab.published_outliers if published else lab.embedded_outliers
        rows = [ActivationResult(row, (row.published if published else row.embedded) or 0.0) for row in lab.activation_row]
        mixed = [DecompositionResult(row, 0.04, 1, 8.0, row.embedded or 0.0) for row in lab.decomposition_row]
        assert activation_misses(lab, found, rows, mixed, published) == []
        wrong = [ActivationResult(result.row, result.perplexity * 1.035) for result in rows]
        assert len(activation_misses(lab, found, wrong, mixed, published)) == len(rows)
        elsewhere = found.model_copy(update={"worst_layer": "model.layers.3.mlp.down_proj", "ratio": found.ratio * 1.002})
        said = activation_misses(lab, elsewhere, rows, mixed, published)
        assert len(said) == 2
        assert "model.layers.11.mlp.down_proj" in said[0]
    worse = [DecompositionResult(row, 0.04, 1, 8.0, 40.0) for row in lab.decomposition_row]
    rows = [ActivationResult(row, row.embedded or 0.0) for row in lab.activation_row]
    assert len(activation_misses(lab, lab.embedded_outliers, rows, worse, published=False)) == 1
