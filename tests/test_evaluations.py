"""Parts of an evaluation in the manifest: appended, replaced, verified, and refused when they are of other files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from eval.measurement import Measurement
from eval.result import PartResult
from formats.differences import diff
from formats.integrity import Broken, verify_folder
from formats.manifest import Manifest
from pipelines.evaluations import append
from quant.errors import UsageError, VerifyError
from tests.artefact import build_artefact


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build_artefact(tmp_path / "artefact")
    return tmp_path / "artefact"


def part(folder: Path, value: float = 0.25, name: str = "lm") -> PartResult:
    subject = Manifest.load(folder).weights()
    found = Measurement("kl", value, "nats/token", 3, subject=subject, inputs={"windows": "00"})
    return PartResult(name, (found,), pd.DataFrame({"window": [0, 1, 2], "nats": [value, 0.0, 0.0]}), subject, 1.0)


def values(manifest: Manifest) -> list[tuple[str, float | None]]:
    return [(found.part, found.value) for found in manifest.measurements if found.part]


def test_a_part_is_appended_and_the_artefact_still_verifies(folder: Path) -> None:
    before = Manifest.load(folder)
    after = append(folder, [part(folder), part(folder, 0.5, "tasks")])
    assert values(after) == [("lm", 0.25), ("tasks", 0.5)]
    assert Manifest.load(folder) == after
    verify_folder(folder)
    for record in after.evaluations:
        assert record.rows is not None
        assert len(pd.read_parquet(folder / record.rows)) == 3
    assert {d.where.split("[")[0] for d in diff(before, after)} == {"files", "measurements", "evaluations"}


def test_measured_again_a_part_replaces_itself_rows_and_all(folder: Path) -> None:
    append(folder, [part(folder), part(folder, 0.5, "tasks")])
    after = append(folder, [part(folder, 0.125)])
    assert values(after) == [("tasks", 0.5), ("lm", 0.125)]
    assert len(list((folder / "evaluations").iterdir())) == 2
    verify_folder(folder)
    again = append(folder, [part(folder, 0.125)])
    assert diff(after, again) == ()


def test_rows_of_a_killed_evaluation_go_with_the_next(folder: Path) -> None:
    append(folder, [part(folder)])
    (folder / "evaluations" / "lm.000000000000.parquet").write_bytes(b"")
    with pytest.raises(Broken, match="not in the manifest"):
        verify_folder(folder)
    append(folder, [part(folder, 0.5, "tasks")])
    verify_folder(folder)


@pytest.mark.parametrize("name", ["", "../out", "a/b", ".hidden", "a b"])
def test_a_name_that_is_no_file_name_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot name a part"):
        append(folder, [part(folder, name=name)])
    with pytest.raises(UsageError, match="each part once"):
        append(folder, [part(folder), part(folder)])


def test_a_measurement_of_other_weights_is_refused_and_nothing_is_written(folder: Path) -> None:
    before = (folder / "manifest.json").read_bytes()
    other = replace(part(folder), subject={"model.safetensors": "0" * 64})
    with pytest.raises(VerifyError, match="other weight files"):
        append(folder, [other])
    assert (folder / "manifest.json").read_bytes() == before
    assert not (folder / "evaluations").exists()
