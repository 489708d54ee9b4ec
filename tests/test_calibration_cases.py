"""Known ways in which calibration goes wrong elsewhere, each with the smallest input that shows it."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from calib.capture import BlockRunner, watching_inputs
from calib.distinct import Distinct, calibration_notes
from calib.evidence import Evidence
from calib.graph import linear_names
from formats.checkpoint import Checkpoint
from formats.codec import get_codec
from formats.fates import Quantise, Rule
from formats.manifest import Manifest
from formats.planning import plan_fates
from formats.reader import Artefact, load_model
from formats.skeleton import Skeleton
from quant.errors import SourceError
from quant.qtensor import QTensor
from quant.scheme import Scheme
from tests.conftest import SIZES
from tests.test_tables import build
from tests.tiny_runs import check_ledger, run, write_text

IDS = torch.randint(0, 256, (5, 24), generator=torch.Generator().manual_seed(3))
CALIBRATED = ["awq", "gptq", "awq+gptq", "smoothquant", "smoothquant+gptq"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


def runner_of(folder: Path, block: int = 0) -> BlockRunner:
    runner = BlockRunner(Skeleton(folder), Checkpoint.open(folder).tensor)
    runner.load(runner.block_parameters(block))
    return runner


def kinds(manifest: Manifest) -> dict[str, str]:
    return {note.kind: note.text for note in manifest.notes}


def kill_channels(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.up_proj.weight[5] = 0  # one input channel of down_proj is always 0
        layer.input_layernorm.weight[7] = 0
    model.model.layers[1].mlp.gate_proj.weight[:] = 0  # silu(0) = 0: nothing at all reaches down_proj there


@pytest.mark.parametrize("method", CALIBRATED)
def test_r01_dead_channels_are_counted_by_layer_and_the_artefact_is_finite(method: str, text: Path, tmp_path: Path) -> None:
    """R01: one dead channel, a norm weight of 0, and a matrix that no value reaches; 4 windows of 32 tokens."""
    source = build(tmp_path / "model", "Llama", SIZES, kill_channels)
    options = ("--calibration-windows", "4", "--window", "32")
    manifest = run(method, source, tmp_path / "out", text, *options)
    check_ledger(tmp_path / "out", manifest)
    with torch.no_grad():
        assert bool(torch.isfinite(load_model(tmp_path / "out")(IDS).logits).all())
    if "gptq" in method:
        dead = kinds(manifest)["dead-channels"]
        assert "model.layers.0.mlp.down_proj.weight: 1 of 128" in dead
        assert "model.layers.1.mlp.down_proj.weight: 128 of 128" in dead
        assert "model.layers.0.self_attn.q_proj.weight: 1 of 64" in dead


@pytest.mark.parametrize("method", CALIBRATED)
def test_r02_repeated_rows_are_counted_before_the_run_and_called_rank_deficient(
    method: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """R02: the same row 64 times has at most 32 directions for 64 and 128 channels; the run ends with finite weights."""
    source = tiny_model("llama")
    line = "abcdefgh ijklmnop qrstuvw xyzabc"
    path = tmp_path / "text.txt"
    path.write_text("".join(chr(97 + i % 26) for i in range(200)) + line * 64)
    options = ("--window", "32", "--calibration-windows", "32", "--calibration-start", "232", "--evaluation-windows", "2")
    manifest = run(method, source, tmp_path / "out", path, *options, "--bos", "none")
    found = kinds(manifest)
    assert found["calibration"] == "only 1 of 32 calibration windows are distinct"
    assert (
        "32 distinct rows (1,024 tokens) are fewer than the input channels of 14 matrices (up to 128)" in found["rank-deficient"]
    )
    with torch.no_grad():
        assert bool(torch.isfinite(load_model(tmp_path / "out")(IDS).logits).all())


def test_r02_distinct_rows_are_prefixes_not_tokens(tiny_model: Callable[[str], Path]) -> None:
    """Two windows that begin alike share the rows of the common beginning, as hidden states of a causal model are equal there."""
    ids = np.array([[1, 2, 3, 4], [1, 2, 9, 4], [1, 2, 3, 4]])
    assert Distinct.of(ids) == Distinct(3, 2, 12, 6)
    runner = runner_of(tiny_model("llama"))
    inputs = runner.start(torch.from_numpy(ids), 3)
    rows = inputs.hidden[0].reshape(-1, 64)
    out = runner.forward(0, inputs.hidden[0], inputs).reshape(-1, 64)
    assert len(torch.unique((out - rows).round(decimals=5), dim=0)) == 6
    plans = plan_fates(Checkpoint.open(tiny_model("llama")), [Rule("*", Quantise(Scheme(4, "sym", 32)))])
    assert [kind for kind, _ in calibration_notes(ids, plans)] == ["calibration", "rank-deficient"]
    many = np.random.default_rng(0).integers(0, 256, (8, 32))
    assert calibration_notes(many, plans) == []


def test_r08_zero_points_of_every_value_are_stored_exactly() -> None:
    """R08: also the zero point 0 of a group whose weights are all 0 or above; ours and the reference reader's unpacking agree."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    for bits in (2, 4, 8):
        scheme, top = Scheme(bits, "zp", 8, "f32"), 2**bits
        out, groups = 20, 5
        generator = torch.Generator().manual_seed(bits)
        codes = torch.randint(0, top, (out, 8 * groups), generator=generator).to(torch.uint8)
        zeros = (torch.arange(out * groups).reshape(out, groups) % top).to(torch.uint8)
        scales = torch.rand(out, groups, generator=generator) + 0.1
        qtensor = QTensor(scheme, codes, scales, zeros)
        codec = get_codec("pack-quantized")
        parts = codec.pack(qtensor)
        again = codec.unpack(parts, scheme, (out, 8 * groups))
        assert again.zeros is not None
        assert torch.equal(again.zeros, zeros)
        assert torch.equal(again.dequantise(), qtensor.dequantise())
        theirs = unpack_from_int32(parts["weight_zero_point"], bits, torch.Size((out, groups)), packed_dim=0)
        assert torch.equal(theirs.int() + top // 2, zeros.int())
    low = torch.rand(4, 32, generator=torch.Generator().manual_seed(0))
    low[:, ::8] = 0
    from quant.quantizers.rtn import round_to_nearest

    rounded = round_to_nearest(low, Scheme(4, "zp", 8))
    assert rounded.zeros is not None
    assert not bool(rounded.zeros.any())


@pytest.mark.parametrize("method", CALIBRATED)
@pytest.mark.parametrize("layer", [0, 1])
def test_r17_overflow_names_the_first_layer_and_nothing_is_written(layer: int, method: str, text: Path, tmp_path: Path) -> None:
    """R17: finite weights whose products are not; found at the block, not hours later as a strange number."""
    from quant.errors import NonFiniteTensor

    def blow_up(model: Any) -> None:
        for name in ("gate_proj", "up_proj"):
            getattr(model.model.layers[layer].mlp, name).weight.mul_(1e30)

    source = build(tmp_path / "model", "Llama", SIZES, blow_up)
    with pytest.raises(NonFiniteTensor, match=rf"model\.layers\.{layer}"):
        run(method, source, tmp_path / "out", text)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("model", ["llama", "qwen2"])
def test_r62_r63_order_and_batches_of_the_windows_do_not_matter(model: str, tiny_model: Callable[[str], Path]) -> None:
    """R62: all rows count, the last short batch too; R63: no batch size changes the statistics (there is no padding)."""
    found: list[dict[str, Evidence]] = []
    for ids, batch in ((IDS, 1), (IDS, 2), (IDS, 5), (IDS.flip(0), 2)):
        runner = runner_of(tiny_model(model))
        inputs = runner.start(ids, batch)
        found.append(runner.gather(0, linear_names(runner.block(0)), inputs))
    for other in found[1:]:
        for name, evidence in other.items():
            assert evidence.tokens == found[0][name].tokens == IDS.numel()
            for part in ("abs_max", "abs_sum", "gram"):
                torch.testing.assert_close(getattr(evidence, part), getattr(found[0][name], part), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", CALIBRATED)
def test_r63_scales_are_those_of_any_batch_size(
    method: str, tiny_model: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    for batch in ("1", "3", "8"):
        run(method, tiny_model("llama"), tmp_path / batch, text, "--batch", batch, "--no-clip")
    first, *others = (Artefact(tmp_path / batch) for batch in ("1", "3", "8"))
    # Of the first block: a code that tips over there by the last bit of a sum is another model for all later blocks.
    for module in [module for module in first.modules() if ".0." in module]:
        for other in others:
            scales = other.qtensor(module).scales.float()
            torch.testing.assert_close(scales, first.qtensor(module).scales.float(), rtol=1e-3, atol=1e-6)


def live_bytes() -> int:
    gc.collect()
    seen = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in gc.get_objects() if _is_real(value)}
    return sum(seen.values())


def _is_real(value: object) -> bool:
    return type(value) in (Tensor, nn.Parameter) and not value.is_meta  # type: ignore[attr-defined]


def test_r72_more_windows_cost_their_hidden_states_and_nothing_else(tiny_model: Callable[[str], Path]) -> None:
    """R72: 8 and 64 windows; what is alive afterwards differs by the states (float32, one stream) and by no graph."""
    ids = torch.randint(0, 256, (64, 32), generator=torch.Generator().manual_seed(0))
    held = {}
    for count in (8, 64):
        runner = runner_of(tiny_model("llama"))
        before = live_bytes()
        inputs = runner.start(ids[:count], 4)
        after = runner.advance(0, inputs)
        evidence = runner.gather(0, linear_names(runner.block(0)), inputs)
        held[count] = live_bytes() - before
        assert len(evidence) == 7
        assert not any(states.requires_grad for states in (*inputs.hidden, *after.hidden))
        del runner, inputs, after, evidence
    assert held[64] - held[8] == 2 * (64 - 8) * 32 * 64 * 4


def test_r73_the_dry_run_says_what_is_held_in_memory_and_nothing_is_spilled(
    tiny_model: Callable[[str], Path],
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R73: hidden states stay in memory, so no spill folder can pile up; their size is told before."""
    from typer.main import get_command

    from pipelines.run import app

    spill = tmp_path / "tmp"
    spill.mkdir()
    monkeypatch.setenv("TMPDIR", str(spill))
    words = ["--model", str(tiny_model("llama")), "--output", str(tmp_path / "out"), "--corpus", str(text), "--cards", "none"]
    words += ["--group-size", "32", "--window", "33", "--calibration-windows", "8", "--dry-run"]
    command: Any = get_command(app)
    for extra, streams in (([], 1), (["--asymmetric", "0.5"], 2)):
        command.main(args=["gptq", *words, "--json", *extra], standalone_mode=False)
        assert json.loads(capsys.readouterr().out)["held_states_bytes"] == streams * 2 * 8 * 33 * 64 * 4
    command.main(args=["gptq", *words], standalone_mode=False)
    assert "held in memory, nothing is spilled" in capsys.readouterr().out
    run("gptq", tiny_model("llama"), tmp_path / "out", text)
    assert not list(spill.iterdir())


def test_r34_a_matrix_that_no_hook_ever_saw_is_an_error(tiny_model: Callable[[str], Path]) -> None:
    runner = runner_of(tiny_model("llama"))
    inputs = runner.start(IDS, 2)
    runner.block(0).idle = nn.Linear(64, 64)
    with pytest.raises(SourceError, match=r"model\.layers\.0\.idle and 0 more matrices never ran"):
        runner.gather(0, ["self_attn.q_proj", "idle"], inputs)
    weights = {name: runner.skeleton.get(f"model.layers.0.{name}").data for name in ("mlp.up_proj.weight",)}
    with pytest.raises(SourceError, match=r"model\.layers\.0\.idle never ran"):
        runner.gather_pair(0, "idle", (inputs, inputs), (weights, weights))


@pytest.mark.parametrize("batch", [1, 2])
def test_pairs_are_the_inputs_of_both_models_on_the_same_tokens(batch: int, tiny_model: Callable[[str], Path]) -> None:
    """The float stream runs through float weights, the other through changed ones: both captured here in two whole models."""
    folder = tiny_model("qwen2")
    plain: Any = load_model(folder)
    changed: Any = load_model(folder)
    with torch.no_grad():
        for layer in changed.model.layers:
            layer.self_attn.o_proj.weight.mul_(1.3)
    seen: list[dict[str, Tensor]] = []
    for model in (plain, changed):
        inputs: dict[str, Tensor] = {}
        block = model.model.layers[1]
        with torch.no_grad(), watching_inputs(block, ["mlp.gate_proj", "mlp.down_proj"], inputs.__setitem__):
            model(IDS, use_cache=False)
        seen.append({name: value.reshape(-1, value.shape[-1]).double() for name, value in inputs.items()})
    floats, rows = seen
    runners = [runner_of(folder), runner_of(folder)]
    runners[1].skeleton.set("model.layers.0.self_attn.o_proj.weight", changed.model.layers[0].self_attn.o_proj.weight.data)
    streams = [runner.advance(0, runner.start(IDS, batch)) for runner in runners]
    runner = runners[0]
    runner.load(runner.block_parameters(1))
    weights = {name: value.data for name, value in plain.model.layers[1].named_parameters()}
    other = weights | {"self_attn.o_proj.weight": changed.model.layers[1].self_attn.o_proj.weight.data}
    for name in ("mlp.gate_proj", "mlp.down_proj"):
        found = runner.gather_pair(1, name, (streams[1], streams[0]), (other, weights))
        assert found.cross is not None
        for part, expected in (("gram", rows[name].T @ rows[name]), ("cross", (floats[name] - rows[name]).T @ rows[name])):
            error = (getattr(found, part).double() - expected).norm() / expected.norm()
            assert float(error) < 1e-4, (name, part)
        loaded = runner.skeleton.get("model.layers.1.self_attn.o_proj.weight")
        assert torch.equal(loaded, other["self_attn.o_proj.weight"]), "the quantised weights are the ones that stay"
