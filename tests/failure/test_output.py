"""Output folders that must not or cannot be written: refused at once, with the path, and nothing is touched (R35, R98)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from formats.output import OutputFolder, check_output
from quant.errors import OutputError
from tests.failure.damage import with_mount, write_folder
from tests.failure.test_links import hub_cache

OURS = json.dumps({"format": "bitledger-manifest/1"})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "models" / "source")


def refusal(output: Path, source: Path | None, needed: int = 0, force: bool = False) -> str:
    def state() -> list[tuple[str, int]]:
        root = source.parent if source else output.parent
        return sorted((str(p), p.lstat().st_mtime_ns) for p in root.rglob("*"))

    before = state()
    with pytest.raises(OutputError) as caught:
        check_output(output, source, needed, force)
    assert state() == before, "a check writes nothing"
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("force", [False, True])
def test_r35_the_source_what_is_in_it_and_what_holds_it(source: Path, tmp_path: Path, force: bool) -> None:
    assert "is the source folder itself" in refusal(source, source, force=force)
    assert "lies inside the source folder" in refusal(source / "out", source, force=force)
    assert "lies inside the source folder" in refusal(source / "a" / "b" / "out", source, force=force)
    assert "is above the source folder" in refusal(source.parent, source, force=force)
    assert "is above the source folder" in refusal(tmp_path, source, force=force)
    check_output(source.parent / "out", source, 0, force)
    check_output(source.parent / "source2", source, 0, force)


def test_r35_through_links_dots_and_the_working_folder(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = tmp_path / "link"
    link.symlink_to(source)
    up = tmp_path / "up"
    up.symlink_to(source.parent)
    assert "is the source folder itself" in refusal(link, source)
    assert "is the source folder itself" in refusal(source, link)
    assert "is the source folder itself" in refusal(up / "source", source)
    assert "lies inside the source folder" in refusal(link / "out", source)
    assert "is above the source folder" in refusal(up, link)
    assert "is the source folder itself" in refusal(source / ".." / "source", source)
    monkeypatch.chdir(source.parent)
    assert "is the source folder itself" in refusal(Path("source"), source)
    assert "is above the source folder" in refusal(Path(), Path("source"))


def test_r35_the_blobs_that_a_cached_source_links_to(tmp_path: Path) -> None:
    snapshot, blobs = hub_cache(tmp_path)
    assert "inside the source folder" in refusal(blobs / "out", snapshot)
    assert "above the source folder" in refusal(tmp_path, snapshot)


def test_a_folder_with_content_needs_force_and_a_manifest_of_ours(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    check_output(output, source, 0, force=False)
    (output / "thesis.txt").write_text("the only copy")
    assert "is not empty (1 entries, the first is 'thesis.txt')" in refusal(output, source)
    for text in (None, "", "[]", "{}", '{"format": "other/1"}', '{"format": null}'):
        if text is not None:
            (output / "manifest.json").write_text(text)
        assert "does not remove other people's files" in refusal(output, source, force=True)
    (output / "manifest.json").write_text(OURS)
    assert "--force" in refusal(output, source)
    assert "holds thesis.txt, which its manifest does not list" in refusal(output, source, force=True)
    (output / "thesis.txt").rename(tmp_path / "thesis.txt")
    check_output(output, source, 0, force=True)


def test_r98_files_read_only_places_and_impossible_names(source: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    assert "is a file" in refusal(file, source)
    assert f"{file} is a file" in refusal(file / "out", source)
    assert f"{file} is a file" in refusal(file / "a" / "out", source)
    assert "cannot be an output folder" in refusal(tmp_path / ("x" * 300), source)
    assert "cannot be an output folder" in refusal(tmp_path / "a\0b", source)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert "cannot be an output folder" in refusal(tmp_path / "loop" / "out", source)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_parent_without_write_permission(source: Path, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    assert "is read-only" in refusal(locked / "out", source)


CHECK = """
import sys
from pathlib import Path
from formats.output import check_output
from quant.errors import OutputError
source, *outputs = sys.argv[1:]
for path in outputs:
    try:
        check_output(Path(path), Path(source), 0, False)
        print("accepted")
    except OutputError as error:
        print(error)
"""


def test_r35_the_source_mounted_at_another_place(source: Path, tmp_path: Path) -> None:
    place = tmp_path / "mounted"
    command = [sys.executable, "-c", CHECK, str(source), str(place / "source"), str(place / "source" / "out"), str(place)]
    itself, inside, above = with_mount(place, ["--bind", str(source.parent)], command).splitlines()
    assert "is the source folder itself" in itself
    assert "lies inside the source folder" in inside
    assert "is above the source folder" in above


def test_a_read_only_file_system_and_a_mount_point(source: Path, tmp_path: Path) -> None:
    place = tmp_path / "mounted"
    command = [sys.executable, "-c", CHECK, str(source), str(place / "out"), str(place)]
    inside, itself = with_mount(place, ["-t", "tmpfs", "-o", "ro,size=64k", "tmpfs"], command).splitlines()
    assert "is read-only" in inside
    assert "is a mount point" in itself


def test_no_space_names_what_is_needed_and_what_is_free(source: Path, tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    message = refusal(tmp_path / "new" / "out", source, needed=free + 50_000_000_000)
    assert "needs" in message
    assert message.count(" GB") == 2
    check_output(tmp_path / "new" / "out", source, free // 2, force=False)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_success_puts_the_whole_folder_in_place_and_makes_parents(tmp_path: Path) -> None:
    output = tmp_path / "a" / "b" / "out"
    with OutputFolder(output) as folder:
        (folder / "x").write_text("1")
        assert not output.exists()
        assert folder.parent == output.parent
    assert (output / "x").read_text() == "1"
    assert names(output.parent) == {"out"}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_failure_leaves_nothing_not_even_new_parents(tmp_path: Path, error: type[BaseException]) -> None:
    def run() -> None:
        with OutputFolder(tmp_path / "a" / "b" / "out") as folder:
            (folder / "x").write_text("1")
            raise error

    with pytest.raises(error):
        run()
    assert names(tmp_path) == set()


def test_failure_keeps_the_old_folder_and_success_replaces_it(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "manifest.json").write_text(OURS)

    def run(fail: bool) -> None:
        with OutputFolder(output, force=True) as folder:
            (folder / "new").write_text("1")
            if fail:
                raise RuntimeError

    with pytest.raises(RuntimeError):
        run(fail=True)
    assert names(output) == {"manifest.json"}
    run(fail=False)
    assert names(output) == {"new"}
    assert names(tmp_path) == {"out"}


def test_an_output_that_is_a_link_is_replaced_behind_the_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to("real")
    with OutputFolder(tmp_path / "out") as folder:
        (folder / "new").write_text("1")
    assert (tmp_path / "out").is_symlink()
    assert names(tmp_path / "real") == {"new"}


def test_a_result_is_kept_when_somebody_filled_the_output_meanwhile(tmp_path: Path) -> None:
    output = tmp_path / "out"

    def run() -> None:
        with OutputFolder(output) as folder:
            (folder / "weights").write_text("hours of work")
            output.mkdir()
            (output / "theirs").write_text("x")

    with pytest.raises(OutputError, match="it is kept in") as refused:
        run()
    kept = Path(str(refused.value).rsplit(" ", 1)[1])
    assert (kept / "weights").read_text() == "hours of work"
    assert names(output) == {"theirs"}


HOLD = """
import sys, time
from pathlib import Path
from formats.output import OutputFolder
with OutputFolder(Path(sys.argv[1])) as folder:
    (folder / "half").write_text("x")
    print(folder.name, flush=True)
    time.sleep(60)
"""


def test_a_killed_run_leaves_no_output_and_the_next_one_clears_up(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(output)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        partial = process.stdout.readline().strip()
        with OutputFolder(output) as folder:  # a run that is alive keeps its folder
            assert names(tmp_path) == {partial, folder.name}
        process.kill()
    assert names(tmp_path) == {partial, "out"}
    (tmp_path / ".out.partial-notes").mkdir()  # not a name of ours
    shutil.rmtree(output)
    with OutputFolder(output):
        pass
    assert names(tmp_path) == {"out", ".out.partial-notes"}


def test_force_keeps_files_that_the_manifest_does_not_list(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "manifest.json").write_text('{"format": "bitledger-manifest/1", "files": [{"name": "model.safetensors"}]}')
    (out / "model.safetensors").write_bytes(b"ours")
    check_output(out, None, 0, True)
    (out / "mine").mkdir()
    (out / "mine" / "notes.txt").write_text("precious")
    assert "mine/notes.txt" in refusal(out, None, force=True)
    assert (out / "mine" / "notes.txt").read_text() == "precious"
