"""The output folder: refused before any work where it cannot or must not be written, and put in its place in one step.

Nothing of a run is seen under the final name before the run is complete: everything is written into a hidden folder beside it,
which is renamed at the end and removed on failure. An existing folder is never emptied; with ``force`` a folder that holds a
manifest of this project (or nothing) is renamed aside, replaced, and only then removed.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from formats.atomic import sync_folder
from formats.folder import MANIFEST_NAME, allowed_roots
from quant.errors import OutputError

_MANIFEST_FORMAT = "bitledger-manifest/"
_SHOWN = 8


def check_output(output: Path, source: Path | None, needed_bytes: int, force: bool) -> None:
    """Raise OutputError where a run of ``needed_bytes`` from ``source`` must not or cannot write ``output``; writes nothing.

    Refused: the source folder itself, a folder inside it or above it (by real paths and inodes, so links are seen through), a
    file, a mount point, a folder with content (with ``force``: and without a manifest of ours), a parent that cannot be written,
    too little space.
    """
    try:
        final = output.resolve()
        if source is not None:
            _check_apart(output, final, source)
        _check_replaceable(output, final, force)
        _check_room(output, final, needed_bytes)
    except (OSError, ValueError, RuntimeError) as error:  # a name too long, a zero byte, a loop of links
        raise OutputError(f"{str(output)!r} cannot be an output folder: {error}; choose another --output") from None


class OutputFolder:
    """Context manager: gives a hidden folder beside ``output`` to write into, and renames it to ``output`` on success.

    On an exception (Ctrl-C too) the hidden folder is removed, and with it the parents that were made for it. What a killed run
    left behind is removed by the next run with the same output. Raises OutputError.
    """

    def __init__(self, output: Path, force: bool = False) -> None:
        self.output = output
        self._force = force
        self._final = output.resolve()
        _check_replaceable(output, self._final, force)
        self._made: list[Path] = []
        self._lock = -1
        self.path = self._final.with_name(f".{self._final.name}.partial-{os.getpid()}")

    def __enter__(self) -> Path:
        try:
            for parent in reversed([p for p in self._final.parents if not p.exists()]):
                parent.mkdir()
                self._made.append(parent)
            _remove_stale(self._final)
            self.path.mkdir()
            self._lock = os.open(self.path, os.O_RDONLY)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._clean()
            raise OutputError(f"cannot make {self.output}: {error.strerror}; choose another --output") from error
        return self.path

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self._clean()
            return
        try:
            _check_replaceable(self.output, self._final, self._force)  # somebody may have filled it during the run
            sync_folder(self.path)
            self._put_in_place()
        except (OSError, OutputError) as failure:
            reason = failure.strerror if isinstance(failure, OSError) else str(failure)
            raise OutputError(
                f"the finished result could not be moved to {self.output} ({reason}); it is kept in {self.path}"
            ) from failure
        finally:
            self._unlock()

    def _put_in_place(self) -> None:
        old = self._final.with_name(f".{self._final.name}.old-{os.getpid()}")
        replaced = self._final.exists()
        if replaced:
            self._final.rename(old)
        try:
            self.path.rename(self._final)
        except OSError:
            if replaced:
                old.rename(self._final)
            raise
        sync_folder(self._final.parent)
        if replaced:
            shutil.rmtree(old, ignore_errors=True)

    def _clean(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        for parent in reversed(self._made):
            with suppress(OSError):  # not empty: somebody else uses it by now
                parent.rmdir()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _check_apart(output: Path, final: Path, source: Path) -> None:
    ways = "choose an --output beside it"
    for root in allowed_roots(source):
        for above in (final, *final.parents):
            if above == root or (above.exists() and root.exists() and above.samefile(root)):
                where = "is the source folder itself" if above == final else f"lies inside the source folder {source}"
                raise OutputError(f"output {output} {where}: {ways}")
        if any(above == final or (final.exists() and above.samefile(final)) for above in root.parents):
            raise OutputError(f"output {output} is above the source folder {source}, which would be replaced with it: {ways}")


def _check_replaceable(output: Path, final: Path, force: bool) -> None:
    if not final.exists():
        return
    if not final.is_dir():
        raise OutputError(f"output {output} is a file: give a folder")
    if os.path.ismount(final):
        raise OutputError(f"output {output} is a mount point, which cannot be replaced in one step: give a folder inside it")
    found = sorted(entry.name for entry in final.iterdir())
    if not found:
        return
    what = f"output {output} is not empty ({len(found)} entries, the first is {found[0]!r})"
    if not force:
        raise OutputError(f"{what}: choose another --output, or add --force to replace a folder that bitledger wrote")
    ours = _our_files(final)
    if ours is None:
        raise OutputError(
            f"{what} and has no {MANIFEST_NAME} of bitledger: --force does not remove other people's files, do it yourself"
        )
    foreign = sorted(name for name in _all_files(final) if name not in ours)
    if foreign:
        more = f" and {len(foreign) - _SHOWN} more" if len(foreign) > _SHOWN else ""
        raise OutputError(
            f"output {output} holds {', '.join(foreign[:_SHOWN])}{more}, which its manifest does not list: --force replaces only "
            "what bitledger wrote, so move them first"
        )


def _our_files(folder: Path) -> frozenset[str] | None:
    """Names that the manifest of ``folder`` lists, itself included; None where there is no manifest of ours."""
    try:
        found = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict) or not str(found.get("format", "")).startswith(_MANIFEST_FORMAT):
        return None
    files = found.get("files")
    names = [file.get("name") for file in files if isinstance(file, dict)] if isinstance(files, list) else []
    return frozenset([MANIFEST_NAME, *(name for name in names if isinstance(name, str))])


def _all_files(folder: Path) -> Iterator[str]:
    """Relative names of everything below ``folder`` that is no plain folder; links are not followed."""
    for root, folders, files in os.walk(folder):
        links = [name for name in folders if (Path(root) / name).is_symlink()]
        for name in (*files, *links):
            yield (Path(root) / name).relative_to(folder).as_posix()


def _check_room(output: Path, final: Path, needed_bytes: int) -> None:
    place = next(parent for parent in final.parents if os.path.lexists(parent))
    if not place.is_dir():
        raise OutputError(f"output {output} cannot be made: {place} is a file; choose another --output")
    if not os.access(place, os.W_OK | os.X_OK) or os.statvfs(place).f_flag & os.ST_RDONLY:
        raise OutputError(f"output {output} cannot be made: {place} is read-only; choose another --output")
    free = shutil.disk_usage(place).free
    if free < needed_bytes:
        raise OutputError(
            f"output {output} needs {_gigabytes(needed_bytes)} but {place} has {_gigabytes(free)} free: "
            "free some space or choose another --output"
        )


def _gigabytes(count: int) -> str:
    """Decimal gigabytes to the megabyte, and finer below one."""
    return f"{count / 1e9:,.3f} GB" if count >= 1_000_000 else f"{count / 1e9:.6f} GB"


def _remove_stale(final: Path) -> None:
    """Remove what killed runs for the same output left: hidden folders of dead processes that nobody holds locked."""
    pattern = re.compile(rf"\.{re.escape(final.name)}\.partial-(\d+)")
    for entry in final.parent.iterdir():
        match = pattern.fullmatch(entry.name)
        if match and not entry.is_symlink() and entry.is_dir() and not _alive(int(match[1])) and _unlocked(entry):
            shutil.rmtree(entry, ignore_errors=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _unlocked(folder: Path) -> bool:
    """Whether no process holds the folder: a process id says nothing about a run in another container on the same disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True
