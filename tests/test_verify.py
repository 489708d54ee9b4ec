"""verify: damage of any file is named with file, expected and actual; the command's exit codes and output."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from formats.integrity import Broken, verify_folder
from formats.manifest import Manifest
from pipelines import verify
from pipelines.cli import run_app
from tests.artefact import build_artefact, edit

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
CHECKS = ["manifest", "files", "unlisted", "hashes", "headers", "ledger", "config", "codecs"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("verify") / "artefact"
    build_artefact(path)
    return path


@pytest.fixture
def folder(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "artefact"))


def broken(folder: Path) -> Broken:
    with pytest.raises(Broken) as found:
        verify_folder(folder)
    return found.value


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        run_app(verify.app, args)
    assert isinstance(stopped.value.code, int)
    return stopped.value.code


def test_a_whole_artefact_passes_every_check_in_order(folder: Path) -> None:
    seen: list[tuple[str, str]] = []
    hashed: list[tuple[int, int]] = []
    manifest = verify_folder(folder, report=lambda *line: seen.append(line), progress=lambda *count: hashed.append(count))
    assert manifest == Manifest.load(folder)
    assert [check for check, _ in seen] == CHECKS
    assert dict(seen)["codecs"].startswith("pack-quantized int4-sym-g32-f16; pack-quantized int3-zp-channel-f16")
    total = sum(file.nbytes for file in manifest.files)
    assert hashed[-1] == (total, total)
    assert len(hashed) == len(manifest.files)


def test_hidden_names_do_not_count_as_files(folder: Path) -> None:
    (folder / ".cache").mkdir()
    (folder / ".cache" / "download.lock").write_text("")
    (folder / ".gitattributes").write_text("")
    verify_folder(folder)


def test_every_single_changed_byte_is_found(folder: Path) -> None:
    """300 random positions over all files but the manifest; each is restored before the next."""
    source = random.Random(3)
    names = [file.name for file in Manifest.load(folder).files]
    for _ in range(300):
        path = folder / source.choice(names)
        position = source.randrange(path.stat().st_size)
        flip(path, position)
        found = broken(folder)
        assert (found.check, found.file) == ("hashes", path.relative_to(folder).as_posix())
        assert len(found.expected or "") == len(found.actual or "") == 64
        flip(path, position)
    verify_folder(folder)


def resize(path: Path, change: int) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:change] if change < 0 else data + b"\0" * change)


@pytest.mark.parametrize("name", [FIRST, SECOND, "tokenizer.json", "assets/notes.txt"])
@pytest.mark.parametrize("change", [-1, 8])
def test_a_file_of_another_size_is_named_with_both_sizes(folder: Path, name: str, change: int) -> None:
    size = (folder / name).stat().st_size
    resize(folder / name, change)
    found = broken(folder)
    assert (found.check, found.file, found.expected, found.actual) == ("files", name, str(size), str(size + change))


@pytest.mark.parametrize(
    ("damage", "check", "file"),
    [
        (lambda f: (f / "manifest.json").unlink(), "manifest", "manifest.json"),
        (lambda f: (f / "manifest.json").write_text("{}"), "manifest", "manifest.json"),
        (lambda f: (f / SECOND).unlink(), "files", SECOND),
        (lambda f: (f / "tokenizer.json").unlink() or (f / "tokenizer.json").mkdir(), "files", "tokenizer.json"),
        (lambda f: (f / "model-00003.safetensors").write_bytes(b"x"), "unlisted", "model-00003.safetensors"),
        (lambda f: (f / "assets" / "more.txt").write_text("x"), "unlisted", "assets/more.txt"),
        (lambda f: (f / "linked").symlink_to("/tmp"), "unlisted", "linked"),
    ],
)
def test_what_is_missing_or_added_is_named(folder: Path, damage: Callable[[Path], Any], check: str, file: str) -> None:
    damage(folder)
    found = broken(folder)
    assert (found.check, found.file) == (check, file)
    assert found.actual == ("no such file" if check == "files" else None)
    assert "\n" not in str(found)


def test_a_link_out_of_the_folder_is_not_followed(folder: Path, tmp_path: Path) -> None:
    shutil.move(folder / "tokenizer.json", tmp_path / "elsewhere.json")
    (folder / "tokenizer.json").symlink_to(tmp_path / "elsewhere.json")
    found = broken(folder)
    assert (found.check, found.file) == ("files", "tokenizer.json")
    assert "link out of" in found.text


def test_command_says_ok_or_the_first_broken_thing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(folder)) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in shown[:-1]] == CHECKS
    assert shown[-1] == f"{folder} is what its manifest says"
    flip(folder / SECOND, 3000)
    assert run(str(folder)) == 1
    out, err = capsys.readouterr()
    assert [line.split()[1] for line in out.splitlines()] == ["manifest", "files", "unlisted"]
    assert err.splitlines()[-1].startswith(f"error: hashes: {SECOND}: SHA-256: expected ")


def test_json_holds_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(folder), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["verified"], found["broken"], len(found["checks"])) == (True, None, len(CHECKS))
    size = (folder / SECOND).stat().st_size
    (folder / SECOND).unlink()
    assert run(str(folder), "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["verified"] is False
    place = {"check": "files", "file": SECOND, "tensor": None}
    assert found["broken"] == place | {"text": "size in bytes", "expected": str(size), "actual": "no such file"}


def test_against_shows_what_differs_and_ignores_the_run(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    edit(other, "manifest.json", lambda d: d["run"].update(started_utc="2030-01-01T00:00:00Z"))
    assert run(str(folder), "--against", str(other / "manifest.json")) == 0
    assert "no difference but the run itself" in capsys.readouterr().out

    again = build_artefact(tmp_path / "again", seed=1)
    assert run(str(folder), "--against", str(tmp_path / "again")) == 1
    out, err = capsys.readouterr()
    differs = [line.split()[1] for line in out.splitlines() if line.startswith("differs")]
    assert f"files[{FIRST}].sha256:" in differs
    assert f"measurements[perplexity].subject.{FIRST}:" in differs
    assert not [place for place in differs if place.startswith(("tensors", "ledger", "run"))]
    assert f"differ in {len(differs)} places" in err

    assert run(str(folder), "--against", str(tmp_path / "again"), "--json") == 1
    listed = {d["where"]: d for d in json.loads(capsys.readouterr().out)["differences"]}
    assert listed[f"files[{FIRST}].sha256"]["right"] == json.dumps(again.files[0].sha256)


def test_wrong_arguments_are_usage_errors(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(tmp_path / "nowhere")) == 2
    assert "no such folder" in capsys.readouterr().err
    assert run(str(folder / "config.json")) == 2
    assert run(str(folder), "--against", str(tmp_path / "nowhere.json")) == 2
    assert "no such manifest to compare with" in capsys.readouterr().err


def test_a_broken_hash_is_found_before_torch_is_imported(folder: Path) -> None:
    flip(folder / FIRST, 5000)
    code = (
        "import sys; from pathlib import Path; import pipelines.verify; from formats.integrity import Broken, verify_folder\n"
        f"try: verify_folder(Path({str(folder)!r}))\n"
        "except Broken as broken: print(broken.check, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.split() == ["hashes", "False", "False"]
