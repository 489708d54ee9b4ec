"""Who feeds whom, and folding, on tiny models of many shapes: the float logits must not move, false folds must be undone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

import calib.awq
from calib.awq import AwqBlock
from calib.graph import FeedGroup, FromLinear, FromNorm, linear_names
from calib.scaling import ScaledBlock
from formats.fates import Quantise
from formats.reader import load_model
from quant.scheme import Scheme
from quant.transforms.awq import Consumer, ScaleChoice, search_clipping, search_factors
from tests.numerics.blocks import FOLDING, IDS, VARIANTS, Traced, save_variant

QKV, GATES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    built: dict[str, Path] = {}

    def build(name: str) -> Path:
        if name not in built:
            built[name] = save_variant(name, tmp_path_factory.mktemp("graph") / "model")
        return built[name]

    return build


@pytest.fixture
def trace(folder: Callable[[str], Path]) -> Callable[[str], Traced]:
    return lambda name: Traced.load(folder(name))


@pytest.mark.parametrize("name", [name for name in FOLDING if name != "opt"])
def test_groups_and_producers_of_a_block_are_found(name: str, trace: Callable[[str], Traced]) -> None:
    """R24: also with fewer key-value heads than heads."""
    found = {group.consumers: group.producer for group in trace(name).groups}
    assert list(found) == [QKV, ("self_attn.o_proj",), GATES, ("mlp.down_proj",)], "in order of execution"
    gates_read = "pre_feedforward_layernorm" if name.startswith("gemma2") else "post_attention_layernorm"
    assert found[QKV] == FromNorm("input_layernorm")
    assert found[GATES] == FromNorm(gates_read)
    value, up = found[("self_attn.o_proj",)], found[("mlp.down_proj",)]
    assert isinstance(value, FromLinear)
    assert isinstance(up, FromLinear)
    assert (value.module, up.module) == ("self_attn.v_proj", "mlp.up_proj")
    assert up.channel.tolist() == list(range(128))
    heads = VARIANTS[name][1]["num_key_value_heads"]
    expected = [(head * heads // 4) * 16 + place for head in range(4) for place in range(16)]
    assert value.channel.tolist() == expected


def test_groups_of_a_block_with_biased_norms_and_a_plain_mlp(trace: Callable[[str], Traced]) -> None:
    found = {group.consumers: group.producer for group in trace("opt").groups}
    assert list(found) == [QKV, ("self_attn.out_proj",), ("fc1",), ("fc2",)]
    assert found[QKV] == FromNorm("self_attn_layer_norm")
    assert found[("fc1",)] == FromNorm("final_layer_norm")
    hidden = found[("fc2",)]  # ReLU passes positive factors on
    assert isinstance(hidden, FromLinear)
    assert hidden.module == "fc1"


def test_what_nothing_foldable_produces_has_no_producer(trace: Callable[[str], Traced]) -> None:
    """R25: a fused matrix is not taken for its value part; a block that normalises after has the residual as its input."""
    fused = {group.consumers: group.producer for group in trace("phi3").groups}
    assert fused[("self_attn.qkv_proj",)] == FromNorm("input_layernorm")
    assert fused[("self_attn.o_proj",)] is None
    assert fused[("mlp.down_proj",)] is None
    after = {group.consumers: group.producer for group in trace("olmo2").groups}
    assert after[QKV] is None
    assert after[GATES] is None
    assert isinstance(after[("self_attn.o_proj",)], FromLinear)


def test_every_linear_is_in_exactly_one_group_and_nothing_is_left_behind(trace: Callable[[str], Traced]) -> None:
    for name in VARIANTS:
        traced = trace(name)
        block = traced.runner.block(0)
        assert sorted(consumer for group in traced.groups for consumer in group.consumers) == sorted(linear_names(block))
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in block.modules()), "hooks are removed"


def random_factors(group: FeedGroup, width: int, seed: int) -> Tensor:
    """Factors from about 0.1 to 10; equal where two input channels come from one output channel."""
    factors = torch.randn(width, generator=torch.Generator().manual_seed(seed)).exp()
    return factors[group.producer.channel.clamp_min(0)] if isinstance(group.producer, FromLinear) else factors


def logits(folder: Path, changed: Mapping[str, Tensor]) -> Tensor:
    model = load_model(folder)
    known = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in changed.items():
            known[name].copy_(value)
        found: Tensor = model(IDS).logits
    return found


@pytest.mark.parametrize("name", FOLDING)
def test_every_fold_keeps_the_logits_of_the_whole_model(name: str, trace: Callable[[str], Traced]) -> None:
    traced = trace(name)
    before = dict(traced.weights)
    plain = logits(traced.folder, {})
    for seed, group in enumerate(traced.groups):
        width = before[f"{group.consumers[0]}.weight"].shape[1]
        factors, notes = traced.fold(group, random_factors(group, width, seed))
        assert notes == []
        assert factors is not None
        alive = 0.4 if group.consumers == ("fc2",) else 0.9  # ReLU: what the sample never lights up keeps factor 1
        assert float((factors != 1).float().mean()) > alive, "a fold that scales nothing is none"
        for consumer in group.consumers:
            assert not torch.equal(traced.weights[f"{consumer}.weight"], before[f"{consumer}.weight"])
        folded = logits(traced.folder, {traced.prefix + key: value for key, value in traced.weights.items()})
        assert float((folded - plain).abs().max()) <= 1e-4 * float(plain.abs().max()), group
    assert list(traced.weights) == list(before), "R30: no parameter appears or vanishes"
    assert torch.equal(traced.output(), trace_output(traced)), "the running block holds what the dictionary says"


def trace_output(traced: Traced) -> Tensor:
    traced.apply(traced.weights)
    return traced.output()


@pytest.mark.parametrize("name", ["llama, bfloat16", "qwen2, bfloat16", "gemma2, bfloat16"])
def test_parameters_that_stay_float_are_folded_exactly_in_their_stored_type(name: str, trace: Callable[[str], Traced]) -> None:
    """What is written in bfloat16 is what the block was verified with, and the matrices take up its rounding."""
    traced = trace(name)
    original, output = dict(traced.weights), traced.output()
    for seed, group in enumerate(traced.groups):
        wanted = random_factors(group, original[f"{group.consumers[0]}.weight"].shape[1], seed)
        factors, notes = traced.fold(group, wanted)
        assert notes == []
        assert factors is not None
        torch.testing.assert_close(factors, wanted, rtol=0.05, atol=0)
    changed = [key for key, value in traced.weights.items() if value.ndim == 1 and not torch.equal(value, original[key])]
    assert len(changed) >= 2
    for key in changed:
        assert torch.equal(traced.weights[key].bfloat16().float(), traced.weights[key]), f"{key} changes when it is stored"
    difference = float((traced.output() - output).norm() / output.norm())
    assert difference < 2e-6, "float32 rounding only, none of bfloat16"


def test_channels_that_a_norm_holds_at_zero_keep_factor_one(trace: Callable[[str], Traced]) -> None:
    traced = trace("llama, dead norm channels")
    factors, notes = traced.fold(traced.groups[0], torch.full((64,), 3.0))
    assert notes == []
    assert factors is not None
    assert factors[[3, 40]].tolist() == [1.0, 1.0]
    torch.testing.assert_close(factors[[0, 1, 63]], torch.full((3,), 3.0))
    assert all(bool(torch.isfinite(value).all()) for value in traced.weights.values())


FALSE_FOLDS: dict[str, Callable[[Traced], FeedGroup]] = {
    "queries do not feed o_proj": lambda traced: FeedGroup(
        ("self_attn.o_proj",), FromLinear("self_attn.q_proj", torch.arange(64))
    ),
    "keys do not feed o_proj": lambda traced: FeedGroup(
        ("self_attn.o_proj",), FromLinear("self_attn.k_proj", torch.arange(32).repeat(2))
    ),
    "value heads repeat, they are not tiled": lambda traced: FeedGroup(
        ("self_attn.o_proj",), FromLinear("self_attn.v_proj", torch.arange(32).repeat(2))
    ),
    "gate passes a nonlinearity": lambda traced: FeedGroup(
        ("mlp.down_proj",), FromLinear("mlp.gate_proj", torch.arange(128))
    ),
    "the wrong norm": lambda traced: FeedGroup(QKV, FromNorm("post_attention_layernorm")),
    "a reader is missing": lambda traced: FeedGroup(QKV[:2], FromNorm("input_layernorm")),
    "nothing": lambda traced: FeedGroup(QKV, None),
}  # fmt: skip


@pytest.mark.parametrize("model", ["llama", "qwen2, biases 5", "llama, bfloat16"])
@pytest.mark.parametrize("false", FALSE_FOLDS)
def test_a_false_fold_is_undone_bit_for_bit_and_noted(false: str, model: str, trace: Callable[[str], Traced]) -> None:
    traced = trace(model)
    before, output = {key: value.clone() for key, value in traced.weights.items()}, traced.output()
    group = FALSE_FOLDS[false](traced)
    width = before[f"{group.consumers[0]}.weight"].shape[1]
    factors = torch.randn(width, generator=torch.Generator().manual_seed(0)).exp()
    if isinstance(group.producer, FromLinear):
        factors = factors[group.producer.channel]
    found, notes = traced.fold(group, factors)
    assert found is None
    assert [note.kind for note in notes] == ["fold-undone"]
    assert notes[0].text.startswith("block 0: ")
    for key, value in before.items():
        assert torch.equal(traced.weights[key], value)
        assert torch.equal(traced.runner.skeleton.get(traced.prefix + key), value)
    assert torch.equal(traced.output(), output)


def test_a_fold_to_nan_is_undone(trace: Callable[[str], Traced]) -> None:
    traced = trace("llama")
    before = dict(traced.weights)
    found, notes = traced.fold(traced.groups[0], torch.full((64,), torch.inf))
    assert found is None
    assert len(notes) == 1
    assert all(torch.equal(traced.weights[key], value) for key, value in before.items())


def scaled(traced: Traced, keep: tuple[str, ...] = ()) -> ScaledBlock:
    fates = {
        key: Quantise(Scheme(3, "sym", 16))
        for key, value in traced.weights.items()
        if value.ndim == 2 and not key.startswith(keep or "-")
    }
    return AwqBlock(traced.runner, clip=True).scale(0, traced.inputs, traced.groups, fates, traced.dtypes)


@pytest.mark.parametrize("name", FOLDING)
def test_a_scaled_block_computes_what_it_did(name: str, trace: Callable[[str], Traced]) -> None:
    traced = trace(name)
    output = traced.output()
    block = scaled(traced)
    assert block.notes == []
    assert {name for name, choice in block.choices.items() if choice.exponents != (0.0, 0.0)} == set(block.choices)
    assert float((traced.output() - output).norm() / output.norm()) < 1e-5
    kept = {key: value for key, value in traced.weights.items() if value.ndim == 1}
    assert block.folded == {key for key, value in kept.items() if not torch.equal(block.weights[key], value)}
    norms = {key for key in kept if "norm" in key}
    assert len(block.folded & norms) == (4 if name == "opt" else 2)
    assert set(block.shrink) == {key for key, value in traced.weights.items() if value.ndim == 2}
    for key, value in block.weights.items():
        assert torch.equal(traced.runner.skeleton.get(traced.prefix + key), value)


@pytest.mark.parametrize(
    ("keep", "unscaled"),
    [
        (("self_attn.q_proj",), {"self_attn.q_proj"}),  # reads what k and v read
        (("self_attn.v_proj",), {"self_attn.q_proj", "self_attn.o_proj"}),  # and its rows cannot take o's factors
        (("mlp.up_proj",), {"mlp.gate_proj", "mlp.down_proj"}),
    ],
)
def test_a_matrix_that_stays_float_is_not_scaled_and_this_is_noted(
    keep: tuple[str, ...], unscaled: set[str], trace: Callable[[str], Traced]
) -> None:
    traced = trace("llama")
    before, output = traced.weights[f"{keep[0]}.weight"].clone(), traced.output()
    block = scaled(traced, keep)
    assert {note.text.split(":")[0].removeprefix("model.layers.0.") for note in block.notes} == unscaled
    assert {note.kind for note in block.notes} == {"not-scaled"}
    assert torch.equal(block.weights[f"{keep[0]}.weight"], before)
    assert f"{keep[0]}.weight" not in block.shrink
    assert float((traced.output() - output).norm() / output.norm()) < 1e-5


def test_every_group_is_searched_with_the_rows_it_will_keep(
    trace: Callable[[str], Traced], monkeypatch: pytest.MonkeyPatch
) -> None:
    """v_proj and up_proj lose rows' scale to what they feed: that is done before their own columns are searched."""
    traced, searched = trace("llama"), list[list[Consumer]]()

    def record(consumers: list[Consumer], gram: Tensor, share: Tensor | None, free: Tensor | None) -> ScaleChoice:
        searched.append(consumers)
        return search_factors(consumers, gram, share, free)

    monkeypatch.setattr(calib.awq, "search_factors", record)
    block = scaled(traced)
    by_shape = {tuple(consumer.matrix.shape for consumer in consumers): consumers for consumers in searched}
    assert len(by_shape) == 4
    for group in traced.groups:
        names = [f"{name}.weight" for name in group.consumers]
        consumers = by_shape[tuple(block.weights[name].shape for name in names)]
        for name, consumer in zip(names, consumers, strict=True):
            ratio = block.weights[name] / consumer.matrix
            torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio), rtol=1e-4, atol=0)  # columns were scaled, no row


def test_clipping_is_searched_on_the_inputs_of_the_scaled_block(trace: Callable[[str], Traced]) -> None:
    traced = trace("llama, equal heads")
    block = scaled(traced)
    fresh = traced.runner.gather(0, linear_names(traced.runner.block(0)), traced.inputs)
    for key, shrink in block.shrink.items():
        expected = search_clipping(block.weights[key], Scheme(3, "sym", 16), fresh[key.removesuffix(".weight")].gram)
        assert float((shrink == expected).float().mean()) > 0.99, key  # but for ties
        assert bool((shrink < 1).any())


def test_a_wrong_fold_is_seen_however_large_the_residual_stream_is() -> None:
    """Beside a residual a million times the block's update only what the consumers compute tells the ways of folding apart."""
    from calib.fold import Observer

    residual, right, wrong = torch.full((4, 8), 1e6), torch.ones(4, 8), torch.full((4, 8), 1.05)
    state = {"consumer": right}
    observer = Observer(lambda: [(state["consumer"], 0.0), (residual * 1e-6, 1e-2 * float(residual.norm()))])
    before = observer()
    state["consumer"] = wrong
    assert float((observer() - before).norm() / before.norm()) > 1e-2
