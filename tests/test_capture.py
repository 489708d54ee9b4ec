"""Block by block equals the whole model, and evidence equals explicit sums over the tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from calib.capture import BlockInputs, BlockRunner, watching_inputs
from calib.evidence import Evidence
from calib.graph import linear_names
from formats.checkpoint import Checkpoint
from formats.reader import load_model
from formats.skeleton import Skeleton
from quant.errors import NonFiniteTensor
from tests.numerics.blocks import save_variant

IDS = torch.randint(0, 256, (5, 24), generator=torch.Generator().manual_seed(3))
MODELS = ["llama", "qwen2", "bfloat16", "tied"]


def runner_of(folder: Path) -> BlockRunner:
    return BlockRunner(Skeleton(folder), Checkpoint.open(folder).tensor)


def through_all_blocks(runner: BlockRunner, batch: int, ids: Tensor = IDS) -> list[BlockInputs]:
    """The hidden states before every block and after the last."""
    states = [runner.start(ids, batch)]
    for index in range(len(runner.skeleton.blocks)):
        runner.load(runner.block_parameters(index))
        states.append(runner.advance(index, states[-1]))
        runner.skeleton.clear(runner.block_parameters(index))
    return states


def check_against_whole_model(folder: Path, batch: int, ids: Tensor = IDS) -> None:
    model: Any = load_model(folder)
    with torch.no_grad():
        expected = model(ids, output_hidden_states=True, use_cache=False).hidden_states
        found = [torch.cat(states.hidden) for states in through_all_blocks(runner_of(folder), batch, ids)]
        found[-1] = model.get_submodule("model.norm")(found[-1])
    assert len(found) == len(expected)
    for before, after in zip(found, expected, strict=True):
        torch.testing.assert_close(before, after, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch", [1, 2, 5, 64])
@pytest.mark.parametrize("name", MODELS)
def test_hidden_states_are_those_of_the_whole_model(name: str, batch: int, tiny_model: Callable[[str], Path]) -> None:
    """Five windows: with batches of two the last one is short."""
    check_against_whole_model(tiny_model(name), batch)


def test_blocks_that_are_called_differently_get_their_own_arguments(tmp_path: Path) -> None:
    """Gemma 2 alternates a sliding window of 32 with full attention: masks differ from block to block."""
    ids = torch.randint(0, 256, (3, 60), generator=torch.Generator().manual_seed(4))
    check_against_whole_model(save_variant("gemma2", tmp_path / "model"), 2, ids)


def explicit_inputs(folder: Path, block: int) -> dict[str, Tensor]:
    """The inputs ``[tokens, in]`` of every matrix of one block, from one pass through the whole model."""
    model: Any = load_model(folder)
    seen: dict[str, Tensor] = {}
    part: nn.Module = model.get_submodule(f"model.layers.{block}")
    with torch.no_grad(), watching_inputs(part, linear_names(part), seen.__setitem__):
        model(IDS, use_cache=False)
    return {name: value.reshape(-1, value.shape[-1]) for name, value in seen.items()}


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_evidence_is_the_explicit_sum_over_all_tokens(name: str, batch: int, tiny_model: Callable[[str], Path]) -> None:
    """R62, R63: every token of every window counts once, whatever the batches."""
    runner = runner_of(tiny_model(name))
    inputs = runner.start(IDS, batch)
    for block in range(2):
        runner.load(runner.block_parameters(block))
        found = runner.gather(block, linear_names(runner.block(block)), inputs)
        expected = explicit_inputs(tiny_model(name), block)
        assert set(found) == set(expected)
        for module, rows in expected.items():
            evidence, wide = found[module], rows.double()
            assert evidence.tokens == IDS.numel()
            torch.testing.assert_close(evidence.abs_max, rows.abs().amax(0), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(evidence.abs_sum, wide.abs().sum(0), rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(evidence.mean_abs, wide.abs().mean(0).float(), rtol=1e-4, atol=1e-5)
            error = (evidence.gram.double() - wide.T @ wide).norm() / (wide.T @ wide).norm()
            assert float(error) < 1e-5
        inputs = runner.advance(block, inputs)


def rows(count: int, seed: int) -> Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(seed)) * torch.arange(1, 9)


def assert_same(found: Evidence, expected: Evidence) -> None:
    assert found.tokens == expected.tokens
    for name in ("abs_max", "abs_sum", "gram", "mean_abs"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-5, atol=1e-5)


def test_evidence_adds() -> None:
    first, second, third = rows(7, 0), rows(1, 1), rows(20, 2)
    whole = Evidence.of(torch.cat([first, second, third]))
    assert whole.tokens == 28
    assert_same(Evidence.of(first) + Evidence.of(second) + Evidence.of(third), whole)
    assert_same(Evidence.of(third) + (Evidence.of(second) + Evidence.of(first)), whole)


def test_evidence_counts_rows_of_any_leading_shape() -> None:
    values = rows(24, 0)
    assert_same(Evidence.of(values.reshape(2, 3, 4, 8)), Evidence.of(values))
    assert Evidence.of(values.reshape(2, 12, 8).bfloat16()).gram.dtype == torch.float32


def test_divided_evidence_is_the_evidence_of_divided_rows() -> None:
    values, factors = rows(30, 0), torch.linspace(0.1, 4, 8)
    assert_same(Evidence.of(values).divided(factors), Evidence.of(values / factors))


def test_nothing_that_is_captured_carries_a_graph(tiny_model: Callable[[str], Path]) -> None:
    """R72: gradients are on around the calls, as they are by default."""
    assert torch.is_grad_enabled()
    runner = runner_of(tiny_model("qwen2"))
    inputs = runner.start(IDS, 2)
    runner.load(runner.block_parameters(0))
    after = runner.advance(0, inputs)
    evidence = runner.gather(0, ["self_attn.q_proj", "mlp.down_proj"], inputs)
    captured = [*inputs.hidden, *after.hidden, *(part for e in evidence.values() for part in (e.abs_max, e.abs_sum, e.gram))]
    for args, kwargs in (call for calls in inputs.calls.values() for call in calls):
        captured += [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    assert not any(value.requires_grad or value.grad_fn is not None for value in captured)


def test_only_the_loaded_block_is_in_memory(tiny_model: Callable[[str], Path]) -> None:
    runner = runner_of(tiny_model("llama"))
    real = runner.skeleton.missing
    everything = set(runner.skeleton.parameter_names())
    runner.start(IDS, 2)
    assert set(real()) == everything, "the embedding is dropped after use"
    runner.load(runner.block_parameters(1))
    assert everything - set(real()) == set(runner.block_parameters(1))
    assert {name.split(".")[2] for name in runner.block_parameters(1)} == {"1"}
    runner.skeleton.clear(runner.block_parameters(1))
    assert set(real()) == everything


def test_no_hook_or_stand_in_stays_behind(tiny_model: Callable[[str], Path]) -> None:
    runner = runner_of(tiny_model("llama"))
    blocks = list(runner.skeleton.blocks)
    inputs = runner.start(IDS, 2)
    assert list(runner.skeleton.blocks) == blocks
    runner.load(runner.block_parameters(0))
    runner.gather(0, linear_names(blocks[0]), inputs)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in blocks[0].modules())


@pytest.mark.parametrize("block", [0, 1])
def test_hidden_states_that_overflow_are_caught_at_the_block_where_they_appear(
    block: int, tiny_model: Callable[[str], Path]
) -> None:
    """R17-kind: the weights are finite, what they compute is not; nothing is calibrated on it."""
    folder = tiny_model("llama")
    checkpoint = Checkpoint.open(folder)

    def fetch(name: str) -> Tensor:
        value = checkpoint.tensor(name)
        return value * 1e38 if name.startswith(f"model.layers.{block}.mlp.") else value

    runner = BlockRunner(Skeleton(folder), fetch)
    with pytest.raises(NonFiniteTensor, match=rf"after model\.layers\.{block} are not finite"):
        through_all_blocks(runner, 2)


@pytest.mark.parametrize("block", [0, 1])
def test_inputs_that_overflow_inside_a_block_are_caught_at_the_matrix(block: int, tiny_model: Callable[[str], Path]) -> None:
    """Also in the last block, after which no hidden states are computed."""
    folder = tiny_model("llama")
    checkpoint = Checkpoint.open(folder)

    def fetch(name: str) -> Tensor:
        value = checkpoint.tensor(name)
        return value * 1e38 if name.startswith(f"model.layers.{block}.mlp.") and "down" not in name else value

    runner = BlockRunner(Skeleton(folder), fetch)
    inputs = runner.start(IDS, 2)
    for index in range(block):
        runner.load(runner.block_parameters(index))
        inputs = runner.advance(index, inputs)
    runner.load(runner.block_parameters(block))
    with pytest.raises(NonFiniteTensor, match=rf"inputs of model\.layers\.{block}\.mlp\.down_proj are not finite"):
        runner.gather(block, ["self_attn.q_proj", "mlp.gate_proj", "mlp.down_proj"], inputs)
