"""Single files: whole or not there, hashed on the way, readable by everybody."""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path

import pytest

from formats.atomic import copy_file, hash_file, write_bytes_atomically
from quant.errors import OutputError, SourceError


@pytest.mark.usefixtures("private_files")
def test_single_files_are_whole_hashed_and_world_readable(tmp_path: Path) -> None:
    data = bytes(range(256)) * 9000
    sha256 = hashlib.sha256(data).hexdigest()
    path = tmp_path / "manifest.json"
    path.write_text("old")
    assert write_bytes_atomically(path, data) == sha256
    assert hash_file(path) == (len(data), sha256)
    (tmp_path / "link").symlink_to(path)
    path.chmod(0o600)
    assert copy_file(tmp_path / "link", tmp_path / "sub" / "deep" / "copy") == (len(data), sha256)
    copy = tmp_path / "sub" / "deep" / "copy"
    assert copy.read_bytes() == data
    assert not copy.is_symlink()
    assert stat.S_IMODE(copy.stat().st_mode) == 0o644
    assert [p.name for p in copy.parent.iterdir()] == ["copy"]


def test_single_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="nothing"):
        copy_file(tmp_path / "nothing", tmp_path / "out")
    with pytest.raises(SourceError, match="nothing"):
        hash_file(tmp_path / "nothing")
    with pytest.raises(OutputError, match="gone"):
        write_bytes_atomically(tmp_path / "gone" / "file", b"x")
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OutputError, match="file"):
        copy_file(tmp_path / "file", tmp_path / "file" / "below")
    with pytest.raises(OutputError, match="folder"):
        copy_file(tmp_path / "file", tmp_path / "folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
