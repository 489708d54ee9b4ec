"""The manifest: what it refuses, what it proves about itself, and what a comparison shows."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from formats.differences import diff
from formats.manifest import (
    LedgerLine,
    Manifest,
    MeasurementRecord,
    PartRecord,
    TensorRecord,
    build_bits_per_weight,
    build_ledger,
    versions,
)
from quant.errors import CoverageError, VerifyError
from tests.artefact import build_artefact


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("manifest") / "artefact"
    build_artefact(path)
    return path


@pytest.fixture
def data(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return found


def parsed(data: dict[str, Any]) -> Manifest:
    return Manifest.parse(json.dumps(data).encode())


def test_what_is_saved_is_what_is_loaded(folder: Path) -> None:
    manifest = Manifest.load(folder)
    assert manifest.text() == (folder / "manifest.json").read_text()
    assert Manifest.load(folder / "manifest.json") == manifest
    assert list(json.loads(manifest.text())) == list(Manifest.model_fields), "keys stand in the order of the schema"


def test_ledger_and_bits_are_those_of_the_files(folder: Path) -> None:
    """Counted by hand: 2 fine matrices of 96 rows x 64 at 4 bits with groups of 32, and 2 coarse ones at 3 bits by channel."""
    manifest = Manifest.load(folder)
    fine = 96 * 64 * 4 // 8 + 96 * 2 * 2
    coarse = 96 * (64 * 3 // 8) + 64 * (96 * 3 // 8) + (96 + 64) * 2 + (9 + 6) * 4
    assert manifest.bits_per_weight.quantised_elements == 96 * 64 + 2 * 96 * 64
    assert manifest.bits_per_weight.quantised == 8 * (fine + coarse) / (3 * 96 * 64)
    assert manifest.bits_per_weight.all_elements == 3 * 96 * 64 + 16 * 64 + 64 + 4 * 64, "the tied head counts once"
    sizes = {line.file: (folder / line.file).stat().st_size for line in manifest.ledger}
    assert sizes == {line.file: line.total_bytes for line in manifest.ledger}
    assert manifest.bits_per_weight.whole_file == 8 * sum(sizes.values()) / manifest.bits_per_weight.all_elements


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda d: d.update(surprise=1), "surprise"),
        (lambda d: d["tensors"][0].update(surprise=1), "tensors.0.surprise"),
        (lambda d: d["tensors"][0].update(nbytes="4096"), "tensors.0.nbytes"),
        (lambda d: d["tensors"][0].update(nbytes=-1), "tensors.0.nbytes"),
        (lambda d: d["tensors"][0].update(fate="lost"), "tensors.0.fate"),
        (lambda d: d["files"][0].update(name="../weights"), "files.0.name"),
        (lambda d: d["files"][0].update(name="/etc/passwd"), "files.0.name"),
        (lambda d: d["files"][0].update(sha256="abc"), "files.0.sha256"),
        (lambda d: d["measurements"][0].update(value=float("inf")), "measurements.0.value"),
        (lambda d: d.pop("ledger"), "ledger"),
        (lambda d: d.update(tensors=None), "tensors"),
    ],
)
def test_what_does_not_belong_is_refused_with_its_place(data: dict[str, Any], change: Callable[[Any], Any], place: str) -> None:
    change(data)
    with pytest.raises(VerifyError) as refused:
        parsed(data)
    assert place in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", "has format None"),
        (b'{"format": "bitledger-manifest/2"}', "expected 'bitledger-manifest/1'"),
        (b'{"format": "bitledger-manifest/1"}', "Field required"),
    ],
)
def test_a_file_that_is_no_manifest_is_named(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "manifest.json"
    path.write_bytes(content)
    with pytest.raises(VerifyError, match=str(path)) as refused:
        Manifest.load(path)
    assert says in str(refused.value)


def test_a_missing_manifest_is_named(tmp_path: Path) -> None:
    with pytest.raises(VerifyError, match=r"no readable manifest\.json at .*No such file"):
        Manifest.load(tmp_path)


def test_damaged_manifests_end_in_a_typed_error_or_in_a_manifest(folder: Path) -> None:
    """1,000 random changes of a byte or a run: never another exception."""
    text = (folder / "manifest.json").read_bytes()
    source = random.Random(7)
    refused = 0
    for _ in range(1000):
        start = source.randrange(len(text))
        damage = bytes(source.randrange(256) for _ in range(source.choice((0, 1, 1, 1, 8))))
        try:
            Manifest.parse(text[:start] + damage + text[start + source.choice((1, 1, 8)) :]).check_ledger()
        except (VerifyError, CoverageError):
            refused += 1
    assert refused > 500


def test_numbers_that_are_not_finite_are_refused_when_made(folder: Path) -> None:
    with pytest.raises(ValidationError):
        MeasurementRecord(name="x", value=float("nan"), unit="1", n=1)


def test_coverage_names_what_is_missing_doubled_or_invented(folder: Path) -> None:
    manifest = Manifest.load(folder)
    stored = [record.name for record in manifest.tensors if record.fate != "alias"]
    manifest.check_coverage(stored)  # a tied head that the source does not store is an alias all the same
    manifest.check_coverage([*stored, "lm_head.weight"])
    with pytest.raises(CoverageError, match=r"1 tensors without a fate: model\.extra\.weight"):
        manifest.check_coverage([*stored, "model.extra.weight"])
    with pytest.raises(CoverageError, match=r"that the source does not have: model\.embed_tokens\.weight"):
        manifest.check_coverage(stored[1:])
    twice = manifest.model_copy(update={"tensors": [*manifest.tensors, manifest.tensors[0]]})
    with pytest.raises(CoverageError, match=r"more than one fate: model\.embed_tokens\.weight"):
        twice.check_coverage(stored)


def _set(path: str, value: Any) -> Callable[[Any], None]:
    def change(data: Any) -> None:
        *steps, last = [int(step) if step.isdigit() else step for step in path.split(".")]
        for step in steps:
            data = data[step]
        data[last] = value

    return change


QUANTISED = 3  # position of the first quantised tensor in the artefact's manifest
ALIAS = 7


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_set("ledger.0.codes_bytes", 1), "the ledger says codes_bytes 1"),
        (_set("ledger.0.header_bytes", 8), "the ledger says"),
        (_set("ledger.0.total_bytes", 8), "are not the sizes of the weight files"),
        (lambda d: d["ledger"].pop(), "are not the sizes of the weight files"),
        (lambda d: d["ledger"].append(d["ledger"][0]), "are not the sizes of the weight files"),
        (_set("files.0.nbytes", 1), "are not the sizes of the weight files"),
        (_set(f"tensors.{QUANTISED}.nbytes", 1), "q_proj.weight: 1 bytes recorded"),
        (_set(f"tensors.{QUANTISED}.bits_per_weight", 4.0), "4.0 bits per weight recorded"),
        (_set(f"tensors.{QUANTISED}.shape", [64, 65]), "bits per weight recorded"),
        (_set(f"tensors.{QUANTISED}.shape", [64, 0]), "without elements"),
        (_set(f"tensors.{QUANTISED}.scheme", None), "a quantised tensor cannot have"),
        (_set(f"tensors.{QUANTISED}.fate", "kept"), "a kept tensor cannot have"),
        (_set(f"tensors.{QUANTISED}.parts.0.role", "scales"), "the ledger says"),
        (_set(f"tensors.{QUANTISED}.parts.0.file", "other.safetensors"), "which is no weight file of the ledger"),
        (_set(f"tensors.{QUANTISED}.parts.0.name", "model.norm.weight"), "belong to two records: model.norm.weight"),
        (_set("tensors.0.alias_of", "model.norm.weight"), "a kept tensor cannot have"),
        (
            _set(f"tensors.{ALIAS}.alias_of", "lm_head.weight"),
            "lm_head.weight is an alias of lm_head.weight, which is not stored",
        ),
        (lambda d: d["tensors"].append(d["tensors"][0]), "more than one fate"),
        (_set("bits_per_weight.whole_file", 4.0), "bits per weight recorded as"),
        (_set("bits_per_weight.quantised", None), "bits per weight recorded as"),
    ],
)
def test_a_sum_that_does_not_hold_is_named(data: dict[str, Any], change: Callable[[Any], Any], says: str) -> None:
    change(data)
    with pytest.raises(CoverageError) as refused:
        parsed(data).check_ledger()
    assert says in str(refused.value)


def test_nothing_is_written_when_the_folder_disagrees(folder: Path, tmp_path: Path) -> None:
    manifest = Manifest.load(folder)
    with pytest.raises(CoverageError, match=r"bytes in the manifest, None on disk; no manifest is written"):
        manifest.save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_anything_quantised_has_no_quantised_bits() -> None:
    part = PartRecord(name="w", file="model.safetensors", dtype="F32", shape=[2], nbytes=8, role="kept")
    record = TensorRecord(name="w", dtype="F32", shape=[2], fate="kept", parts=[part], nbytes=8)
    ledger = build_ledger([record], {"model.safetensors": 80})
    assert ledger == [
        LedgerLine(
            file="model.safetensors", codes_bytes=0, scales_bytes=0, zeros_bytes=0, shape_bytes=0, kept_bytes=8, header_bytes=80,
            total_bytes=88,
        )
    ]  # fmt: skip
    total = build_bits_per_weight([record], ledger)
    assert (total.quantised, total.quantised_elements, total.whole_file) == (None, 0, 8 * 88 / 2)
    with pytest.raises(CoverageError, match="no tensor of the manifest has any elements"):
        build_bits_per_weight([], [])


def test_equal_manifests_differ_in_nothing_but_the_run(data: dict[str, Any]) -> None:
    before = parsed(data)
    data["run"] = {"started_utc": "2027-01-01T00:00:00Z", "seconds": {"all": 9.0}, "peak_rss_bytes": 5, "threads": 2}
    data["tensors"].reverse()
    assert diff(before, parsed(data)) == ()


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (_set("files.0.sha256", "0" * 64), ["files[model-00001-of-00002.safetensors].sha256"]),
        (_set(f"tensors.{QUANTISED}.scheme", "int8-sym-channel-f16"), ["tensors[model.layers.0.self_attn.q_proj.weight].scheme"]),
        (lambda d: d["tensors"].pop(), ["tensors[lm_head.weight]"]),
        (_set("digests.evaluation.span_tokens", [0, 4097]), ["digests.evaluation.span_tokens[1]"]),
        (_set("digests.evaluation", None), ["digests.evaluation"]),
        (_set("measurements.0.value", 30.500000000000004), ["measurements[perplexity].value"]),
        (_set("cards.0.batch", 4), ["cards[Card].batch"]),
        (_set("cards.0.extra", 1), ["cards[Card].extra"]),
        (_set("options.seed", False), ["options.seed"]),
        (_set("notes.0.text", "kept"), ["notes[0].text"]),
        (_set("seed", 1), ["seed"]),
        (_set("recipe.rules.0.match", "x"), ["recipe.rules[0].match"]),
        (_set("deployment.tested", True), ["deployment.tested"]),
        (_set("versions.torch", "2"), ["versions.torch"]),
    ],
)
def test_every_other_difference_is_named(data: dict[str, Any], change: Callable[[Any], Any], where: list[str]) -> None:
    before = parsed(data)
    change(data)
    after = parsed(data)
    assert [difference.where for difference in diff(before, after)] == where
    assert [(d.left, d.right) for d in diff(before, after)] == [(d.right, d.left) for d in diff(after, before)]


def test_an_absent_value_is_shown_as_a_dash(data: dict[str, Any]) -> None:
    before = parsed(data)
    data["versions"]["torch"] = "2"
    assert str(diff(before, parsed(data))[0]) == 'versions.torch: - against "2"'


def test_versions_are_found_without_importing_what_they_name() -> None:
    code = "import sys; from formats.manifest import versions; v = versions(); print(v['torch'], 'torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    import torch

    assert torch.__version__.startswith(shown[0]), "metadata may lack the local part, +cu128"
    assert shown[1] == "False"
    assert set(versions()) == {
        "bitledger",
        "cpu",
        "numpy",
        "platform",
        "python",
        "safetensors",
        "tokenizers",
        "torch",
        "transformers",
    }
