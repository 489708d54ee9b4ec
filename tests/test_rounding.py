"""Learned rounding: where it starts, what it may change, that blocks get better, and whole runs with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from calib.capture import BlockRunner
from calib.rounding import LearnedRounding, OffsetLinear, Target
from formats.checkpoint import Checkpoint
from formats.reader import Artefact
from formats.skeleton import Skeleton
from quant.qtensor import from_blocks
from quant.quantizer import Outcome
from quant.quantizers.rtn import round_to_nearest
from quant.scheme import Scheme
from tests.tiny_runs import run, write_text

NAMES = (
    "int3-sym-g32-f16",
    "int2-zp-g32-f16",
    "int4-sym-channel-bf16",
    "int8-zp-tensor-f32",
    "int3-full-g32-f16",
    "int2-full-g32-f32",
)
SCHEMES = [Scheme.parse(name) for name in NAMES]
IDS = torch.randint(0, 256, (8, 24), generator=torch.Generator().manual_seed(0))


def matrix(shape: tuple[int, int]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("shape", [(12, 64), (5, 40)])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_it_starts_at_the_codes_it_was_given_however_far_they_are(scheme: Scheme, shape: tuple[int, int]) -> None:
    qtensor = round_to_nearest(matrix(shape), scheme)
    for weights in (matrix(shape), matrix(shape) * 3 - 1):
        layer = OffsetLinear(qtensor, weights, None, torch.float32)
        start = layer.learned()
        assert torch.equal(start.codes, qtensor.codes)
        assert torch.equal(start.scales, qtensor.scales)
        inputs = torch.randn(7, shape[1])
        assert torch.allclose(layer(inputs), inputs @ qtensor.dequantise().T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_no_offset_moves_a_code_by_more_than_one_or_off_the_grid(scheme: Scheme) -> None:
    qtensor = round_to_nearest(matrix((12, 64)), scheme)
    layer = OffsetLinear(qtensor, matrix((12, 64)), None, torch.float32)
    for offset in (-0.5, 0.5):
        with torch.no_grad():
            layer.offset.fill_(offset)
        moved = layer.learned().codes.int()
        assert int((moved - qtensor.codes.int()).abs().max()) == 1
        assert scheme.code_min <= int(moved.min()) <= int(moved.max()) <= scheme.code_max


@pytest.mark.parametrize("width", [64, 40])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_slopes_are_those_of_autograd_through_rounding_as_the_identity(scheme: Scheme, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    layer = OffsetLinear(round_to_nearest(matrix((12, width)), scheme), matrix((12, width)), None, torch.float32)
    layer.offset = torch.rand(layer.offset.shape, generator=generator) - 0.5
    layer.factor = 0.1 * torch.randn(layer.factor.shape, generator=generator)
    slope = torch.randn(12, width, generator=generator)
    offset, factor = layer.offset.clone().requires_grad_(True), layer.factor.clone().requires_grad_(True)
    moved = layer.values * (-factor).exp() + offset
    codes = (moved.round() - moved).detach() + moved + layer.zeros
    levels = codes.clamp(scheme.code_min, scheme.code_max) - layer.zeros
    weights = from_blocks(levels * layer.scales * factor.exp(), (12, width))
    wanted = torch.autograd.grad((weights * slope).sum(), [offset, factor])
    found = layer.slopes(slope)
    size = layer.scales * layer.factor.exp()
    inside = (codes > scheme.code_min) & (codes < scheme.code_max)  # at the very end autograd halves or drops the slope
    assert torch.allclose((found[0] * size)[inside], wanted[0][inside], rtol=1e-4, atol=1e-6)
    if bool(inside.all()):
        assert torch.allclose(found[1] * size, wanted[1], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_the_output_of_a_block_comes_closer_to_float(tiny_model: Callable[[str], Path], name: str) -> None:
    runner = BlockRunner(Skeleton(tiny_model(name)), Checkpoint.open(tiny_model(name)).tensor)
    inputs = runner.start(IDS, 4)
    names = runner.block_parameters(0)
    runner.load(names)
    prefix = f"{runner.skeleton.blocks_name}.0."
    weights = {n.removeprefix(prefix): runner.skeleton.get(n).data.clone() for n in names}
    target = Target.of(runner.advance(0, inputs).hidden)
    scheme = Scheme.parse("int2-sym-g32-f16")
    outcomes = {n: Outcome(round_to_nearest(w, scheme)) for n, w in weights.items() if w.ndim == 2}
    for n, outcome in outcomes.items():
        runner.skeleton.set(prefix + n, outcome.qtensor.dequantise())
    before = float(target.error(1, runner.forward(0, inputs.hidden[1], inputs)))
    found, note = LearnedRounding(runner, 40).refine(0, inputs, target, outcomes, weights)
    after = float(target.error(1, runner.forward(0, inputs.hidden[1], inputs)))
    assert after < 0.9 * before
    assert note.kind == "rounding-learned"
    assert any(not torch.equal(found[n].qtensor.codes, outcomes[n].qtensor.codes) for n in found)
    for n in found:  # what runs is what will be stored
        assert torch.equal(runner.skeleton.get(prefix + n).data, found[n].qtensor.dequantise())
        assert torch.equal(runner.skeleton.get(prefix + n).data, runner.block(0).get_parameter(n).data)


def test_codes_that_cannot_get_better_are_kept_and_it_is_said(tiny_model: Callable[[str], Path]) -> None:
    runner = BlockRunner(Skeleton(tiny_model("llama")), Checkpoint.open(tiny_model("llama")).tensor)
    inputs = runner.start(IDS, 4)
    names = runner.block_parameters(0)
    runner.load(names)
    prefix = f"{runner.skeleton.blocks_name}.0."
    scheme = Scheme.parse("int4-sym-g32-f32")
    weights = {n.removeprefix(prefix): runner.skeleton.get(n).data.clone() for n in names}
    outcomes = {n: Outcome(round_to_nearest(w, scheme)) for n, w in weights.items() if w.ndim == 2}
    for n, outcome in outcomes.items():
        weights[n] = outcome.qtensor.dequantise()
        runner.skeleton.set(prefix + n, weights[n])
    target = Target.of(runner.advance(0, inputs).hidden)  # the rounded block itself is what is wanted
    found, note = LearnedRounding(runner, 5).refine(0, inputs, target, outcomes, weights)
    assert note.kind == "rounding-not-learned"
    assert all(found[n] is outcomes[n] for n in found)
    assert all(torch.equal(runner.skeleton.get(prefix + n).data, weights[n]) for n in found)


@pytest.mark.parametrize("method", ["learned", "awq+gptq+learned"])
def test_a_run_is_deterministic_and_differs_from_the_run_without(
    tiny_model: Callable[[str], Path], tmp_path: Path, method: str
) -> None:
    text = write_text(tmp_path)
    plain = {"learned": "rtn"}.get(method, method.removesuffix("+learned"))
    options = ("--bits", "3", "--learn-iterations", "20", "--no-clip")
    made = [run(method, tiny_model("llama"), tmp_path / name, text, *options) for name in ("one", "two")]
    weights = [[file.sha256 for file in manifest.files if file.role == "weights"] for manifest in made]
    assert weights[0] == weights[1]
    assert sum(note.count for note in made[0].notes if note.kind.startswith("rounding-")) == 2
    run(plain, tiny_model("llama"), tmp_path / "plain", text, "--bits", "3", "--no-clip")
    one, two = Artefact(tmp_path / "one"), Artefact(tmp_path / "plain")
    modules = list(one.modules())
    assert any(not torch.equal(one.qtensor(module).codes, two.qtensor(module).codes) for module in modules)
