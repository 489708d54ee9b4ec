"""Policies: what is refused before anything is judged, by the key that is wrong; the shipped ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.policy import Policy, find_policy, load_policy, policy_names
from quant.errors import UsageError
from tests.measured import measured_artefact
from tests.test_gate import KL, run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artefact that no test here changes."""
    path = tmp_path_factory.mktemp("policy") / "artefact"
    measured_artefact(path, kl=0.5)
    return path


REFUSED = {
    "": "bound: field required",
    "[[bound]]\nname = 3\nat_most = 1.0": "bound.1.name: input should be a valid string",
    "[[bound]]\nat_most = 1.0": "bound.1.name: field required",
    f"{KL}at_most = 1.0\n{KL}at_mots = 1.0": "bound.2.at_mots: no such key (known: name, part, at_most",
    f"{KL}at_most = 1.0\nat_least = 0.0": "bound.1: needs exactly one of at_most and at_least",
    KL: "bound.1: needs exactly one of at_most and at_least",
    f"{KL}at_most = nan": "bound.1.at_most: input should be a finite number",
    f"{KL}at_most = '1'": "bound.1.at_most: input should be a valid number",
    f"{KL}at_most = 1.0\njudge = 'middle'": "bound.1.judge",
    f"{KL}at_most = 1.0\nwindows = 'all'": "bound.1.windows",
    f"version = 2\n{KL}at_most = 1.0": "version: no such key (known: name, bound)",
    f"{KL}at_most = 1.0\n{KL}at_most = 1.0": "the same bound on kl of part language stands there twice",
    "[[bound": "is not TOML",
    f"{KL}at_most = 1.0\nagainst = 'nowhere/manifest.json'": "the policy compares kl of part language with",
    f"{KL}at_most = 1.0\nagainst = 'artefact/manifest.json'": "that is the artefact itself",
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_policy_that_makes_no_sense_exits_2_and_names_the_key(
    folder: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (folder / "manifest.json").read_bytes()
    assert run(folder, text) == 2
    assert REFUSED[text] in capsys.readouterr().err
    assert (folder / "manifest.json").read_bytes() == before


def test_bad_names_exit_2(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder.parent / "nowhere", f"{KL}at_most = 1.0") == 2
    assert "no such folder" in capsys.readouterr().err
    (folder.parent / "empty").mkdir()
    assert run(folder.parent / "empty", f"{KL}at_most = 1.0") == 2
    assert "is no finished artefact" in capsys.readouterr().err
    with pytest.raises(UsageError, match="did you mean 'usable'"):
        find_policy("useable")
    with pytest.raises(UsageError, match="cannot read the policy"):
        load_policy(folder / "none.toml")


def test_shipped_policies_load_and_judge_what_every_run_measures() -> None:
    assert policy_names() == ("near-lossless", "usable")
    for name in policy_names():
        found = load_policy(find_policy(name))
        assert isinstance(found, Policy)
        assert {(bound.name, bound.part) for bound in found.bounds} == {("ln_perplexity_ratio", "")}
