"""gate: a policy judged on exact bytes; every way in which a bound cannot hold, exit codes, texts, and what verify says."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.gates import Bound, Other, judge
from formats.integrity import Broken, verify_folder
from formats.manifest import Manifest, MeasurementRecord
from pipelines import gate
from pipelines.cli import run_app
from tests.artefact import edit
from tests.measured import INPUTS, SETTINGS, measured_artefact, measurement, with_measurements
from tests.test_verify import SECOND, flip

KL = '[[bound]]\nname = "kl"\npart = "language"\n'
RATIO = '[[bound]]\nname = "ln_perplexity_ratio"\n'


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gate") / "artefact"
    measured_artefact(path, ratio=0.25, kl=0.5)
    return path


@pytest.fixture
def folder(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "artefact"))


def policy(folder: Path, text: str) -> Path:
    path = folder.parent / "release.toml"
    path.write_text(text)
    return path


def run(folder: Path, text: str, *options: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        run_app(gate.app, [str(folder), "--policy", str(policy(folder, text)), *options])
    assert isinstance(stopped.value.code, int)
    return stopped.value.code


def with_one(folder: Path, changed: MeasurementRecord) -> None:
    """``changed`` in place of the measurement of its name and part."""
    others = [m for m in Manifest.load(folder).measurements if (m.name, m.part) != (changed.name, changed.part)]
    with_measurements(folder, [*others, changed])


def test_every_bound_holds_and_verify_says_which_hash_passed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = Manifest.load(folder)
    assert run(folder, f"{KL}at_most = 0.56\n{RATIO}at_most = 0.2601\n{RATIO}at_least = 0.2399\n") == 0
    after = Manifest.load(folder)
    assert after.model_copy(update={"gates": []}) == before
    (verdict,) = after.gates
    assert (verdict.policy, verdict.passed) == ("release", True)
    assert verdict.subject == {file.name: file.sha256 for file in before.files}
    assert [(b.name, b.judged, b.figure) for b in verdict.bounds] == [
        ("kl", "high", 0.55),
        ("ln_perplexity_ratio", "high", 0.26),
        ("ln_perplexity_ratio", "low", 0.24),
    ]
    hashes = [digest[:16] for digest in before.weights().values()]
    assert all(digest in capsys.readouterr().out for digest in hashes[:1])
    seen: list[tuple[str, str]] = []
    verify_folder(folder, report=lambda *line: seen.append(line))
    (said,) = [what for check, what in seen if check == "gates"]
    assert said.startswith("release passed on ")
    assert all(digest in said for digest in hashes)


def test_a_bound_that_fails_exits_1_and_names_figure_bound_and_interval(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, f"{RATIO}at_most = 0.255\n{KL}at_most = 0.56\n") == 1
    shown = capsys.readouterr()
    for text in ("ln_perplexity_ratio", "high end of the interval 0.26", "at most 0.255", "0.24 to 0.26 (95%, n = 8)"):
        assert text in shown.err, text
    assert "kl of part language" not in shown.err
    assert "release failed on" in shown.out
    (verdict,) = Manifest.load(folder).gates
    assert [bound.held for bound in verdict.bounds] == [False, True]
    assert not verdict.passed
    verify_folder(folder)


@pytest.mark.parametrize(
    ("bound", "held"),
    [
        ("at_most = 0.255", False),
        ("at_most = 0.26", True),
        ('at_most = 0.25\njudge = "value"', True),
        ('at_most = 0.24\njudge = "low"', True),
        ('at_most = 0.2399\njudge = "low"', False),
        ("at_least = 0.24", True),
        ("at_least = 0.245", False),
        ('at_least = 0.25\njudge = "value"', True),
        ('at_least = 0.26\njudge = "high"', True),
        ("at_most = 1.0\nminimum_n = 8", True),
        ("at_most = 1.0\nminimum_n = 9", False),
        ("at_most = 1.0\nlevel = 0.99", False),
        (f'at_most = 1.0\nwindows = "{"d" * 12}"', True),
        (f'at_most = 1.0\nwindows = "{"0" * 12}"', False),
    ],
)
def test_which_figure_is_judged(folder: Path, bound: str, held: bool) -> None:
    assert run(folder, RATIO + bound) == (0 if held else 1)


FLAG = "exactly zero in every window"
DOUBTS: dict[str, tuple[dict[str, Any], str]] = {
    "not finite": ({"value": None, "interval": None, "flag": "nan: 3 predictions"}, "is not finite (nan: 3 predictions)"),
    "flagged": ({"flag": FLAG}, f"is flagged: {FLAG}"),
    "no interval": ({"interval": None, "n": 1}, "has no interval (n = 1)"),
    "other weights": ({"subject": {SECOND: "0" * 64}}, f"was measured on another {SECOND} (SHA-256 {'0' * 16}"),
    "no weights": ({"subject": {}}, "was measured without model-0000"),
    "the source's": ({"subject": {"model.safetensors": "a" * 64}}, "was measured on another model.safetensors"),
}


@pytest.mark.parametrize("doubt", DOUBTS)
def test_a_doubtful_measurement_never_holds(folder: Path, doubt: str) -> None:
    manifest = Manifest.load(folder)
    changes, sentence = DOUBTS[doubt]
    with_one(folder, measurement(manifest.weights(), "kl", 0.0, 0.0, part="language", **changes))
    record = judge(Bound("kl", "language", at_most=1.0), Manifest.load(folder), folder)
    assert not record.held
    assert sentence in record.reason
    if doubt in ("not finite", "flagged", "no interval"):  # the others do not pass the checks of the ledger, either
        assert run(folder, f"{KL}at_most = 1.0") == 1


def test_a_flag_may_be_accepted_by_its_text(folder: Path) -> None:
    with_one(folder, measurement(Manifest.load(folder).weights(), "kl", 0.0, 0.0, part="language", flag=FLAG))
    assert run(folder, f'{KL}at_most = 1.0\naccepted_flag = "another"') == 1
    assert run(folder, f'{KL}at_most = 1.0\naccepted_flag = "exactly zero"') == 0


@pytest.mark.parametrize(
    ("part", "command"),
    [
        ("", "python -m pipelines.run"),
        ("deployment", "python -m pipelines.evaluate FOLDER --suite standard"),
        ("task-blimp", "python -m pipelines.evaluate FOLDER --tasks blimp"),
    ],
)
def test_a_missing_measurement_fails_with_the_command_that_makes_it(folder: Path, part: str, command: str) -> None:
    record = judge(Bound("accuracy", part, at_least=0.0), Manifest.load(folder), folder)
    assert not record.held
    assert record.figure is None
    assert "was not measured" in record.reason
    assert command.replace("FOLDER", str(folder)) in record.reason


def test_a_measurement_that_stands_twice_is_not_judged(folder: Path) -> None:
    manifest = Manifest.load(folder)
    better = measurement(manifest.weights(), "kl", 0.0, 0.0, part="language")
    with_measurements(folder, [better, *manifest.measurements])
    record = judge(Bound("kl", "language", at_most=1.0), Manifest.load(folder), folder)
    assert (record.held, record.figure) == (False, None)
    assert "2 times" in record.reason


def test_a_changed_byte_fails_naming_the_file_and_leaves_the_manifest(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, f"{KL}at_most = 0.56") == 0
    before = (folder / "manifest.json").read_bytes()
    flip(folder / SECOND, -5)
    capsys.readouterr()
    assert run(folder, f"{KL}at_most = 0.56", "--json") == 1
    shown = capsys.readouterr()
    assert SECOND in shown.err
    assert json.loads(shown.out)["broken"]["file"] == SECOND
    assert json.loads(shown.out)["passed"] is False
    assert (folder / "manifest.json").read_bytes() == before


def test_a_file_that_nobody_listed_fails(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "modeling_other.py").write_text("")
    assert run(folder, f"{KL}at_most = 0.56") == 1
    assert "modeling_other.py" in capsys.readouterr().err


def test_the_verdict_of_a_policy_replaces_its_own_and_no_other(folder: Path) -> None:
    assert run(folder, f'name = "one"\n{KL}at_most = 0.1') == 1
    assert run(folder, f'name = "two"\n{KL}at_most = 0.56') == 0
    assert run(folder, f'name = "one"\n{KL}at_most = 0.57') == 0
    assert [(verdict.policy, verdict.passed) for verdict in Manifest.load(folder).gates] == [("two", True), ("one", True)]
    verify_folder(folder)


def test_json_is_the_verdict(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, f"{KL}at_most = 0.1", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    (verdict,) = Manifest.load(folder).gates
    assert found == {"folder": str(folder), "weights": Manifest.load(folder).weights(), **verdict.model_dump(mode="json")}
    assert found["bounds"][0]["figure"] == 0.55


def _other_file(found: Any) -> None:
    found["gates"][0]["subject"][SECOND] = "0" * 64


def _fewer_files(found: Any) -> None:
    del found["gates"][0]["subject"]["config.json"]


def _passed(found: Any) -> None:
    found["gates"][0]["passed"] = True


def _held(found: Any) -> None:
    found["gates"][0]["bounds"][0]["held"] = found["gates"][0]["passed"] = True


def _figure(found: Any) -> None:
    bound = found["gates"][0]["bounds"][0]
    bound["held"] = found["gates"][0]["passed"] = True
    bound["figure"] = 0.05


def _figures(found: Any) -> None:
    _figure(found)
    found["gates"][0]["bounds"][0]["high"] = 0.05


def _no_bounds(found: Any) -> None:
    found["gates"][0].update(bounds=[], passed=True)


def _twice(found: Any) -> None:
    found["gates"].append(found["gates"][0])


TAMPERED = {
    _other_file: "judged other files",
    _fewer_files: "judged other files",
    _passed: "does not follow from its bounds",
    _held: "its own figures say otherwise",
    _figure: "its own figures say otherwise",
    _figures: "judged another kl of part language",
    _no_bounds: "does not follow from its bounds",
    _twice: "two verdicts",
}


@pytest.mark.parametrize("change", TAMPERED, ids=lambda change: change.__name__)
def test_verify_finds_a_verdict_that_is_not_on_these_files_and_figures(folder: Path, change: Any) -> None:
    assert run(folder, f"{KL}at_most = 0.1") == 1
    verify_folder(folder)
    edit(folder, "manifest.json", change)
    with pytest.raises(Broken, match=TAMPERED[change]) as broken:
        verify_folder(folder)
    assert broken.value.check == "gates"


def test_verify_finds_a_passed_gate_whose_figures_were_measured_anew(folder: Path) -> None:
    assert run(folder, f"{KL}at_most = 0.56") == 0
    with_one(folder, measurement(Manifest.load(folder).weights(), "kl", 0.9, part="language"))
    with pytest.raises(Broken, match="judged another kl of part language: judge again"):
        verify_folder(folder)
    assert run(folder, f"{KL}at_most = 0.56") == 1
    verify_folder(folder)


def _other(folder: Path, rate: float, half: float | None = 0.02, **changes: Any) -> Manifest:
    """Another artefact beside ``folder`` with a rate; ``folder`` gets 0.9."""
    manifest = Manifest.load(folder)
    with_measurements(
        folder, [*manifest.measurements, measurement(manifest.weights(), "json_valid", 0.9, 0.03, part="deployment")]
    )
    found = measured_artefact(folder.parent / "z", seed=1)
    rated = measurement(found.weights(), "json_valid", rate, half, part="deployment", **changes)
    return with_measurements(folder.parent / "z", [rated])


VALID = '[[bound]]\nname = "json_valid"\npart = "deployment"\nagainst = "z/manifest.json"\n'


@pytest.mark.parametrize(("at_least", "held"), [(-0.0701, True), (-0.0699, False)])
def test_not_worse_than_another_by_both_intervals(folder: Path, at_least: float, held: bool) -> None:
    """0.90 +- 0.03 against 0.92 +- 0.02 is -0.02 with at worst -0.07 (0.87 - 0.94)."""
    _other(folder, 0.92)
    assert run(folder, f"{VALID}at_least = {at_least}") == (0 if held else 1)
    (bound,) = Manifest.load(folder).gates[0].bounds
    assert bound.value == pytest.approx(-0.02)
    assert bound.low == pytest.approx(-0.07)
    assert bound.high == pytest.approx(0.03)
    assert bound.against_subject == Manifest.load(folder.parent / "z").weights()
    verify_folder(folder)


@given(*[st.floats(-1, 1) for _ in range(2)], *[st.floats(0.01, 1) for _ in range(2)], st.floats(-1, 1))
def test_the_interval_of_a_difference_is_wide_enough_at_any_correlation(
    a: float, b: float, sd_a: float, sd_b: float, correlation: float
) -> None:
    """Against the exact standard deviation of a difference of two normal estimates."""
    from eval.gates import _both
    from formats.records import IntervalRecord

    first, second = (
        IntervalRecord(low=m - 1.96 * sd, high=m + 1.96 * sd, level=0.95, method="normal") for m, sd in ((a, sd_a), (b, sd_b))
    )
    found = _both(first, second)
    exact = 1.96 * (sd_a**2 + sd_b**2 - 2 * correlation * sd_a * sd_b) ** 0.5
    assert found is not None
    assert found.low <= a - b - exact + 1e-9
    assert found.high >= a - b + exact - 1e-9


def test_a_stored_paired_difference_is_preferred(folder: Path) -> None:
    other = _other(folder, 0.92)
    manifest = Manifest.load(folder)
    inputs = INPUTS | {f"baseline {name}": digest for name, digest in other.weights().items()}
    paired = measurement(manifest.weights(), "json_valid_difference", -0.02, 0.01, part="deployment", inputs=inputs)
    with_measurements(folder, [*manifest.measurements, paired])
    assert run(folder, f"{VALID}at_least = -0.0301") == 0
    stranger = replace(Bound("json_valid", "deployment", at_least=-0.0301), against=Path("z"))
    elsewhere = other.model_copy(update={"files": [f.model_copy(update={"sha256": "0" * 64}) for f in other.files]})
    record = judge(stranger, Manifest.load(folder), folder, Other("z", elsewhere))
    assert not record.held, "a difference to other bytes than the other's is not the one asked for"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"inputs": INPUTS | {"windows": "0" * 64}}, "cannot be compared: windows dddddddddddd in"),
        ({"settings": SETTINGS | {"bos": "once"}}, "cannot be compared: bos none in"),
        ({"unit": "percent"}, "cannot be compared: unit 1 in"),
        ({"subject": {"x.safetensors": "0" * 64}}, "was measured on another x.safetensors"),
        ({"value": None, "interval": None, "flag": "nan: empty"}, "is not finite"),
        ({"interval": None}, "has no interval"),
    ],
)
def test_a_difference_to_a_figure_of_another_kind_never_holds(folder: Path, changes: Any, sentence: str) -> None:
    other = _other(folder, 0.5, **changes)
    bound = Bound("json_valid", "deployment", at_least=-1.0, against=Path("z/manifest.json"))
    record = judge(bound, Manifest.load(folder), folder, Other("z/manifest.json", other))
    assert not record.held
    assert sentence in record.reason
