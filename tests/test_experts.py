"""Mixtures of experts under calibrated methods: every expert on its own tokens, those without any rounded plainly and named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from calib.capture import BlockRunner
from calib.graph import stages, trace_groups
from formats.checkpoint import Checkpoint
from formats.experts import expert_names, unfuse_experts
from formats.integrity import verify_folder
from formats.reader import Artefact, load_model
from formats.skeleton import Skeleton
from quant.errors import SourceError
from quant.quantizers.rtn import round_to_nearest
from tests.conftest import MOE
from tests.test_tables import build
from tests.tiny_runs import check_ledger, run, write_text

IDS = torch.randint(0, 256, (5, 24), generator=torch.Generator().manual_seed(3))
FAMILIES = ["moe", "mixtral"]
COUNTS = {"moe": 8, "mixtral": 4}
EXPERTS = {"moe": "mlp.experts", "mixtral": "block_sparse_moe.experts"}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


def runner_of(folder: Path) -> BlockRunner:
    skeleton, checkpoint = Skeleton(folder), Checkpoint.open(folder)
    unfuse_experts(skeleton, checkpoint.tensors)
    return BlockRunner(skeleton, checkpoint.tensor)


@pytest.mark.parametrize("name", FAMILIES)
def test_unfused_experts_have_the_stored_names_and_compute_what_the_library_computes(
    name: str, tiny_model: Callable[[str], Path]
) -> None:
    folder = tiny_model(name)
    runner = runner_of(folder)
    assert set(runner.skeleton.parameter_names()) == set(Checkpoint.open(folder).tensors)
    model: Any = load_model(folder)
    with torch.no_grad():
        expected = model(IDS, output_hidden_states=True, use_cache=False).hidden_states
    inputs = runner.start(IDS, 2)
    for index in range(2):
        runner.load(runner.block_parameters(index))
        inputs = runner.advance(index, inputs)
        found = torch.cat(inputs.hidden)
        if index == 0:
            torch.testing.assert_close(found, expected[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model.get_submodule("model.norm")(found), expected[2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_evidence_of_experts_adds_up_to_all_routed_tokens(name: str, tiny_model: Callable[[str], Path]) -> None:
    runner = runner_of(tiny_model(name))
    inputs = runner.start(IDS, 2)
    runner.load(runner.block_parameters(0))
    groups = trace_groups(runner.block(0), lambda: runner.forward(0, inputs.sample(128), inputs))
    routed = [group for group in groups if group.routed]
    assert [len(stage) for stage in stages(groups)][-2:] == [COUNTS[name], COUNTS[name]]
    names = [group.consumers[0] for group in routed]
    found = runner.gather(0, names, inputs, frozenset(names))
    first = [found[each].tokens for each in names[: COUNTS[name]]]
    assert sum(first) == 2 * IDS.numel(), "two experts for every token"
    assert first == [found[each].tokens for each in names[COUNTS[name] :]]
    assert len(expert_names(runner.block(0))) == COUNTS[name]


@pytest.mark.parametrize("method", ["gptq", "awq", "awq+gptq"])
def test_r27_r28_experts_without_tokens_are_named_rounded_plainly_and_stored_alike(
    method: str, text: Path, tmp_path: Path
) -> None:
    """R27: no NaN, one format for all experts of a layer; R28: the statistics of the others are kept and used."""

    def drop(model: Any) -> None:
        for layer in model.model.layers:
            layer.mlp.gate.weight[7] = 0
            layer.mlp.gate.weight[:7] *= 0.1
            layer.post_attention_layernorm.weight.fill_(1.0)
            layer.post_attention_layernorm.weight[0] = 100.0  # one channel decides the routing: its sign differs by token
            layer.mlp.gate.weight[:, 0] = torch.tensor([5.0, 4.0, 3.0, 2.0, -2.0, -3.0, -4.0, 0.0])

    source = build(tmp_path / "model", "Qwen3Moe", MOE, drop)
    manifest = run(method, source, tmp_path / "out", text, "--bits", "3", "--calibration-windows", "16")
    check_ledger(tmp_path / "out", manifest)
    verify_folder(tmp_path / "out")
    notes = {note.kind: note for note in manifest.notes}
    assert notes["no-evidence"].count % 3 == 0, "a whole expert at a time, each matrix once"
    assert 6 <= notes["no-evidence"].count <= 2 * 3 * 8
    for layer in range(2):
        for leaf in ("gate_proj", "up_proj", "down_proj"):
            assert f"model.layers.{layer}.mlp.experts.7.{leaf}" in notes["no-evidence"].text
    artefact, checkpoint = Artefact(tmp_path / "out"), Checkpoint.open(source)
    schemes = {record.scheme for record in manifest.tensors if ".experts." in record.name}
    assert schemes == {"int3-sym-g32-f16"}
    same = {}
    for module in artefact.modules():
        if ".experts." in module:
            stored = artefact.qtensor(module)
            assert bool(torch.isfinite(stored.dequantise()).all())
            plain = round_to_nearest(checkpoint.tensor(f"{module}.weight"), stored.scheme)
            same[module] = torch.equal(stored.codes, plain.codes)
    assert all(equal for module, equal in same.items() if ".experts.7." in module)
    assert not all(equal for module, equal in same.items() if ".experts.7." not in module)
    with torch.no_grad():
        assert bool(torch.isfinite(load_model(tmp_path / "out")(IDS).logits).all())


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize("name", FAMILIES)
def test_calibrated_experts_are_read_back_and_better_than_plain_rounding(
    name: str, method: str, tiny_model: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    """In the mean over the tokens that were calibrated on, the logits of 2 bits come closer to the float ones."""
    source, errors = tiny_model(name), {}
    ids = calibration_ids(text)
    with torch.no_grad():
        expected = load_model(source)(ids).logits
        for each in (method, "rtn"):
            manifest = run(each, source, tmp_path / each, text, "--bits", "2", "--calibration-windows", "48")
            check_ledger(tmp_path / each, manifest)
            verify_folder(tmp_path / each)
            quantised = [record for record in manifest.tensors if record.fate == "quantised" and ".experts." in record.name]
            assert len(quantised) == 2 * 3 * COUNTS[name]
            errors[each] = float((load_model(tmp_path / each)(ids).logits - expected).norm())
    assert errors[method] < errors["rtn"]


def calibration_ids(text: Path) -> Tensor:
    """The last windows of the text, as the run takes them: the tiny tokenizer makes one token of each byte."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    number = {letter: index for index, letter in enumerate(alphabet)}
    letters = text.read_text()[-48 * 33 :]
    ids = [number["Ġ" if letter == " " else "Ċ" if letter == "\n" else letter] for letter in letters]
    return torch.tensor(ids).reshape(48, 33)


@pytest.mark.parametrize(
    ("method", "options", "word"),
    [
        ("learned", (), "learned rounding does not work with the 48 matrices of experts"),
        ("rtn", ("--tune", "2"), "--tune does not work"),
        ("gptq", ("--asymmetric", "1"), "--asymmetric does not work"),
    ],
)
def test_what_needs_more_than_single_experts_is_refused_before_any_work(
    method: str, options: tuple[str, ...], word: str, tiny_model: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    with pytest.raises(SourceError, match=word):
        run(method, tiny_model("moe"), tmp_path / "out", text, *options)


def test_experts_that_compute_something_else_are_not_taken_apart(tiny_model: Callable[[str], Path]) -> None:
    skeleton = Skeleton(tiny_model("moe"))
    skeleton.model.model.layers[1].mlp.experts.has_bias = True
    with pytest.raises(SourceError, match=r"model\.layers\.1\.mlp\.experts \(Qwen3MoeExperts\) are no plain gated experts"):
        unfuse_experts(skeleton, Checkpoint.open(tiny_model("moe")).tensors)
