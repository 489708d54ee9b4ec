"""A disk that fills up while writing: one sentence with path and bytes, nothing under a final name, nothing left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.failure.damage import with_mount

# Writes 2 x 400,000 bytes as two shards or one, or copies a file of 800,000, under a limit on the size of a file; prints what
# happened and what is left.
SCRIPT = """
import json, resource, sys
from pathlib import Path
import numpy as np
from formats.output import OutputFolder
from formats.writer import ShardedWriter, TensorSpec, copy_file
from quant.errors import OutputError

output, kind, limit = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
groups = [[TensorSpec(name, "F32", (100_000,), "kept")] for name in ("a", "b")]
side = output.parent.parent / "side"
error = None
try:
    with OutputFolder(output) as folder:
        if kind == "copy":
            copy_file(side, folder / "sub" / "side")
        else:
            with ShardedWriter(folder, groups, {}, 400_500 if kind == "shards" else 5_000_000) as writer:
                for name in ("a", "b"):
                    writer.put(name, np.zeros(100_000, np.float32))
                writer.finish()
except OutputError as caught:
    error = str(caught)
print(json.dumps({"error": error, "left": sorted(str(p) for p in output.parent.rglob("*"))}))
"""


def attempt(output: Path, kind: str, limit: int = 0, disk: str | None = None) -> tuple[str | None, list[str]]:
    (output.parent.parent / "side").write_bytes(bytes(800_000))
    command = [sys.executable, "-c", SCRIPT, str(output), kind, str(limit)]
    if disk is None:
        output.parent.mkdir()
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stderr == ""
        found = json.loads(done.stdout)
    else:
        found = json.loads(with_mount(output.parent, ["-t", "tmpfs", "-o", disk, "tmpfs"], command))
    return found["error"], [Path(path).name for path in found["left"]]


def test_enough_room_succeeds(tmp_path: Path) -> None:
    error, left = attempt(tmp_path / "place" / "out", "shards", limit=1_000_000)
    assert error is None
    assert left == ["out", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]


@pytest.mark.parametrize(("kind", "name"), [("single", "model.safetensors"), ("copy", "side")])
def test_a_limit_on_the_size_of_files(tmp_path: Path, kind: str, name: str) -> None:
    error, left = attempt(tmp_path / "place" / "out", kind, limit=500_000)
    assert error is not None
    assert name in error
    assert "800," in error, "the bytes that were needed"
    assert "File too large" in error
    assert left == []


FULL = [("shards", "model-00002-of-00002.safetensors"), ("single", "model.safetensors"), ("copy", "side")]


@pytest.mark.parametrize(("kind", "name"), FULL)
def test_a_disk_that_is_full(tmp_path: Path, kind: str, name: str) -> None:
    error, left = attempt(tmp_path / "place" / "out", kind, disk="size=600k")  # holds one of the two shards
    assert error is not None
    assert name in error
    assert "No space left on device" in error
    assert "free some space" in error
    assert "\n" not in error
    assert left == []
