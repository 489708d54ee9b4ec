"""compare: cells are the manifests' figures, refusals name what differs in which artefact, missing figures leave empty cells."""

from __future__ import annotations

import csv
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval.comparison import Comparison, Entry, compare, labels
from formats.atomic import hash_file
from formats.integrity import verify_folder
from formats.manifest import HashedFile, Manifest
from pipelines.cli import run_app
from pipelines.compare import app
from quant.errors import UsageError, VerifyError
from tests.measured import INPUTS, SETTINGS, measured_artefact, measurement, of_run, with_measurements
from tests.test_verify import SECOND, flip

FIGURES = {"a": (0.25, 0.5), "b": (0.125, 0.25), "c": (0.5, 0.75)}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three artefacts with a run's measurements, a divergence, and a task."""
    base = tmp_path_factory.mktemp("compare")
    for seed, (name, (ratio, kl)) in enumerate(FIGURES.items()):
        manifest = measured_artefact(base / name, seed=seed, ratio=ratio, kl=kl)
        weights = manifest.weights()
        more = [
            measurement(weights, "accuracy", 0.5 + seed / 8, 0.05, part="task-blimp"),
            measurement(weights, "accuracy_reference", 0.9, 0.05, part="task-blimp"),
            measurement(weights, "json_valid", 0.75, None, part="deployment"),
        ]
        with_measurements(base / name, [*manifest.measurements, *more])
    return base


@pytest.fixture
def folders(built: Path, tmp_path: Path) -> list[Path]:
    return [Path(shutil.copytree(built / name, tmp_path / name)) for name in FIGURES]


def entries(folders: list[Path]) -> list[Entry]:
    return [Entry(folder.name, str(folder / "manifest.json"), Manifest.load(folder), "0" * 64) for folder in folders]


def run(*args: object) -> int:
    with pytest.raises(SystemExit) as stopped:
        run_app(app, [str(arg) for arg in args])
    assert isinstance(stopped.value.code, int)
    return stopped.value.code


def changed(folder: Path, change: Callable[[dict[str, Any]], None], part: str = "", name: str | None = None) -> None:
    """Let ``change`` edit the fields of the measurements of one part (or of one of them)."""
    manifest = Manifest.load(folder)
    found = []
    for old in manifest.measurements:
        fields = old.model_dump()
        if old.part == part and name in (None, old.name):
            change(fields)
        found.append(type(old).model_validate(fields))
    with_measurements(folder, found)


# ---- cells


def looked_up(manifest: Manifest, source: str) -> tuple[float | None, float | None, float | None]:
    """What a cell's ``source`` says, read from the manifest by other means."""
    measured = re.fullmatch(r"measurements\[part=(.+),name=(.+)\]", source)
    if measured:
        part = "" if measured[1] == "run" else measured[1]
        (found,) = [m for m in manifest.measurements if (m.part, m.name) == (part, measured[2])]
        interval = found.interval
        return found.value, interval.low if interval else None, interval.high if interval else None
    if source == "sum of ledger[*].total_bytes":
        return float(sum(file.nbytes for file in manifest.files if file.role == "weights")), None, None
    if source.startswith("sum of run.seconds"):
        return sum(manifest.run.seconds.values()), None, None
    assert source.startswith("bits_per_weight.")
    return getattr(manifest.bits_per_weight, source.removeprefix("bits_per_weight.")), None, None


def test_every_cell_is_what_its_source_says(folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert run(*folders, "--output", out) == 0
    printed = capsys.readouterr().out
    with (out / "comparison-cells.csv").open() as file:
        cells = list(csv.DictReader(file))
    with (out / "comparison.csv").open() as file:
        table = {line["artefact"]: line for line in csv.DictReader(file)}
    columns = {cell["column"] for cell in cells}
    assert columns >= {
        "bits_linears", "bits_file", "size_bytes", "perplexity_float", "perplexity", "ln_perplexity_ratio", "kl",
        "task-blimp/accuracy", "deployment/json_valid", "seconds_run",
    }  # fmt: skip
    assert "task-blimp/accuracy_reference" not in columns, "a figure of the float model is none of the artefact"
    assert len(cells) == len(columns) * 3
    for cell in cells:
        path = Path(cell["manifest"])
        assert path == next(folder for folder in folders if folder.name == cell["artefact"]) / "manifest.json"
        assert hash_file(path)[1] == cell["manifest_sha256"] == table[cell["artefact"]]["manifest_sha256"]
        expected = looked_up(Manifest.load(path), cell["source"])
        assert tuple(float(cell[key]) if cell[key] else None for key in ("value", "low", "high")) == expected
        line = table[cell["artefact"]]
        for key, end in ((cell["column"], "value"), (f"{cell['column']}_low", "low"), (f"{cell['column']}_high", "high")):
            assert line.get(key, "") == cell[end]
    text = (out / "comparison.md").read_text()
    for folder in folders:
        ratio, kl = FIGURES[folder.name]
        for shown in (f"{ratio:.5f} [{ratio - 0.01:.5f}, {ratio + 0.01:.5f}]", f"{kl:.5f} ["):
            assert shown in text
            assert shown in printed
        assert hash_file(folder / "manifest.json")[1] in text
    assert "windows dddddddddddd" in text
    assert "window_tokens 512" in text


def test_json_holds_the_same_cells(folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*folders, "--output", tmp_path / "out", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    expected = compare(entries(folders))
    for artefact, cells in zip(found["artefacts"], expected.cells, strict=True):
        assert {key: cell["value"] for key, cell in artefact["cells"].items()} == {key: c.value for key, c in cells.items()}
    assert [artefact["artefact"] for artefact in found["artefacts"] if artefact["on_front"]] == ["b"], "all have the same bits"
    assert [column["key"] for column in found["columns"]] == [column.key for column in expected.columns]


def test_the_same_artefacts_give_the_same_bytes_in_every_file(folders: list[Path], tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert run(*folders, "--output", first) == run(*folders, "--output", second) == 0
    names = sorted(path.name for path in first.iterdir())
    assert names == [f"comparison{end}" for end in ("-cells.csv", ".csv", ".md", ".png", ".svg")]
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    for folder in folders:
        verify_folder(folder)


def test_an_evaluation_that_all_have_is_preferred_to_the_run(folders: list[Path]) -> None:
    for folder in folders:
        manifest = Manifest.load(folder)
        language = of_run(manifest.weights(), 0.375)
        language[0] = language[0].model_copy(update={"name": "perplexity_reference"})
        with_measurements(folder, [*manifest.measurements, *(m.model_copy(update={"part": "language"}) for m in language)])
    found = compare(entries(folders))
    assert found.values("ln_perplexity_ratio") == [0.375] * 3
    assert found.cells[0]["perplexity_float"].source == "measurements[part=language,name=perplexity_reference]"
    manifest = Manifest.load(folders[0])
    with_measurements(folders[0], [m for m in manifest.measurements if m.part != "language"])
    found = compare(entries(folders))
    assert found.values("ln_perplexity_ratio") == [0.25, 0.125, 0.5], "one has the run's own only: so all show it"


# ---- what is missing


def noted(found: Comparison, label: str) -> list[str]:
    return [note for note in found.notes if note.startswith(f"{label}: ")]


def test_a_missing_measurement_is_an_empty_cell_with_the_command(folders: list[Path], tmp_path: Path) -> None:
    manifest = Manifest.load(folders[1])
    with_measurements(folders[1], [m for m in manifest.measurements if m.name != "kl"])
    found = compare(entries(folders))
    assert found.values("kl") == [0.5, None, 0.75]
    (note,) = noted(found, "b")
    assert note == f"b: KL(float || artefact): not measured (python -m pipelines.evaluate {folders[1]} --suite standard)"
    assert run(*folders, "--output", tmp_path / "out") == 0
    with (tmp_path / "out" / "comparison.csv").open() as file:
        assert [line["kl"] for line in csv.DictReader(file)] == ["0.5", "", "0.75"]
    assert run(*folders, "--output", tmp_path / "out", "--y", "kl") == 0
    assert "not in the picture, for want of a finite figure: b" in _figure_texts(found, "kl")


def _figure_texts(found: Comparison, y: str) -> list[str]:
    from eval.comparison_plot import comparison_figure

    return [text.get_text() for text in comparison_figure(found, "bits_linears", y).texts]


def test_a_figure_that_is_not_finite_is_an_empty_cell_with_its_reason(folders: list[Path], tmp_path: Path) -> None:
    def spoil(fields: dict[str, Any]) -> None:
        fields.update(value=None, interval=None, flag="inf: 12 predictions have no finite loss")

    changed(folders[2], spoil, name="perplexity")
    found = compare(entries(folders))
    assert found.cells[2]["perplexity"].value is None
    assert noted(found, "c") == ["c: perplexity: not finite (inf: 12 predictions have no finite loss)"]
    assert run(*folders, "--output", tmp_path / "out", "--y", "perplexity") == 0
    assert "not in the picture, for want of a finite figure: c" in _figure_texts(found, "perplexity")


def test_artefacts_without_any_measurement_still_have_bits_and_bytes(folders: list[Path], tmp_path: Path) -> None:
    for folder in folders:
        with_measurements(folder, [])
    found = compare(entries(folders))
    assert [column.key for column in found.columns] == [
        "bits_linears",
        "bits_file",
        "size_bytes",
        "seconds_making",
        "seconds_run",
    ]
    assert run(*folders, "--output", tmp_path / "out") == 0
    assert run(*folders, "--output", tmp_path / "out", "--y", "kl") == 2


def test_one_artefact_alone_can_be_shown(folders: list[Path], tmp_path: Path) -> None:
    assert run(folders[0], "--output", tmp_path / "out") == 0


# ---- the same matrices in every artefact


def test_bits_of_linears_count_what_others_quantise(folders: list[Path]) -> None:
    """Where b keeps one matrix in float, its 32 bits count; the plain figure would call b the smaller one."""
    two = entries(folders[:2])
    name = "model.layers.0.mlp.up_proj.weight"
    kept = []
    for record in two[1].manifest.tensors:
        if record.name == name:
            part = record.parts[0].model_copy(update={"role": "kept", "nbytes": 4 * record.elements, "dtype": "F32"})
            plain = {
                "fate": "kept",
                "parts": [part],
                "nbytes": part.nbytes,
                "scheme": None,
                "codec": None,
                "bits_per_weight": None,
            }
            record = record.model_copy(update=plain)
        kept.append(record)
    mixed = Entry("b", two[1].path, two[1].manifest.model_copy(update={"tensors": kept}), two[1].sha256)
    found = compare([two[0], mixed])
    records = {record.name: record for record in two[0].manifest.tensors if record.fate == "quantised"}
    elements = sum(record.elements for record in records.values())
    bits = sum((32 if record.name == name else record.bits_per_weight or 0) * record.elements for record in records.values())
    assert found.values("bits_linears") == [two[0].manifest.bits_per_weight.quantised, pytest.approx(bits / elements)]
    assert "1 of the 4 matrices that others quantise are in float here" in noted(found, "b")[0]


# ---- refusals

REFUSED: dict[str, tuple[Callable[[dict[str, Any]], None], str, str]] = {
    "windows": (lambda m: m["inputs"].update(windows="1" * 64), "", "windows dddddddddddd in a, 111111111111 in b"),
    "tokenizer": (lambda m: m["inputs"].update(tokenizer="2" * 64), "", "tokenizer eeeeeeeeeeee in a, 222222222222 in b"),
    "corpus": (lambda m: m["inputs"].update(corpus="3" * 64), "", "corpus cccccccccccc in a, 333333333333 in b"),
    "start token": (lambda m: m["settings"].update(bos="each"), "", "bos none in a, each in b"),
    "window length": (lambda m: m["settings"].update(window_tokens="2048"), "", "window_tokens 512 in a, 2048 in b"),
    "a convention that one does not state": (lambda m: m["settings"].pop("bos"), "", "bos none in a, - in b"),
    "items": (lambda m: m.update(n=4), "task-blimp", "task-blimp: accuracy: n 8 in a, 4 in b"),
    "unit": (lambda m: m.update(unit="percent"), "deployment", "unit 1 in a, percent in b"),
    "baseline": (
        lambda m: m["inputs"].update({"baseline model.safetensors": "4" * 64}),
        "language",
        "baseline model.safetensors aaaaaaaaaaaa in a, 444444444444 in b",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_figures_measured_differently_are_refused(
    what: str, folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, part, sentence = REFUSED[what]
    changed(folders[1], change, part)
    assert run(*folders, "--output", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert "python -m pipelines.evaluate" in error
    assert not (tmp_path / "out").exists()
    assert run(folders[0], folders[2], "--output", tmp_path / "out") == 0


def test_settings_that_describe_a_result_do_not_count(folders: list[Path]) -> None:
    changed(folders[1], lambda m: m["settings"].update(mean_nats_per_token="3.25"))
    compare(entries(folders))


def test_an_artefact_of_another_model_is_refused(folders: list[Path]) -> None:
    a, b, _ = entries(folders)
    source = b.manifest.source.model_copy(
        update={"requested": "other", "files": [HashedFile(name="model.safetensors", sha256="9" * 64)]}
    )
    other = Entry("b", b.path, b.manifest.model_copy(update={"source": source}), b.sha256)
    with pytest.raises(UsageError, match=r"b was made from other weights \(other\) than a \(tiny\)"):
        compare([a, other])


def test_a_reference_of_other_bytes_is_refused(folders: list[Path]) -> None:
    changed(folders[1], lambda m: m.update(subject={"model.safetensors": "8" * 64}), name="perplexity_float")
    with pytest.raises(
        UsageError, match=r"perplexity, float: baseline model.safetensors aaaaaaaaaaaa in a, .* 888888888888 in b"
    ):
        compare(entries(folders))


def test_a_figure_of_other_files_is_refused(folders: list[Path]) -> None:
    changed(folders[1], lambda m: m.update(subject={SECOND: "7" * 64}), name="kl", part="language")
    with pytest.raises(VerifyError, match=rf"{folders[1]}.*kl was measured on another {SECOND}"):
        compare(entries(folders))


def test_a_measurement_that_stands_twice_is_refused(folders: list[Path]) -> None:
    manifest = Manifest.load(folders[1])
    with_measurements(folders[1], [*manifest.measurements, manifest.measurements[-1]])
    with pytest.raises(VerifyError, match="stands there 2 times"):
        compare(entries(folders))


# ---- files and names


def test_files_that_are_not_those_of_the_manifest_are_refused(
    folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    flip(folders[0] / SECOND, -5)
    assert run(*folders, "--output", out) == 0, "sizes only are compared by default"
    assert run(*folders, "--output", out, "--verify") == 1
    assert f"{folders[0]} is not what its manifest says: hashes: {SECOND}" in capsys.readouterr().err
    with (folders[1] / SECOND).open("ab") as file:
        file.write(b"x")
    assert run(*folders, "--output", out) == 1
    assert f"{folders[1]} is not what its manifest says: files: {SECOND}" in capsys.readouterr().err


def test_names_that_make_no_sense_exit_2(folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, sentence in (
        ((tmp_path / "nowhere",), "no such folder"),
        ((tmp_path,), "is no finished artefact"),
        ((folders[0], folders[0]), "is given twice"),
        ((folders[0], "--output", folders[0] / "out"), "lies in the artefact"),
        ((folders[0], "--output", tmp_path / "out", "--y", "accuracy"), "--y"),
        ((folders[0], "--output", folders[0] / "config.json" / "x"), "lies in the artefact"),
    ):
        assert run(*arguments) == 2
        assert sentence in capsys.readouterr().err


def test_an_output_that_cannot_be_made_is_named(folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert run(folders[0], "--output", tmp_path / "file" / "out") == 2
    assert "cannot make the folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["x/a", "x/b"], ["a", "b"]),
        (["x/a", "y/a", "b"], ["x/a", "y/a", "b"]),
        (["1/x/a", "2/x/a", "y/a"], ["1/x/a", "2/x/a", "y/a"]),
        (["a|b", "c"], ["a|b", "c"]),
    ],
)
def test_same_names_are_told_apart(paths: list[str], expected: list[str], tmp_path: Path) -> None:
    assert labels([tmp_path / path for path in paths]) == expected
    assert len(set(expected)) == len(expected)


def test_a_bar_in_a_name_does_not_break_the_table(folders: list[Path], tmp_path: Path) -> None:
    odd = folders[0].rename(tmp_path / "a|b, $x_{$")
    assert run(odd, folders[1], "--output", tmp_path / "out") == 0
    lines = (tmp_path / "out" / "comparison.md").read_text().splitlines()
    table = [line for line in lines[2:6] if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1
    with (tmp_path / "out" / "comparison.csv").open() as file:
        assert [line["artefact"] for line in csv.DictReader(file)] == ["a|b, $x_{$", "b"]


def test_inputs_and_settings_of_these_tests_are_those_that_are_compared() -> None:
    assert {"windows", "tokenizer", "corpus"} == set(INPUTS)
    assert {"bos", "window_tokens"} <= set(SETTINGS)
