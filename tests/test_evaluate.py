"""The evaluate command on tiny artefacts: what it writes, what it refuses, and that gate, verify and compare go on from there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

from calib.corpora import load_corpus
from calib.tokenizer import TextTokenizer
from calib.windows import evaluation_windows, tokenise
from eval.language import compare_windows
from formats.integrity import Broken, verify_folder
from formats.manifest import Manifest
from formats.reader import load_model
from quant.errors import BitledgerError, GateFailed, UsageError, WindowsOverlap
from quant.quantizers.rtn import round_to_nearest
from quant.scheme import Scheme
from tests.tiny_runs import WINDOW, run, write_text


@pytest.fixture
def made(tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
    run("rtn", tiny_model("llama"), tmp_path / "artefact", write_text(tmp_path))
    return tmp_path / "artefact"


def evaluate(folder: Path, *options: str) -> None:
    from typer.main import get_command

    from pipelines.evaluate import app

    command: Any = get_command(app)
    given = () if "--only" in options else ("--only", "language")
    command.main(args=[str(folder), "--windows", "6", *given, *options], standalone_mode=False)


def test_measurements_and_rows_go_into_the_manifest_and_hold(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = Manifest.load(made)
    evaluate(made)
    shown = capsys.readouterr().out
    after = Manifest.load(made)
    assert "acceptance_overlap" in shown
    assert "verdict: language ln_perplexity_ratio: " in shown
    assert "6 x 33, stride 33, no start token" in shown
    assert [m for m in after.measurements if not m.part] == before.measurements
    own = {m.name: m for m in after.measurements if m.part == "language"}
    assert own["perplexity"].subject == after.weights() == before.weights()
    assert own["perplexity_reference"].subject == {f.name: f.sha256 for f in before.source.files if f.name.endswith("tensors")}
    assert (
        own["kl"].inputs["windows"] == own["perplexity"].inputs["windows"] != getattr(before.digests.evaluation, "digest", None)
    )
    (record,) = after.evaluations
    assert record.rows is not None
    rows = pd.read_parquet(made / record.rows)
    assert len(rows) == 6
    assert own["kl"].value == pytest.approx(rows["kl"].sum() / rows["positions"].sum())
    verify_folder(made)


def test_twice_is_the_same_and_replaces(made: Path) -> None:
    evaluate(made)
    first = Manifest.load(made)
    evaluate(made, "--batch", "1")
    second = Manifest.load(made)
    assert len(second.evaluations) == 1
    values = [{m.name: m.value for m in manifest.measurements if m.part} for manifest in (first, second)]
    assert values[0] == pytest.approx(values[1], rel=1e-5, abs=1e-7)
    verify_folder(made)


def test_another_artefact_may_be_the_reference(made: Path, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    run("rtn", tiny_model("llama"), tmp_path / "other", tmp_path / "text.txt", "--bits", "8")
    evaluate(made, "--against", str(tmp_path / "other"))
    found = next(m for m in Manifest.load(made).measurements if m.name == "kl")
    assert found.inputs["baseline model.safetensors"] == Manifest.load(tmp_path / "other").weights()["model.safetensors"]


def test_json_holds_what_the_manifest_holds(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluate(made, "--json")
    found = json.loads(capsys.readouterr().out)
    stored = [m.model_dump(mode="json") for m in Manifest.load(made).measurements if m.part]
    assert found["measurements"] == stored


def change_a_byte(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(bytes(data))


def test_a_changed_byte_is_found_before_anything_is_measured(made: Path) -> None:
    evaluate(made)
    change_a_byte(made)
    with pytest.raises(Broken, match=r"model\.safetensors"):
        evaluate(made)


def damaged(folder: Path, target: Path, factor: float) -> Path:
    """A copy of a model with its head times ``factor``."""
    copy = Path(shutil.copytree(folder, target))
    tensors = load_file(copy / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * factor
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    return copy


def test_a_broken_baseline_stops_the_evaluation(made: Path, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """R95."""
    broken = damaged(tiny_model("llama"), tmp_path / "broken", 1e4)
    before = Manifest.load(made)
    with pytest.raises(GateFailed, match="float baseline is broken: it loses"):
        evaluate(made, "--against", str(broken))
    assert Manifest.load(made) == before


def test_a_broken_source_stops_a_run_before_it_quantises(
    tiny_model: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """R95: and nothing is written."""
    broken = damaged(tiny_model("llama"), tmp_path / "broken", 1e4)
    with pytest.raises(GateFailed, match="float baseline is broken: it loses"):
        run("rtn", broken, tmp_path / "out", write_text(tmp_path))
    assert not (tmp_path / "out").exists()
    assert "quantise" not in capsys.readouterr().err


def test_a_source_that_changed_is_refused(made: Path, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny_model("llama"), tmp_path / "source"))
    run("rtn", source, tmp_path / "second", tmp_path / "text.txt")
    tensors = load_file(source / "model.safetensors")
    save_file({name: tensor + 0.001 for name, tensor in tensors.items()}, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(UsageError, match="no longer what the artefact was made from"):
        evaluate(tmp_path / "second")


def test_windows_that_were_calibrated_on_are_refused(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    run("awq", tiny_model("llama"), tmp_path / "artefact", write_text(tmp_path))
    with pytest.raises(WindowsOverlap, match="was calibrated on tokens"):
        evaluate(tmp_path / "artefact", "--windows", "119")


def test_another_tokenizer_is_refused(made: Path, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """R60: a baseline from another tokenizer compares unrelated tokens."""
    other = Path(shutil.copytree(tiny_model("llama"), tmp_path / "other"))
    data = json.loads((other / "tokenizer.json").read_text())
    vocabulary: dict[str, int] = data["model"]["vocab"]
    tokens = list(vocabulary)
    data["model"]["vocab"] = dict(zip(tokens, [*list(vocabulary.values())[1:], vocabulary[tokens[0]]], strict=True))
    (other / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(UsageError, match="into different tokens"):
        evaluate(made, "--against", str(other))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--suite", "big"), "no such suite: 'big' (there are: quick, standard, full)"),
        (("--only", "langage"), "no such part: 'langage'"),
        (("--against", "smollm2-135n"), "smollm2-135m"),
        (("--device", "gpu"), "--device"),
        (("--corpus", "wikitext3"), "no such corpus: wikitext3"),
    ],
)
def test_bad_input_is_one_sentence(options: tuple[str, ...], words: str, made: Path) -> None:
    with pytest.raises(BitledgerError) as caught:
        evaluate(made, *options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_artefact_no_evaluation(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no manifest\.json"):
        evaluate(tmp_path)


def test_what_is_measured_is_what_is_stored(made: Path, tiny_model: Callable[[str], Path]) -> None:
    """The figures of the packed files are those of the float model rounded in memory by the scheme."""
    evaluate(made)
    stored = {m.name: m.value for m in Manifest.load(made).measurements if m.part == "language"}
    reference, rounded = load_model(tiny_model("llama")), load_model(tiny_model("llama"))
    with torch.no_grad():
        for name, module in rounded.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                module.weight.copy_(round_to_nearest(module.weight, Scheme(4, "sym", 32)).dequantise())
    options = Manifest.load(made).options
    tokens = tokenise(load_corpus(str(options["corpus"])), TextTokenizer.from_folder(made))
    rows = compare_windows(reference, rounded, evaluation_windows(tokens, count=6, length=WINDOW)).windows
    assert stored["kl"] == pytest.approx(rows["kl"].sum() / rows["positions"].sum(), rel=1e-6)
    assert stored["top1"] == pytest.approx(rows["top1"].sum() / rows["positions"].sum())
