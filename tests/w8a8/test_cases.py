"""Public cases on smoothing and rounded inputs: overflow, fused and biased matrices, batch sizes, percentiles."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from formats.checkpoint import Checkpoint
from formats.manifest import Manifest
from formats.reader import Artefact, load_model
from quant.errors import NonFiniteTensor
from tests.conftest import QWEN2, SIZES
from tests.numerics.blocks import PHI3
from tests.test_tables import build
from tests.tiny_runs import run
from tests.w8a8.conftest import SHORT, W8, logits, outliers


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("layer", [0, 1])
def test_r17_overflow_names_the_layer_where_it_first_appears(layer: int, name: str, text: Path, tmp_path: Path) -> None:
    """R17: finite weights whose products are not, in front of a matrix whose inputs would be rounded."""

    def blow_up(model: Any) -> None:
        for leaf in ("gate_proj", "up_proj"):
            getattr(model.model.layers[layer].mlp, leaf).weight.mul_(1e30)

    bad = build(tmp_path / "model", "Llama", SIZES, blow_up)
    with pytest.raises(NonFiniteTensor, match=rf"model\.layers\.{layer}.*not finite"):
        run("smoothquant", bad, tmp_path / "out", text, "--activations", name, without=("--group-size",))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_r25_a_fused_query_key_value_matrix_is_left_alone_and_told(kv_heads: int, text: Path, tmp_path: Path) -> None:
    """R25: the value rows stand at the end of the fused matrix; nothing is divided there, and a note per layer says so."""
    fused = build(tmp_path / "model", "Phi3", {**PHI3, "num_key_value_heads": kv_heads})
    manifest = run("smoothquant", fused, tmp_path / "out", text, without=("--group-size",))
    skipped = next(note for note in manifest.notes if note.kind == "not-scaled")
    assert skipped.count >= 2
    for layer in (0, 1):
        assert f"model.layers.{layer}.self_attn.o_proj: nothing that produces its input can take factors" in skipped.text
    before, after = logits(load_model(fused)), logits(load_model(tmp_path / "out"))
    assert float((after - before).norm() / before.norm()) < 0.02
    folded = {record.name for record in manifest.tensors if record.fate == "folded"}
    assert folded == {f"model.layers.{n}.{which}_layernorm.weight" for n in (0, 1) for which in ("input", "post_attention")}


def test_r24_r30_folded_value_rows_carry_their_biases_with_them(text: Path, tmp_path: Path) -> None:
    """R24, R30: one factor per value channel for all queries that read it; its bias is divided by the same factor."""

    def biased(model: Any) -> None:
        outliers(model)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.fill_(5.0)

    made = build(tmp_path / "model", "Qwen2", QWEN2, biased)
    manifest = run("smoothquant", made, tmp_path / "out", text, "--alpha", "0.5", without=("--group-size",))
    checkpoint, artefact = Checkpoint.open(made), Artefact(tmp_path / "out")
    biases = {name for name in checkpoint.tensors if name.endswith("bias")}
    assert {name for name in artefact.tensors if name.endswith("bias")} == biases
    fates = {record.name: record.fate for record in manifest.tensors}
    for name in biases:
        if "v_proj" not in name:
            assert artefact.tensor(name).numpy().tobytes() == checkpoint.raw(name).tobytes()
            continue
        assert fates[name] == "folded"
        module = name.removesuffix(".bias")
        factors = checkpoint.tensor(name) / artefact.tensor(name)
        assert float((factors.log()).abs().max()) > 0.01, "something was folded"
        rows = checkpoint.tensor(f"{module}.weight").float().norm(dim=1)
        # All rows were scaled by the columns' factors of the input too: those of equal shares tell the rows' own factor.
        stored = artefact.qtensor(module).dequantise()
        again = build_rows(artefact, checkpoint, module)
        torch.testing.assert_close(rows / (stored / again).norm(dim=1), factors, rtol=2e-2, atol=0)
    before, after = (logits(load_model(folder)) for folder in (made, tmp_path / "out"))
    assert float((after - before).norm() / before.norm()) < 0.05


def build_rows(artefact: Artefact, checkpoint: Checkpoint, module: str) -> Tensor:
    """Factors of the input channels of a value matrix, from what its norm was divided by."""
    norm = module.rpartition(".self_attn")[0] + ".input_layernorm.weight"
    return (checkpoint.tensor(norm) / artefact.tensor(norm)).float()


@pytest.mark.parametrize("options", [(), ("--percentile", "90"), ("--clip",), ("--alpha", "0.5")])
def test_smoothing_leaves_the_float_model_what_it_was(
    options: tuple[str, ...], source: Path, made: Callable[..., tuple[Path, Manifest]]
) -> None:
    """With inputs and weights of 8 bits the logits are within their noise, whatever was folded; all that can fold did."""
    folder, manifest = made("smoothquant", *options)
    before, after = logits(load_model(source)), logits(load_model(folder))
    assert float((after - before).norm() / before.norm()) < 0.03
    note = next(note for note in manifest.notes if note.kind == "smoothing")
    assert note.count == 8
    if options[:1] == ("--alpha",):
        assert note.text.count("alpha 0.5, ") == 8
    assert manifest.options["percentile"] == (90.0 if "--percentile" in options else None)


def test_a_percentile_is_another_smoothing(made: Callable[..., tuple[Path, Manifest]]) -> None:
    plain, other = (Artefact(made("smoothquant", "--alpha", "0.5", *more)[0]) for more in ((), ("--percentile", "60")))
    name = "model.layers.0.input_layernorm.weight"
    assert not torch.equal(plain.tensor(name), other.tensor(name))


@pytest.mark.parametrize("name", SHORT)
def test_r63_scales_and_smoothing_are_those_of_any_batch_size(name: str, source: Path, text: Path, tmp_path: Path) -> None:
    """R62, R63: windows are all of one length and never padded, so that a batch only says how many run at once."""
    for batch in ("1", "3", "8"):
        options = ("--activations", name, "--batch", batch)
        run("smoothquant", source, tmp_path / batch, text, *options, without=("--group-size",))
    first, *others = (Artefact(tmp_path / batch) for batch in ("1", "3", "8"))
    for module in [module for module in first.modules() if ".0." in module]:
        for other in others:
            torch.testing.assert_close(other.qtensor(module).scales, first.qtensor(module).scales, rtol=1e-4, atol=0)
            if name == "static":
                scales = [artefact.tensor(f"{module}.input_scale") for artefact in (other, first)]
                torch.testing.assert_close(*scales, rtol=2e-3, atol=0)


def test_the_output_folder_and_the_plan_name_the_inputs(
    source: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from typer.main import get_command

    from pipelines.run import app

    monkeypatch.chdir(tmp_path)
    command: Any = get_command(app)
    words = ["--model", str(source), "--corpus", str(text), "--window", "33", "--evaluation-windows", "3", "--cards", "none"]
    words += ["--calibration-windows", "8", "--dry-run", "--json"]
    command.main(args=["smoothquant", *words, "--activations", "static"], standalone_mode=False)
    plan = json.loads(capsys.readouterr().out)
    assert plan["output"].endswith("-smoothquant-int8-sym-channel-f16-a8-tensor-static")
    details = {each["detail"] for each in plan["tensors"] if each["fate"] == "quantise"}
    assert details == {"rtn int8-sym-channel-f16 a8-tensor-static int-quantized"}
    command.main(args=["rtn", *words, *W8, "--activations", "static"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["calibration"] is not None, "static scales need calibration text"
    command.main(args=["rtn", *words, *W8, "--activations", "token"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["calibration"] is None
