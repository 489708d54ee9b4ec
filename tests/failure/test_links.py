"""Names and links that lead out of the checkpoint folder: refused, except inside the layout of the hub's cache."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from formats.checkpoint import Checkpoint
from quant.errors import SourceError
from tests.failure.damage import CONFIG, safetensors_of, write_folder, write_index


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/../../secret.safetensors", "..\\secret", "", "a\0b"])
def test_an_index_cannot_name_a_file_outside(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret.safetensors").write_bytes(safetensors_of({"a.weight": ("F32", [1])}))
    folder = write_folder(tmp_path / "model")
    write_index(folder, {"a.weight": name})
    with pytest.raises(SourceError, match="leads out of the checkpoint folder"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "LICENSE", "assets/notes.txt", "tokenizer.json"])
def test_a_file_that_is_a_link_out_of_the_folder(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path / "model")
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    if not path.exists():
        path.write_text("{}")
    Checkpoint.open(folder)  # as a plain file it is fine
    outside = tmp_path / "outside"
    path.rename(outside)
    path.symlink_to(outside)
    with pytest.raises(SourceError, match="is a link out of the folder") as refusal:
        Checkpoint.open(folder)
    assert repr(name) in str(refusal.value)
    assert str(outside) in str(refusal.value)


def test_a_linked_folder_is_refused_outside_and_left_out_inside(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / "real").mkdir()
    (folder / "real" / "a.txt").write_text("a")
    (folder / "loop").symlink_to(folder)
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.side_files() == ("real/a.txt",)
    assert any("loop is left out: a link to a folder" in note for note in checkpoint.notes)
    (tmp_path / "private").mkdir()
    (folder / "other").symlink_to(tmp_path / "private")
    with pytest.raises(SourceError, match="'other' is a link out of the folder"):
        Checkpoint.open(folder)


def test_links_inside_the_folder_and_a_link_to_the_folder_itself_are_fine(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / "LICENSE").write_text("text")
    (folder / "LICENSE.md").symlink_to("LICENSE")
    (tmp_path / "latest").symlink_to(folder)
    assert Checkpoint.open(tmp_path / "latest").side_files() == ("LICENSE", "LICENSE.md")


def test_what_is_no_regular_file_is_left_out_and_not_opened(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    os.mkfifo(folder / "pipe")  # reading it would wait for ever
    (folder / "gone.json").symlink_to("nothing.json")
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.side_files() == ()
    assert any("pipe is left out" in note for note in checkpoint.notes)
    assert any("gone.json is left out: a link to a file that is missing" in note for note in checkpoint.notes)


def hub_cache(root: Path) -> tuple[Path, Path]:
    """A repository in the hub's cache layout: (snapshot of links, folder of blobs named by their hash)."""
    repository = root / "models--org--name"
    snapshot, blobs = repository / "snapshots" / "0123abcd", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    files = {"config.json": str(CONFIG).replace("'", '"').encode(), "tokenizer.json": b"{}", "sub/notes.txt": b"notes"}
    files["model.safetensors"] = safetensors_of({"model.norm.weight": ("F32", [4])})
    for name, data in files.items():
        blob = blobs / hashlib.sha256(data).hexdigest()
        blob.write_bytes(data)
        link = snapshot / name
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot, blobs


def test_a_snapshot_of_the_hub_cache_may_link_to_its_own_blobs(tmp_path: Path) -> None:
    snapshot, _ = hub_cache(tmp_path)
    checkpoint = Checkpoint.open(snapshot)
    assert checkpoint.side_files() == ("sub/notes.txt", "tokenizer.json")
    assert checkpoint.tensor("model.norm.weight").tolist() == [0.0] * 4
    (tmp_path / "shortcut").symlink_to(snapshot)
    assert Checkpoint.open(tmp_path / "shortcut").side_files() == checkpoint.side_files()


def test_a_blob_may_lie_in_the_store_that_the_hub_cache_shares(tmp_path: Path) -> None:
    snapshot, blobs = hub_cache(tmp_path)
    blob = (snapshot / "model.safetensors").resolve()
    store = tmp_path / "blobs" / blob.name[:2]
    store.mkdir(parents=True)
    blob.rename(store / blob.name)
    (blobs / blob.name).symlink_to(os.path.relpath(store / blob.name, blobs))
    with pytest.raises(SourceError, match="is a link out of the folder"):  # any folder may be called blobs: it needs the marker
        Checkpoint.open(snapshot)
    (tmp_path / "blobs" / ".huggingface-shared-blobs").write_text("1\n")
    assert Checkpoint.open(snapshot).tensor("model.norm.weight").tolist() == [0.0] * 4


def test_the_hub_client_still_lays_its_cache_out_like_this() -> None:
    store = pytest.importorskip("huggingface_hub.utils._shared_blobs", reason="this hub client shares no blobs")
    assert store.SHARED_BLOBS_DIR_NAME == "blobs"
    assert store.SHARED_BLOBS_MARKER_NAME == ".huggingface-shared-blobs"


def test_a_snapshot_may_not_link_to_another_repository_or_elsewhere(tmp_path: Path) -> None:
    snapshot, _ = hub_cache(tmp_path / "cache")
    _, other_blobs = hub_cache(tmp_path / "cache" / "models--other")
    for target in (next(other_blobs.iterdir()), Path("/etc/hostname")):
        link = snapshot / "README.md"
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        with pytest.raises(SourceError, match=r"'README\.md' is a link out of the folder"):
            Checkpoint.open(snapshot)


def test_blobs_that_are_themselves_a_link_open_no_door(tmp_path: Path) -> None:
    snapshot, blobs = hub_cache(tmp_path / "cache")
    blobs.rename(tmp_path / "elsewhere")
    blobs.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SourceError, match="is a link out of the folder"):
        Checkpoint.open(snapshot)
