"""Whole runs with float schemes and the project's own layout: bytes, what is read back, what engines do, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from calib.methods import METHODS, NUMBER_FORMATS
from formats.checkpoint import Checkpoint
from formats.integrity import verify_folder
from formats.manifest import Manifest
from formats.reader import Artefact, load_model
from quant.errors import SchemeError, UsageError
from quant.quantizers.rtn import round_to_nearest
from quant.scheme import ALIASES, Scheme
from tests.tiny_runs import check_ledger, run, write_text

# A method by itself and a calibrated method with the scheme; the group size of the other runs says nothing here.
NO_GROUP = ("--group-size",)
CALIBRATED = [
    ("gptq", "mxfp4"),
    ("awq", "nvfp4"),
    ("awq+gptq", "mxfp6-e2m3"),
    ("gptq", "fp8-tensor"),
    ("awq", "e2m1-b32-e8m0.even"),
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


def quantised(manifest: Manifest) -> dict[str, str]:
    return {record.name: str(record.scheme) for record in manifest.tensors if record.fate == "quantised"}


@pytest.mark.parametrize("method", NUMBER_FORMATS)
@pytest.mark.parametrize("model", ["ragged", "bfloat16"])
def test_a_number_format_is_a_method(
    method: str, model: str, tiny_model: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    """80 columns leave a short last block; the bytes add up, verify agrees, and what is read back is what rounding gives."""
    output = tmp_path / "out"
    manifest = run(method, tiny_model(model), output, text, without=NO_GROUP)
    check_ledger(output, manifest)
    verify_folder(output)
    scheme = Scheme.parse(METHODS[method].scheme or "")
    assert set(quantised(manifest).values()) == {str(scheme)}
    source, artefact = Checkpoint.open(tiny_model(model)), Artefact(output)
    name = "model.layers.1.mlp.down_proj"
    expected = round_to_nearest(source.tensor(f"{name}.weight"), scheme).dequantise()
    assert torch.equal(artefact.qtensor(name).dequantise(), expected)
    assert torch.equal(load_model(output).get_parameter(f"{name}.weight"), expected)


@pytest.mark.parametrize(("method", "scheme"), CALIBRATED)
def test_calibrated_methods_work_on_float_grids(
    method: str, scheme: str, tiny_model: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    manifest = run(method, tiny_model("ragged"), output, text, "--scheme", scheme, without=NO_GROUP)
    check_ledger(output, manifest)
    verify_folder(output)
    assert set(quantised(manifest).values()) == {str(Scheme.parse(scheme))}
    plain = run("rtn", tiny_model("ragged"), tmp_path / "plain", text, "--scheme", scheme, without=NO_GROUP)
    assert plain.options["scheme"] == scheme
    ours, theirs = Artefact(output), Artefact(tmp_path / "plain")
    same = [torch.equal(ours.qtensor(name).codes, theirs.qtensor(name).codes) for name in ours.modules()]
    assert not all(same), "calibration changed nothing"


def test_the_block_names_the_schemes_and_no_engine_takes_it(
    tiny_model: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    """transformers passes over a quant_method that it does not know and makes random matrices; a block without one stops it."""
    from transformers import AutoModelForCausalLM

    output = tmp_path / "out"
    run("mxfp4", tiny_model("llama"), output, text, without=NO_GROUP)
    block = json.loads((output / "config.json").read_text())["quantization_config"]
    assert (block["method"], block["format"]) == ("bitledger", "dense")
    assert block["config_groups"]["group_0"] == {"targets": ["Linear"], "format": "dense", "scheme": ALIASES["mxfp4"]}
    with pytest.raises(ValueError, match="quant_method"):
        AutoModelForCausalLM.from_pretrained(output)


def test_a_recipe_may_mix_layouts(tiny_model: Callable[[str], Path], text: Path, tmp_path: Path) -> None:
    recipe, output = tmp_path / "mix.toml", tmp_path / "out"
    recipe.write_text(
        '[[rule]]\nmatch = "*.down_proj"\nscheme = "mxfp8"\n\n[[rule]]\nmatch = "*.o_proj"\nbits = 5\nformat = "dense"\n\n'
        '[[rule]]\nmatch = "lm_head"\nscheme = "e4m3-channel-f16"\n\n[[rule]]\nmatch = "*"\nbits = 4\ngroup_size = 32\n'
    )
    manifest = run("rtn", tiny_model("llama"), output, text, "--recipe", str(recipe), without=NO_GROUP)
    check_ledger(output, manifest)
    verify_folder(output)
    codecs = {
        record.name.rpartition(".weight")[0].rpartition(".")[2]: record.codec for record in manifest.tensors if record.codec
    }
    assert codecs["down_proj"] == codecs["o_proj"] == codecs["lm_head"] == "dense"
    assert codecs["q_proj"] == codecs["gate_proj"] == "pack-quantized"
    assert json.loads((output / "config.json").read_text())["quantization_config"]["format"] == "mixed-precision"
    assert torch.isfinite(load_model(output)(torch.zeros(1, 4, dtype=torch.long)).logits).all()


def test_a_method_is_the_default_scheme_of_a_recipe(tiny_model: Callable[[str], Path], text: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "some.toml"
    recipe.write_text('[[rule]]\nmatch = "*.down_proj"\nbits = 8\ngroup_size = "channel"\n\n[[rule]]\nmatch = "*"\n')
    manifest = run("mxfp4", tiny_model("llama"), tmp_path / "out", text, "--recipe", str(recipe), without=NO_GROUP)
    found = quantised(manifest)
    assert found["model.layers.0.mlp.down_proj.weight"] == "int8-sym-channel-f16"
    assert found["model.layers.0.mlp.up_proj.weight"] == ALIASES["mxfp4"]


@pytest.mark.parametrize(
    ("method", "options"), [("nvfp4", ()), ("rtn", ("--scheme", "fp8-tensor", "--mse")), ("gptq", ("--scheme", "nvfp4"))]
)
def test_matrices_that_engines_fuse_share_a_tensor_level_scale(
    method: str, options: tuple[str, ...], tiny_copy: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    """R75: gate with 1 as its largest weight and up with 2 get one scale, and so do q, k and v; each says so."""
    from safetensors.torch import load_file, save_file

    source = tiny_copy("llama")
    weights = load_file(source / "model.safetensors")
    for name, top in (("gate_proj", 1.0), ("up_proj", 2.0)):
        matrix = weights[f"model.layers.0.mlp.{name}.weight"]
        weights[f"model.layers.0.mlp.{name}.weight"] = matrix / matrix.abs().max() * top
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    manifest = run(method, source, tmp_path / "out", text, *options, without=NO_GROUP)
    artefact = Artefact(tmp_path / "out")
    for family in (("mlp.gate_proj", "mlp.up_proj"), ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")):
        found = [artefact.qtensor(f"model.layers.0.{name}") for name in family]
        level = [stored.scales.float() if stored.divisor is None else stored.divisor for stored in found]
        assert all(torch.equal(level[0], other) for other in level[1:])
    alone = artefact.qtensor("model.layers.0.mlp.down_proj")
    assert alone.divisor is None or not torch.equal(alone.divisor, level[0])
    if method == "nvfp4":
        gate = artefact.qtensor("model.layers.0.mlp.gate_proj")
        assert gate.divisor is not None
        assert float(gate.divisor) == 448 * 6 / 2
    assert any(note.kind == "shared-range" for note in manifest.notes)
    record = next(record for record in manifest.tensors if record.name == "model.layers.0.mlp.gate_proj.weight")
    assert any("gate_proj, up_proj" in note for note in record.notes)


def test_dense_holds_what_groups_do_not_divide(tiny_model: Callable[[str], Path], text: Path, tmp_path: Path) -> None:
    """80 columns with groups of 64: pack-quantized names every such matrix and offers dense, which holds them."""
    options = ("--group-size", "64")
    with pytest.raises(SchemeError, match="--format dense") as refused:
        run("rtn", tiny_model("ragged"), tmp_path / "no", text, *options)
    assert str(refused.value).count("down_proj [64, 80]") == 2
    manifest = run("rtn", tiny_model("ragged"), tmp_path / "out", text, *options, "--format", "dense", "--zero-point")
    check_ledger(tmp_path / "out", manifest)
    verify_folder(tmp_path / "out")
    stored = Artefact(tmp_path / "out").qtensor("model.layers.0.mlp.down_proj")
    source = Checkpoint.open(tiny_model("ragged")).tensor("model.layers.0.mlp.down_proj.weight")
    assert torch.equal(stored.dequantise(), round_to_nearest(source, Scheme(4, "zp", 64)).dequantise())


def test_odd_shapes_are_stored_and_read_back(text: Path, tmp_path: Path) -> None:
    """R21: k and v with 12 outputs, a quantised head over 257 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.conftest import SIZES, write_tiny_tokenizer

    sizes: dict[str, Any] = {
        "vocab_size": 257,
        "head_dim": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "hidden_size": 48,
    }
    LlamaForCausalLM(LlamaConfig(**{**SIZES, **sizes})).save_pretrained(tmp_path / "source")
    write_tiny_tokenizer(tmp_path / "source")
    recipe = tmp_path / "all.toml"
    recipe.write_text('[[rule]]\nmatch = "lm_head"\nscheme = "nvfp4"\n\n[[rule]]\nmatch = "*"\nbits = 3\nsymmetric = false\n')
    options = ("--recipe", str(recipe), "--format", "dense")
    manifest = run("rtn", tmp_path / "source", tmp_path / "out", text, *options, without=NO_GROUP)
    check_ledger(tmp_path / "out", manifest)
    verify_folder(tmp_path / "out")
    artefact, source = Artefact(tmp_path / "out"), Checkpoint.open(tmp_path / "source")
    assert artefact.qtensor("model.layers.0.self_attn.k_proj").shape == (12, 48)
    assert artefact.qtensor("lm_head").shape == (257, 48)
    for module in artefact.modules():
        scheme = artefact.qtensor(module).scheme
        expected = round_to_nearest(source.tensor(f"{module}.weight"), scheme).dequantise()
        assert torch.equal(artefact.qtensor(module).dequantise(), expected)


@pytest.mark.parametrize(
    ("method", "options", "sentence"),
    [
        ("mxfp4", ("--bits", "3"), "mxfp4, which names its own scheme"),
        ("mxfp4", ("--scheme", "nvfp4"), "mxfp4, which names its own scheme"),
        ("rtn", ("--scheme", "mxfp4", "--bits", "4"), "nothing else of it"),
        ("rtn", ("--scheme", "mxfp5"), "no such scheme: 'mxfp5'"),
        ("rtn", ("--format", "zip"), "no such storage format"),
        ("learned", ("--scheme", "mxfp4"), "learns integer codes"),
        ("gptq", ("--scheme", "nvfp4", "--target-bpw", "4"), "a size target allocates widths of integers"),
        ("mxfp4", ("--format", "pack-quantized"), "holds integers, and e2m1 is a float format"),
    ],
)
def test_what_makes_no_sense_is_refused_before_any_work(
    method: str, options: tuple[str, ...], sentence: str, tiny_model: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    with pytest.raises((UsageError, SchemeError), match=sentence):
        run(method, tiny_model("llama"), tmp_path / "out", text, *options, without=NO_GROUP)
    assert not (tmp_path / "out").exists()


def test_tuning_leaves_shared_and_power_of_two_scales_alone(
    tiny_model: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    for scheme in ("nvfp4", "mxfp4", "fp8-tensor"):
        options = ("--scheme", scheme, "--tune", "2")
        run("rtn", tiny_model("llama"), tmp_path / scheme, text, *options, without=NO_GROUP)
        run("rtn", tiny_model("llama"), tmp_path / f"{scheme}-plain", text, "--scheme", scheme, without=NO_GROUP)
        tuned, plain = Artefact(tmp_path / scheme), Artefact(tmp_path / f"{scheme}-plain")
        for module in plain.modules():
            assert torch.equal(tuned.qtensor(module).steps(), plain.qtensor(module).steps())
