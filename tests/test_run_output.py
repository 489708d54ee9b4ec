"""What a run leaves behind: bytes that add up, files as they were, the same bytes again, and nothing said without need."""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from formats.checkpoint import Checkpoint, read_header
from formats.reader import Artefact
from quant.errors import SchemeError, VerifyError
from tests.conftest import SIDE_FILES, SIZES, write_tiny_tokenizer
from tests.tiny_runs import MATRIX_PARTS, check_ledger, run, weight_files, write_text

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in weight_files(folder)}


@pytest.mark.parametrize("options", [["--bits", "3", "--zero-point"], ["--bits", "4", "--group-size", "channel"]])
@pytest.mark.parametrize("name", ["tied", "bfloat16", "moe", "sharded"])
def test_the_ledger_sums_for_other_models(
    name: str, options: list[str], tiny_model: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    check_ledger(tmp_path / "out", run("rtn", tiny_model(name), tmp_path / "out", text, *options))


@pytest.mark.parametrize("group", ["32", "64", "96"])
@pytest.mark.parametrize("bits", ["3", "4", "7"])
def test_the_ledger_sums_for_192_columns(bits: str, group: str, text: Path, tmp_path: Path) -> None:
    """Rows of codes that fill no whole number of words, and three groups of 64 or two of 96 to a row."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 192,
        "intermediate_size": 288,
        "head_dim": 24,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
    }
    LlamaForCausalLM(LlamaConfig(**{**SIZES, **sizes})).save_pretrained(tmp_path / "source")
    write_tiny_tokenizer(tmp_path / "source")
    if group == "64":  # 288 columns are four and a half groups
        with pytest.raises(SchemeError, match=r"down_proj \[192, 288\]"):
            run("rtn", tmp_path / "source", tmp_path / "out", text, "--bits", bits, "--zero-point", "--group-size", group)
        assert not (tmp_path / "out").exists()
        return
    manifest = run("rtn", tmp_path / "source", tmp_path / "out", text, "--bits", bits, "--zero-point", "--group-size", group)
    check_ledger(tmp_path / "out", manifest)


@pytest.mark.parametrize("method", ["rtn", "awq"])
def test_the_plan_of_a_dry_run_is_what_is_written(
    method: str, tiny_model: Callable[[str], Path], text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, options = tmp_path / "out", ["--shard-bytes", "100000", "--zero-point", "--json"]
    with pytest.raises(VerifyError, match="manifest"):  # there is none
        run(method, tiny_model("qwen2"), output, text, *options, "--dry-run")
    assert not output.exists()
    plan = json.loads(capsys.readouterr().out)
    manifest = run(method, tiny_model("qwen2"), output, text, *options)
    assert {file["name"]: file["nbytes"] for file in plan["files"]} == {p.name: p.stat().st_size for p in weight_files(output)}
    assert {each["name"]: each["nbytes"] for each in plan["tensors"]} == {each.name: each.nbytes for each in manifest.tensors}


def test_r39_shards_are_indexed_by_tensor_bytes_and_keep_a_module_together(
    tiny_model: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    limit, output = 70_000, tmp_path / "out"
    manifest = run("rtn", tiny_model("llama"), output, text, "--shard-bytes", str(limit), "--zero-point")
    check_ledger(output, manifest)
    stored = {name: info for path in weight_files(output) for name, info in read_header(path, path.name)[0].items()}
    index = json.loads((output / INDEX).read_text())
    assert index["weight_map"] == {name: info.file for name, info in stored.items()}
    assert index["metadata"]["total_size"] == sum(info.nbytes for info in stored.values())
    assert len(weight_files(output)) >= 3
    for path in weight_files(output):
        tensors = read_header(path, path.name)[0]
        assert path.stat().st_size <= limit or len(tensors) == 1
    for name in stored:
        if name.endswith(".weight_packed"):
            stem = name.removesuffix("weight_packed")
            assert len({stored[stem + part].file for part in MATRIX_PARTS}) == 1


def test_r42_and_r46_side_files_are_the_same_bytes(tiny_model: Callable[[str], Path], text: Path, tmp_path: Path) -> None:
    """Settings that the library calls inconsistent, odd spacing, custom code: all copied, nothing parsed and written again."""
    manifest = run("rtn", tiny_model("llama"), tmp_path / "out", text)
    for name in (*SIDE_FILES, "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tiny_model("llama") / name).read_bytes(), name
    source = {path.relative_to(tiny_model("llama")).as_posix() for path in tiny_model("llama").rglob("*") if path.is_file()}
    found = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert source <= found
    for file in manifest.files:
        assert hashlib.sha256((tmp_path / "out" / file.name).read_bytes()).hexdigest() == file.sha256
    assert {file.name for file in manifest.files} == found - {"manifest.json"}


@pytest.mark.parametrize("place", ["top", "nested"])
def test_r44_the_output_has_exactly_one_block(place: str, tiny_copy: Callable[[str], Path], text: Path, tmp_path: Path) -> None:
    source = tiny_copy("llama")
    config = json.loads((source / "config.json").read_text())
    stale = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    changed = config | (stale if place == "top" else {"other_config": stale})
    (source / "config.json").write_text(json.dumps(changed))
    manifest = run("rtn", source, tmp_path / "out", text)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert json.dumps(written).count("quant_method") == 1
    assert written["quantization_config"]["quant_method"] == "compressed-tensors"
    assert {key: value for key, value in written.items() if key not in ("quantization_config", "other_config")} == config
    assert any("stale" in note.text for note in manifest.notes)


@pytest.mark.parametrize("method", ["rtn", "awq"])
def test_r48_what_stays_float_keeps_type_and_bytes(
    method: str, tiny_model: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    source = tiny_model("bfloat16")
    manifest = run(method, source, tmp_path / "out", text)
    before, stored = Checkpoint.open(source), read_header(tmp_path / "out" / "model.safetensors", "model.safetensors")[0]
    data = (tmp_path / "out" / "model.safetensors").read_bytes()
    kept = [record for record in manifest.tensors if record.fate == "kept"]
    assert len(kept) >= 3
    for record in kept:
        info = stored[record.name]
        assert data[info.start : info.stop] == before.raw(record.name).tobytes()
    for record in manifest.tensors:
        if record.fate in ("kept", "folded"):
            assert stored[record.name].dtype == before.tensors[record.name].dtype == "BF16"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("method", "options"), [("rtn", []), ("rtn", ["--zero-point", "--bits", "3"]), ("awq", []), ("awq", ["--zero-point"])]
)
def test_r66_the_same_command_gives_the_same_bytes(
    method: str, options: list[str], tiny_model: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        torch.manual_seed(len(name) + ord(name))  # what the process did before must not matter
        run(method, tiny_model("llama"), tmp_path / name, text, *options)
    assert hashes(tmp_path / "a") == hashes(tmp_path / "b")
    assert (tmp_path / "a" / "config.json").read_bytes() == (tmp_path / "b" / "config.json").read_bytes()


def test_clipping_is_what_is_stored(tiny_model: Callable[[str], Path], text: Path, tmp_path: Path) -> None:
    """Every scale of a clipped matrix is at most the one without, and some are smaller."""
    for name in ("--clip", "--no-clip"):
        run("awq", tiny_model("llama"), tmp_path / name, text, "--bits", "3", name)
    clipped, plain = (Artefact(tmp_path / name) for name in ("--clip", "--no-clip"))
    module = "model.layers.0.mlp.gate_proj"  # the first block: what comes before is the same in both
    small, large = clipped.qtensor(module).scales, plain.qtensor(module).scales
    assert bool((small <= large).all())
    assert float((small < large).float().mean()) > 0.1


def test_r66_rtn_is_the_same_with_one_and_two_threads(tiny_model: Callable[[str], Path], text: Path, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            run("rtn", tiny_model("llama"), tmp_path / str(count), text, "--zero-point")
    finally:
        torch.set_num_threads(threads)
    assert hashes(tmp_path / "1") == hashes(tmp_path / "2")


@pytest.mark.parametrize("method", ["rtn", "awq"])
def test_r99_and_r22_a_clean_run_warns_of_nothing_and_says_what_was_achieved(
    method: str, tiny_model: Callable[[str], Path], text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings(), patch("pipelines.measuring.poor_baseline", return_value=None):  # a random model is poor
        warnings.simplefilter("error")
        manifest = run(method, tiny_model("llama"), tmp_path / "out", text, "--bits", "3", picture=True)
    out, err = capfd.readouterr()
    stages = r"(check values|hash source|quantise|evaluate float|evaluate artefact): .*"
    assert all(re.fullmatch(stages, line) for line in err.splitlines()), err
    assert out.splitlines()[0] == f"source: the folder {tiny_model('llama')}"
    assert "notes: none" in out.splitlines()
    assert manifest.notes == []
    assert re.search(r"int3-sym-g32-f16 +│ 14 matrices, 3 bits asked, 3\.5000 bits per weight stored", out)
    assert f"{manifest.bits_per_weight.whole_file:.4f} whole file" in out


@pytest.mark.parametrize(("name", "method"), [("llama", "awq"), ("moe", "rtn"), ("tied", "rtn"), ("bfloat16", "awq")])
def test_the_verify_command_finds_nothing_wrong(
    name: str, method: str, tiny_model: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    from typer.main import get_command

    from pipelines.verify import app

    run(method, tiny_model(name), tmp_path / "out", text, "--shard-bytes", "90000", picture=True)
    command: Any = get_command(app)
    command.main(args=[str(tmp_path / "out")], standalone_mode=False)


@pytest.mark.parametrize("name", ["perplexity", "perplexity_float", "ln_perplexity_ratio"])
def test_an_edited_measurement_is_found_from_the_rows_beside_it(
    name: str, tiny_model: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    from eval.recheck import recheck_measurements

    manifest = run("rtn", tiny_model("llama"), tmp_path / "out", text)
    assert recheck_measurements(tmp_path / "out", manifest) == "3 figures computed again from 3 windows"
    edited = [found.model_copy(update={"value": 1.5}) if found.name == name else found for found in manifest.measurements]
    with pytest.raises(VerifyError, match=f"{name} is not what its rows give"):
        recheck_measurements(tmp_path / "out", manifest.model_copy(update={"measurements": edited}))
    with pytest.raises(VerifyError, match="is not what its rows give"):
        recheck_measurements(tmp_path / "out", manifest.model_copy(update={"measurements": []}))


def test_a_negative_seed_is_refused_before_any_work(tiny_model: Callable[[str], Path], text: Path, tmp_path: Path) -> None:
    from quant.errors import UsageError

    with pytest.raises(UsageError, match="--seed is 0 or more"):
        run("rtn", tiny_model("llama"), tmp_path / "out", text, "--seed", "-1")
    assert not (tmp_path / "out").exists()
