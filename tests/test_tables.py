"""Quantised embeddings and output heads, tied and not, from the command line to three readers; biases and odd widths."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from formats.checkpoint import Checkpoint
from formats.integrity import Broken, verify_folder
from formats.manifest import Manifest, TensorRecord
from formats.reader import Artefact, load_model
from quant.errors import SourceError
from quant.quantizers.rtn import round_to_nearest
from quant.scheme import Scheme
from tests.conftest import QWEN2, SIZES, write_tiny_tokenizer
from tests.tiny_runs import check_ledger, run, write_text

IDS = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(5))
EIGHT = Scheme(8, "sym", "channel")
TABLES = {"head": "lm_head", "table": "model.embed_tokens", "both": "re:.*(lm_head|embed_tokens)$"}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


def recipe(folder: Path, pattern: str | None, rest: str = "group_size = 32") -> Path:
    path = folder / "recipe.toml"
    named = "" if pattern is None else f'[[rule]]\nmatch = "{pattern}"\nbits = 8\ngroup_size = "channel"\n'
    path.write_text(f'{named}[[rule]]\nmatch = "*"\n{rest}\n'.replace("\\", "\\\\"))
    return path


def made(method: str, source: Path, folder: Path, text: Path, *options: str) -> Manifest:
    return run(method, source, folder / "out", text, *options, without=("--group-size",))


def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(ids).logits
    return found


def records(manifest: Manifest) -> dict[str, TensorRecord]:
    return {record.name: record for record in manifest.tensors}


def expected_logits(source: Path, which: str | None) -> Tensor:
    """The float model with its matrices rounded in memory: no file, no plan, no reader of ours."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        table = model.model.embed_tokens.weight.detach().clone()
        head = model.lm_head.weight.detach().clone()
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                module.weight.copy_(round_to_nearest(module.weight, Scheme(4, "sym", 32)).dequantise())
        rounded = round_to_nearest(table, EIGHT).dequantise() if which in ("table", "both") else table
        model.model.embed_tokens.weight = torch.nn.Parameter(rounded)
        rounded = round_to_nearest(head, EIGHT).dequantise() if which in ("head", "both") else head
        model.lm_head.weight = torch.nn.Parameter(rounded)
    return logits(model)


@pytest.mark.parametrize("which", [None, "head", "table", "both"])
@pytest.mark.parametrize("name", ["tied", "llama"])
def test_r31_r32_what_is_stored_is_what_every_part_says(
    name: str, which: str | None, tiny_model: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    """R31: (a) head ignored, (b) head quantised, (c) only the embedding; R32: a shared table is quantised once."""
    source, output = tiny_model(name), tmp_path / "out"
    pattern = TABLES[which] if which else None
    manifest = made("rtn", source, tmp_path, text, "--recipe", str(recipe(tmp_path, pattern)))
    check_ledger(output, manifest)
    verify_folder(output)
    stored = {tensor for tensor in Artefact(output).tensors if "layers" not in tensor and "norm" not in tensor}
    parts = ("weight_packed", "weight_scale", "weight_shape")
    table = {f"model.embed_tokens.{part}" for part in (parts if which in ("table", "both") else ("weight",))}
    head = {f"lm_head.{part}" for part in (parts if which in ("head", "both") else ("weight",))}
    once = name == "tied" and which in (None, "both")
    assert stored == (table if once else table | head)
    assert json.loads((output / "config.json").read_text())["tie_word_embeddings"] is once
    assert torch.equal(logits(load_model(output)), expected_logits(source, which))
    found = records(manifest)
    if name == "tied" and which in ("head", "table"):
        assert found["lm_head.weight"].copy_of == "model.embed_tokens.weight"
        assert {note.kind for note in manifest.notes} >= {"untied"}
    elements = sum(info.elements for info in Checkpoint.open(source).tensors.values())
    assert manifest.bits_per_weight.all_elements == elements, "the denominator is the source's, however often a table is stored"


@pytest.mark.parametrize("name", ["tied", "llama"])
def test_r31_a_quantised_head_loads_in_transformers_as_it_is(
    name: str, tiny_model: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    made("rtn", tiny_model(name), tmp_path, text, "--recipe", str(recipe(tmp_path, "lm_head")))
    theirs = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32))
    assert torch.equal(theirs, logits(load_model(tmp_path / "out")))


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("which", ["table", "both"])
@pytest.mark.parametrize("name", ["tied", "llama"])
def test_a_quantised_table_of_one_scheme_loads_in_transformers_decompressed(
    name: str, which: str, tiny_model: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    """What the run's last lines advise. The library decompresses into the type of the scales: float32 here, to compare bits."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    same = 'bits = 8\ngroup_size = "channel"\nscale_dtype = "f32"'
    path = recipe(tmp_path, TABLES[which], same)
    path.write_text(path.read_text().replace('"channel"\n[[', '"channel"\nscale_dtype = "f32"\n[['))
    made("rtn", tiny_model(name), tmp_path, text, "--recipe", str(path))
    block = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert len(block["config_groups"]) == 1
    options = {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    theirs = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, **options))
    assert torch.equal(theirs, logits(load_model(tmp_path / "out")))


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_calibrated_methods_see_the_rounded_table_and_round_tables_without_data(
    method: str, tiny_model: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    source = tiny_model("tied")
    manifest = made(method, source, tmp_path, text, "--recipe", str(recipe(tmp_path, TABLES["both"])))
    verify_folder(tmp_path / "out")
    assert records(manifest)["model.embed_tokens.weight"].quantizer == "rtn"
    table = Checkpoint.open(source).tensor("model.embed_tokens.weight")
    stored, rounded = Artefact(tmp_path / "out").qtensor("model.embed_tokens"), round_to_nearest(table, EIGHT)
    assert torch.equal(stored.codes, rounded.codes)
    assert ("data-free" in {note.kind for note in manifest.notes}) == (method == "gptq")


@pytest.mark.parametrize("which", ["head", "table", "both"])
def test_tables_of_a_tied_pair_can_be_tuned_and_learned(
    which: str, tiny_model: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    source = tiny_model("tied")
    path = str(recipe(tmp_path, TABLES[which]))
    manifest = made("learned", source, tmp_path, text, "--recipe", path, "--tune", "2", "--learn-iterations", "2")
    check_ledger(tmp_path / "out", manifest)
    verify_folder(tmp_path / "out")
    assert {note.kind for note in manifest.notes} >= {"tuned"}
    assert bool(torch.isfinite(logits(load_model(tmp_path / "out"))).all())


def test_verify_finds_a_tie_that_is_not_as_stored(tiny_model: Callable[[str], Path], text: Path, tmp_path: Path) -> None:
    from formats.config_block import check_config
    from quant.errors import VerifyError

    for which, tie in (("head", True), ("both", False)):
        folder = tmp_path / which
        folder.mkdir()
        manifest = made("rtn", tiny_model("tied"), folder, text, "--recipe", str(recipe(folder, TABLES[which])))
        config = json.loads((folder / "out" / "config.json").read_text())
        check_config(config, manifest.tensors)
        with pytest.raises(VerifyError, match="tie_word_embeddings"):
            check_config(config | {"tie_word_embeddings": tie}, manifest.tensors)
        config["quantization_config"]["ignore"].append("model.embed_tokens" if which == "both" else "lm_head")
        with pytest.raises(VerifyError, match="is quantised but ignored"):
            check_config(config, manifest.tensors)


def build(folder: Path, prefix: str, arguments: dict[str, Any], change: Callable[[Any], None] = lambda model: None) -> Path:
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}ForCausalLM")(getattr(transformers, f"{prefix}Config")(**arguments))
    with torch.no_grad():
        change(model)
    model.save_pretrained(folder)
    write_tiny_tokenizer(folder)
    return folder


NARROW = {**SIZES, "head_dim": 12, "num_key_value_heads": 1, "vocab_size": 257}


@pytest.mark.parametrize("zero", ["true", "false"])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_r21_widths_that_fill_no_packing_unit_are_stored_exactly(bits: int, zero: str, text: Path, tmp_path: Path) -> None:
    """R21: k and v with 12 outputs, a vocabulary of 257 with head and table quantised."""
    source = build(tmp_path / "model", "Llama", NARROW)
    path = tmp_path / "recipe.toml"
    body = f'bits = {bits}\nsymmetric = {zero}\ngroup_size = "channel"\n'
    path.write_text(f'[[rule]]\nmatch = "{TABLES["both"]}"\n{body}[[rule]]\nmatch = "*"\n{body}')
    manifest = made("rtn", source, tmp_path, text, "--recipe", str(path))
    check_ledger(tmp_path / "out", manifest)
    verify_folder(tmp_path / "out")
    scheme = Scheme(bits, "sym" if zero == "true" else "zp", "channel")
    artefact, checkpoint = Artefact(tmp_path / "out"), Checkpoint.open(source)
    shapes = set()
    for module in artefact.modules():
        expected = round_to_nearest(checkpoint.tensor(f"{module}.weight"), scheme)
        shapes.add(expected.shape)
        assert torch.equal(artefact.qtensor(module).dequantise(), expected.dequantise())
    assert {(12, 64), (257, 64)} <= shapes
    assert bool(torch.isfinite(logits(load_model(tmp_path / "out"))).all())


@pytest.mark.parametrize("method", ["rtn", "awq", "gptq", "awq+gptq"])
def test_r30_biases_are_the_sources_bytes_or_the_folded_ones(method: str, text: Path, tmp_path: Path) -> None:
    """R30: biases of 5 on q, k, v and 8 bits: logits at the noise of 8 bits; no bias appears where none was, none is lost."""

    def fill(model: Any) -> None:
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.fill_(5.0)

    source = build(tmp_path / "model", "Qwen2", QWEN2, fill)
    manifest = run(method, source, tmp_path / "out", text, "--bits", "8", "--group-size", "channel")
    checkpoint, artefact = Checkpoint.open(source), Artefact(tmp_path / "out")
    biases = {name for name in checkpoint.tensors if name.endswith("bias")}
    assert len(biases) == 6
    assert {name for name in artefact.tensors if name.endswith("bias")} == biases
    folded = {record.name for record in manifest.tensors if record.fate == "folded"}
    assert folded & biases <= {name for name in biases if "v_proj" in name and "awq" in method}
    for name in biases - folded:
        assert artefact.tensor(name).numpy().tobytes() == checkpoint.raw(name).tobytes()
    before, after = (logits(load_model(folder)) for folder in (source, tmp_path / "out"))
    assert float((after - before).norm() / before.norm()) < 0.02


def random_norms(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.uniform_(0.5, 2)


def test_norms_can_be_stored_as_bfloat16_and_the_run_says_so(
    tiny_model: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    source = build(tmp_path / "model", "Llama", SIZES, random_norms)
    path = tmp_path / "norms.toml"
    path.write_text('[[rule]]\nmatch = "re:.*norm$"\nkeep = true\ndtype = "bf16"\n[[rule]]\nmatch = "*"\ngroup_size = 32\n')
    for method in ("rtn", "awq"):
        manifest = run(method, source, tmp_path / method, text, "--recipe", str(path), without=("--group-size",))
        check_ledger(tmp_path / method, manifest)
        verify_folder(tmp_path / method)
        artefact, checkpoint = Artefact(tmp_path / method), Checkpoint.open(source)
        norms = [name for name in checkpoint.tensors if "norm" in name]
        for name in norms:
            stored = artefact.tensor(name)
            assert stored.dtype == torch.bfloat16
            record = records(manifest)[name]
            assert (record.dtype, record.parts[0].dtype, record.parts[0].nbytes) == ("F32", "BF16", 2 * stored.numel())
            if record.fate == "kept":
                assert torch.equal(stored, checkpoint.tensor(name).bfloat16())
        assert {note.kind for note in manifest.notes} >= {"stored-type"}


def test_the_seed_preset_runs_and_its_bytes_are_as_planned(text: Path, tmp_path: Path) -> None:
    source = build(tmp_path / "model", "Llama", {**SIZES, "hidden_size": 96, "head_dim": 24, "tie_word_embeddings": True})
    manifest = made("gptq", source, tmp_path, text, "--recipe", "seed-mixed")
    check_ledger(tmp_path / "out", manifest)
    verify_folder(tmp_path / "out")
    schemes = {record.scheme for record in manifest.tensors if record.fate == "quantised"}
    assert schemes == {"int8-sym-channel-f16", "int4-sym-g128-f16", "int4-sym-g32-f16"}
    assert records(manifest)["model.embed_tokens.weight"].nbytes == 256 * 96 + 2 * 256 + 16
    assert {note.kind for note in manifest.notes} >= {"group-size", "data-free"}


def test_r23_transposed_families_are_refused_by_name(tiny_model: Callable[[str], Path], text: Path, tmp_path: Path) -> None:
    """R23: never "0 layers quantised, done"."""
    for method in ("rtn", "gptq"):
        with pytest.raises(SourceError, match=r"gpt2 model, whose matrices are stored transposed \(Conv1D\)"):
            run(method, tiny_model("gpt2"), tmp_path / "out", text)
    assert not (tmp_path / "out").exists()


def test_a_damaged_table_is_found(tiny_model: Callable[[str], Path], text: Path, tmp_path: Path) -> None:
    from tests.failure.damage import poke

    made("rtn", tiny_model("tied"), tmp_path, text, "--recipe", str(recipe(tmp_path, TABLES["both"])))
    info = Artefact(tmp_path / "out").tensors["model.embed_tokens.weight_packed"]
    poke(tmp_path / "out" / info.file, info.start, 1.0)
    with pytest.raises(Broken, match="SHA-256"):
        verify_folder(tmp_path / "out")
