"""Smoothing one decoder block of many architectures: the float block must not move, and what cannot be smoothed is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from calib.evidence import Evidence
from calib.methods import Smoothing
from calib.scaling import ScaledBlock
from calib.smooth import SmoothBlock
from formats.fates import Quantise
from formats.reader import load_model
from quant.activations import ActivationScheme
from quant.scheme import Scheme
from tests.numerics.blocks import FOLDING, IDS, VARIANTS, Traced, save_variant

FATE = Quantise(Scheme(8, "sym", "channel", "f32"), codec="int-quantized", activations=ActivationScheme())


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Traced]:
    made: dict[str, Path] = {}

    def load(name: str) -> Traced:
        if name not in made:
            made[name] = save_variant(name, tmp_path_factory.mktemp("variants") / "model")
        return Traced.load(made[name])

    return load


def smoothed(traced: Traced, smoothing: Smoothing, *, clip: bool = False, keep: str = "-") -> ScaledBlock:
    fates = {key: FATE for key, value in traced.weights.items() if value.ndim == 2 and not key.startswith(keep)}
    return SmoothBlock(traced.runner, smoothing, clip=clip).scale(0, traced.inputs, traced.groups, fates, traced.dtypes)


@pytest.mark.parametrize("smoothing", [Smoothing(0.5), Smoothing(0.8, 90.0)], ids=["0.5", "0.8 of the 90th percentile"])
@pytest.mark.parametrize("name", FOLDING)
def test_r24_the_logits_of_the_whole_float_model_do_not_move(
    name: str, smoothing: Smoothing, trace: Callable[[str], Traced]
) -> None:
    """R24: also where several queries share one value channel; R30: no parameter appears or vanishes."""
    traced = trace(name)
    model = load_model(traced.folder)
    with torch.inference_mode():
        plain = model(IDS).logits
    block = smoothed(traced, smoothing)
    assert {note.kind for note in block.notes} == {"smoothing"}
    assert len(block.notes) == len(traced.groups)
    for group in traced.groups:
        for consumer in group.consumers:
            assert not torch.equal(block.weights[f"{consumer}.weight"], traced.weights[f"{consumer}.weight"])
    assert list(block.weights) == list(traced.weights)
    with torch.inference_mode():
        for key, value in block.weights.items():
            model.get_parameter(traced.prefix + key).copy_(value)
            assert torch.equal(traced.runner.skeleton.get(traced.prefix + key), value)
        folded = model(IDS).logits
    assert float((folded - plain).abs().max()) <= 1e-4 * float(plain.abs().max())


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in FOLDING])
def test_r25_what_nothing_produces_is_skipped_with_a_note(name: str, trace: Callable[[str], Traced]) -> None:
    traced = trace(name)
    before = traced.output()
    block = smoothed(traced, Smoothing(0.5))
    skipped = [note.text for note in block.notes if note.kind == "not-scaled"]
    assert len(skipped) == sum(group.producer is None for group in traced.groups) > 0
    assert any("self_attn" in text for text in skipped)
    assert float((traced.output() - before).norm() / before.norm()) < 1e-5


def test_inputs_are_more_level_afterwards(trace: Callable[[str], Traced]) -> None:
    """Alpha 1 makes every input channel equally large; alpha 0 leaves weights whose columns are."""
    for alpha, level_inputs in ((1.0, True), (0.0, False)):
        traced = trace("llama")
        block = smoothed(traced, Smoothing(alpha))
        first = traced.groups[0].consumers
        found: Evidence = traced.runner.gather(0, first[:1], traced.inputs)[first[0]]
        columns = torch.stack([block.weights[f"{name}.weight"].abs().amax(0) for name in first]).amax(0)
        level, other = (found.abs_max, columns) if level_inputs else (columns, found.abs_max)
        assert float(level.max() / level.min()) < 1.01
        assert float(other.max() / other.min()) > 1.5


def test_a_searched_alpha_is_told_with_what_it_gains(trace: Callable[[str], Traced]) -> None:
    traced = trace("llama")
    block = smoothed(traced, Smoothing())
    texts = {note.text.partition(": ")[0].rpartition(".")[2]: note.text for note in block.notes}
    assert set(texts) == {"q_proj", "o_proj", "gate_proj", "down_proj"}
    for text in texts.values():
        assert "alpha" in text or "not smoothed, 1 of" in text
        assert float(text.rpartition(", ")[2].split()[0]) <= 1


def test_a_matrix_that_stays_float_keeps_its_siblings_unsmoothed(trace: Callable[[str], Traced]) -> None:
    traced = trace("llama")
    block = smoothed(traced, Smoothing(0.5), keep="self_attn.v_proj")
    told = {note.text.split(": ")[0].rpartition(".")[2] for note in block.notes if note.kind == "not-scaled"}
    assert told == {"q_proj", "o_proj"}
    for leaf in ("q_proj", "k_proj", "v_proj", "o_proj"):
        key = f"self_attn.{leaf}.weight"
        assert torch.equal(block.weights[key], traced.weights[key])


def test_clipping_is_searched_only_when_asked_for(trace: Callable[[str], Traced]) -> None:
    assert smoothed(trace("llama"), Smoothing(0.5)).shrink == {}
    traced = trace("llama")
    block = smoothed(traced, Smoothing(0.5), clip=True)
    assert set(block.shrink) == {key for key, value in traced.weights.items() if value.ndim == 2}
