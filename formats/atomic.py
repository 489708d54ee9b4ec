"""Files that are there whole or not at all, hashed while their bytes pass by.

A file is written under a hidden temporary name beside its place, flushed to the disk, made readable (0644) and renamed. The
rename is atomic on POSIX file systems, so a reader and a killed run see the old state or the new one.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from quant.errors import OutputError, SourceError

_CHUNK_BYTES = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_bytes_atomically(path: Path, data: bytes) -> str:
    """Write ``data`` to ``path`` (its folder exists) and return its SHA-256 as hex. Raises OutputError."""
    return _write(path, (data,), len(data))[1]


def copy_file(source: Path, target: Path) -> tuple[int, str]:
    """Copy ``source`` byte for byte, making the folders above ``target``; returns bytes and SHA-256 of what was copied.

    A link is followed and its content copied. Raises SourceError when reading fails, OutputError when writing does.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise output_error(target, 0, error) from error
    try:
        file = source.open("rb", buffering=0)
    except OSError as error:
        raise SourceError(f"cannot read {source}: {error.strerror}") from error
    with file:

        def chunks() -> Iterable[bytes]:
            while True:
                try:
                    chunk = file.read(_CHUNK_BYTES)
                except OSError as error:
                    raise SourceError(f"cannot read {source}: {error.strerror}") from error
                if not chunk:
                    return
                yield chunk

        return _write(target, chunks(), os.fstat(file.fileno()).st_size)


def hash_file(path: Path) -> tuple[int, str]:
    """Bytes and SHA-256 (hex) of the file at ``path``. Raises SourceError."""
    try:
        with path.open("rb", buffering=0) as file:
            digest = hashlib.file_digest(file, "sha256")
            return file.tell(), digest.hexdigest()
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror}") from error


def sync_folder(folder: Path) -> None:
    """Flush the names in ``folder`` to the disk, so that a rename survives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems cannot flush a folder; the files themselves are flushed
            os.fsync(handle)
    finally:
        os.close(handle)


def output_error(path: Path, needed: int, error: OSError) -> OutputError:
    """What to tell when writing ``needed`` bytes to ``path`` failed with ``error``."""
    if error.errno in _FULL:
        place = next(folder for folder in path.absolute().parents if folder.is_dir())
        free = shutil.disk_usage(place).free
        return OutputError(
            f"cannot write {path} ({needed:,} bytes): {error.strerror} ({free:,} bytes free); "
            "free some space or choose another --output"
        )
    return OutputError(f"cannot write {path} ({needed:,} bytes): {error.strerror}; choose another --output")


def _write(path: Path, chunks: Iterable[bytes], size: int) -> tuple[int, str]:
    temporary = path.with_name(f".{path.name}.partial-{os.getpid()}")
    digest, written = hashlib.sha256(), 0
    try:
        with temporary.open("wb") as file:
            for chunk in chunks:
                file.write(chunk)
                digest.update(chunk)
                written += len(chunk)
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), 0o644)
        temporary.replace(path)
        sync_folder(path.parent)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise output_error(path, size, error) from error
        raise
    return written, digest.hexdigest()
