"""Tuning: its gradients against autograd, its student against the reader, and what it may change in an artefact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from calib.held import BlockFit, Held
from calib.quantise import put_alone
from calib.student import FrozenLinear, ScaledLinear
from calib.teacher import Teacher
from calib.tune import Student, divergence, split, tune
from formats.checkpoint import Checkpoint
from formats.fates import Quantise, Rule
from formats.planning import plan_fates
from formats.reader import Artefact, load_model
from formats.skeleton import Skeleton
from quant.quantizers.rtn import round_to_nearest
from quant.scheme import Scheme
from tests.tiny_runs import run, write_text

IDS = torch.randint(0, 256, (16, 24), generator=torch.Generator().manual_seed(0))
SCHEMES = [Scheme.parse(name) for name in ("int4-sym-g16-f32", "int3-zp-g32-f16", "int4-sym-channel-f32", "int8-zp-tensor-f32")]


def held_model(folder: Path, scheme: str = "int3-sym-g32-f16") -> tuple[Held, Checkpoint]:
    source, held = Checkpoint.open(folder), Held()
    for plan in plan_fates(source, (Rule("*", Quantise(Scheme.parse(scheme))),)):
        put_alone(source, plan, held)
    return held, source


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("width", [64, 40])
def test_gradients_of_factors_and_inputs_are_those_of_autograd(scheme: Scheme, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    qtensor = round_to_nearest(torch.randn(12, width, generator=generator), scheme)
    layer = ScaledLinear(qtensor, torch.randn(12, generator=generator), torch.float32)
    inputs = torch.randn(3, 5, width, generator=generator, requires_grad=True)
    slope = torch.randn(3, 5, 12, generator=generator)
    found = torch.autograd.grad((layer(inputs) * slope).sum(), [inputs, layer.factor])
    zeros = 0 if qtensor.zeros is None else qtensor.zeros.float()
    factor = torch.zeros_like(qtensor.scales.float(), requires_grad=True)
    group = scheme.blocks if isinstance(scheme.blocks, int) else width
    column = torch.arange(width) // group
    scales = (qtensor.scales.float() * factor.exp())[:, column].expand(12, width)
    spread = zeros if isinstance(zeros, int) else zeros[:, column].expand(12, width)
    dense = functional.linear(inputs, (qtensor.codes.float() - spread) * scales, layer.bias)
    wanted = torch.autograd.grad((dense * slope).sum(), [inputs, factor])
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))


def test_divergence_and_its_gradient_are_those_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    teacher, student = (3 * torch.randn(600, 50, generator=generator) for _ in range(2))
    student.requires_grad_(True)
    wanted = functional.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), reduction="sum", log_target=True)
    (slope,) = torch.autograd.grad(wanted, student)
    total, gradient = divergence(teacher, student.detach())
    assert total == pytest.approx(float(wanted.detach()), rel=1e-5)
    assert torch.allclose(gradient, slope, atol=1e-6)


def test_the_error_of_other_scales_is_known_without_the_matrix() -> None:
    matrix = torch.randn(8, 40, generator=torch.Generator().manual_seed(0))
    for scheme in SCHEMES:
        qtensor = round_to_nearest(matrix, scheme)
        fit = BlockFit.of(qtensor, matrix)
        direct = float((qtensor.dequantise() - matrix).norm() / matrix.norm())
        assert fit.relative_error(qtensor.scales) == pytest.approx(direct, rel=1e-4)


@pytest.mark.parametrize("name", ["llama", "tied", "qwen2", "bfloat16"])
def test_teacher_and_untrained_student_are_the_float_and_the_quantised_model(
    tiny_model: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    folder = tiny_model(name)
    held, source = held_model(folder)
    teacher = Teacher(Skeleton(folder), source.tensor, IDS[:3], batch=2)
    student = Student(Skeleton(folder), held, source, device="cpu", dtype=torch.float32)
    run("rtn", folder, tmp_path / "out", write_text(tmp_path), "--bits", "3")
    written, plain = load_model(tmp_path / "out"), load_model(folder)
    with torch.no_grad():
        for index in range(3):
            ids = IDS[index : index + 1]
            assert torch.allclose(teacher.logits(index), plain(ids, use_cache=False).logits[0], atol=1e-5)
            assert torch.allclose(student.logits(ids), written(ids, use_cache=False).logits, atol=1e-5)
    assert not any(isinstance(module, torch.nn.Linear) for module in student.skeleton.model.modules())
    assert any(isinstance(module, FrozenLinear) for module in student.skeleton.model.modules())


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_tuning_keeps_codes_changes_scales_and_lowers_the_held_back_divergence(
    tiny_model: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    text = write_text(tmp_path)
    plain = run("rtn", tiny_model(name), tmp_path / "plain", text, "--bits", "2")
    tuned = run("rtn", tiny_model(name), tmp_path / "tuned", text, "--bits", "2", "--tune", "16")
    before, after = Artefact(tmp_path / "plain"), Artefact(tmp_path / "tuned")
    moved = []
    for module in before.modules():
        one, two = before.qtensor(module), after.qtensor(module)
        assert torch.equal(one.codes, two.codes)
        moved.append(not torch.equal(one.scales, two.scales))
    assert all(moved)
    note = next(note for note in tuned.notes if note.kind == "tuned")
    assert "state after step" in note.text
    assert "nothing was changed" not in note.text
    norms = [record for record in tuned.tensors if record.name.endswith("norm.weight")]
    assert {record.fate for record in norms} == {"folded"}
    assert all("trained" in record.reason for record in norms)
    assert not any(note.kind == "tuned" for note in plain.notes)
    again = run("rtn", tiny_model(name), tmp_path / "again", text, "--bits", "2", "--tune", "16")
    weights = [[file.sha256 for file in made.files if file.role == "weights"] for made in (tuned, again)]
    assert weights[0] == weights[1]
    for record in tuned.tensors:
        if record.fate == "quantised":
            reference = Checkpoint.open(tiny_model(name)).tensor(record.name).float()
            stored = after.qtensor(record.name.removesuffix(".weight")).dequantise()
            assert record.relative_error == pytest.approx(float((stored - reference).norm() / reference.norm()), rel=1e-3)


def test_a_state_that_is_worse_is_not_kept(tiny_model: Callable[[str], Path]) -> None:
    folder = tiny_model("llama")
    held, source = held_model(folder, "int8-sym-g32-f32")
    scales = {name: matrix.qtensor.scales.clone() for name, matrix in held.matrices.items()}
    found = tune(
        held,
        source,
        IDS[:12],
        IDS[12:],
        steps=4,
        seed=0,
        device="cpu",
        batch=4,
        learning_rate=3.0,
        report=lambda done, total: None,
    )
    assert (found.kept_step, found.after) == (0, found.before)
    assert not held.values
    assert all(torch.equal(matrix.qtensor.scales, scales[name]) for name, matrix in held.matrices.items())
    assert "nothing was changed" in found.note.text


def test_training_and_held_back_windows_are_disjoint_and_cover_all() -> None:
    for count in (2, 3, 8, 9, 32):
        training, back = split(torch.arange(count)[:, None])
        assert min(len(training), len(back)) >= 1
        assert sorted([*training.flatten().tolist(), *back.flatten().tolist()]) == list(range(count))
