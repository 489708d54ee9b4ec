"""What lies in a checkpoint folder: which files are weights, which are side files, and which must not be touched.

A model folder may come from anywhere, so a name or a link that leads out of it is refused: a copied side file would otherwise
carry somebody's private file into a published artefact. The one exception is the layout of the hub's cache, where every file of
``models--org--name/snapshots/<revision>/`` is a link into ``models--org--name/blobs/``, and from there on into a shared store.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from quant.errors import SourceError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MANIFEST_NAME = "manifest.json"
WINDOWS_NAME = "windows.parquet"
REPORT_NAME = "report.png"
_OWN_NAMES = (MANIFEST_NAME, WINDOWS_NAME, REPORT_NAME)
_SHARED_STORE_MARKER = ".huggingface-shared-blobs"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_OTHER_WEIGHTS = (".safetensors", ".gguf", ".ggml", ".onnx", ".onnx_data", ".h5", ".msgpack", ".ot", ".tflite", ".npz", ".npy")
_STALE_BLOCKS = ("quantize_config.json", "hf_quant_config.json", "quant_config.json")


@dataclass(frozen=True, slots=True)
class Listing:
    """Relative names under a checkpoint folder, sorted: files to copy as they are, and files left out, each with the reason."""

    side_files: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...]


def allowed_roots(folder: Path) -> tuple[Path, ...]:
    """Real folders in which the files of ``folder`` may lie: itself and, for a snapshot in a hub cache, the cache's blobs.

    Those are the blobs of its own repository, and the store that newer hub clients share between repositories (known by its
    marker file), to which the repository's blobs are links in turn.
    """
    real = folder.resolve()
    roots = [real]
    repository = real.parent.parent
    if real.parent.name == "snapshots" and repository.name.startswith("models--"):
        roots.append(repository / "blobs")  # where this is itself a link it matches nothing: real paths are compared
        if (repository.parent / "blobs" / _SHARED_STORE_MARKER).is_file():
            roots.append(repository.parent / "blobs")
    return tuple(roots)


def inside(folder: Path, name: str, roots: tuple[Path, ...]) -> Path:
    """The path of ``name`` in ``folder``; raises SourceError when the name or a link behind it leads out of ``roots``."""
    pure = PurePosixPath(name)
    if not name or "\0" in name or "\\" in name or pure.is_absolute() or ".." in pure.parts:
        raise SourceError(f"{folder}: the file name {name!r} leads out of the checkpoint folder; it is not read")
    path = folder / name
    real = path.resolve()
    if not any(real.is_relative_to(root) for root in roots):
        raise SourceError(f"{folder}: {name!r} is a link out of the folder, to {real}; put the file itself into the folder")
    return path


def list_folder(folder: Path, weights: frozenset[str], roots: tuple[Path, ...]) -> Listing:
    """All files below ``folder`` but ``weights``, the index and config.json; hidden files and folders are passed over.

    Raises SourceError for a link that leads out of ``roots``.
    """
    side: list[str] = []
    left_out: list[tuple[str, str]] = []
    for where, folders, files in os.walk(folder):
        base = Path(where)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        linked = [name for name in folders if (base / name).is_symlink()]
        for file in sorted(name for name in files + linked if not name.startswith(".")):
            name = (base / file).relative_to(folder).as_posix()
            if name in weights or name in ("config.json", INDEX_NAME):
                continue
            path = inside(folder, name, roots)
            reason = _reason_to_leave_out(name, path)
            if reason is None:
                side.append(name)
            else:
                left_out.append((name, reason))
    return Listing(tuple(sorted(side)), tuple(sorted(left_out)))


def _reason_to_leave_out(name: str, path: Path) -> str | None:
    lower = name.lower()
    if path.is_dir():
        return "a link to a folder"
    if not path.exists():
        return "a link to a file that is missing"
    if not path.is_file():
        return "not a regular file"
    if lower.endswith(PICKLES):
        return "a pickle, which can run code when it is loaded"
    if lower.endswith(_OTHER_WEIGHTS) or ".onnx_data" in lower:
        return "weights that the checkpoint's index does not name"
    if lower.endswith((".safetensors.index.json", ".bin.index.json")):
        return "the index of weights that are left out"
    if lower in _STALE_BLOCKS:
        return "the description of another quantisation"
    if lower in _OWN_NAMES:  # in any case of letters: on some disks Report.png and report.png are one file
        return "the output gets a file of this name of its own"
    return None
