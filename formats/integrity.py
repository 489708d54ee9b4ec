"""Is an artefact what its manifest says? Ten checks, cheap ones first; the first broken thing is named and ends it.

=========  ==========================================================================================================
manifest   readable, of a known format
files      every listed file is there, with its size
unlisted   there is no other file (hidden names apart: no loader reads them)
hashes     SHA-256 of every file
headers    every tensor in the weight files is a recorded part, with its type, shape and bytes, and the other way round; what
           the headers say of method and bytes; the index
ledger     every tensor has one fate; sums per file, totals, bits per weight; measurements were made on these files
config     the quantization block of config.json says what was stored, and ignores what was not quantised
kv cache   config.json says of the cache what the record says; its scales are there, finite, above 0 and not all the same
gates      every verdict is on these files, follows from its own figures, and these are still the measurements
codecs     the recorded parts are what the codec lays out; one matrix per codec and scheme unpacks and packs to the same bytes
=========  ==========================================================================================================

Torch is imported for the last check only.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from formats.atomic import hash_file
from formats.broken import Broken, named
from formats.config_block import check_config
from formats.folder import INDEX_NAME, allowed_roots, inside
from formats.gates import check_gates
from formats.header import TensorInfo, read_header
from formats.kv_check import check_kv_cache
from formats.manifest import NAME, Manifest
from formats.records import PartRecord
from formats.round_trip import check_codecs
from quant.errors import VerifyError

__all__ = ["Broken", "verify_bytes", "verify_folder"]

MAX_JSON_BYTES = 200_000_000

Report = Callable[[str, str], None]
Progress = Callable[[int, int], None]


def verify_folder(folder: Path, *, report: Report | None = None, progress: Progress | None = None) -> Manifest:
    """Run all checks on ``folder`` and return its manifest.

    Args:
        report: called with (check, what was seen) after each check that holds.
        progress: called with (bytes hashed, bytes in all).

    Raises:
        Broken: the first thing that does not hold.
    """
    say = report or (lambda check, seen: None)
    manifest = verify_bytes(folder, report=report, progress=progress)
    stored = _check_headers(folder, manifest)
    say("headers", f"{len(stored)} stored tensors, weight files: {len(manifest.ledger)}")
    _check_ledger(manifest)
    say(
        "ledger",
        f"{len(manifest.tensors)} source tensors, {sum(line.total_bytes for line in manifest.ledger):,} bytes accounted for",
    )
    with named("config", "config.json"):
        config = _load_object(folder / "config.json")
        block = check_config(config, manifest.tensors)
    say("config", block)
    cache = check_kv_cache(folder, manifest, config)
    if cache is not None:
        say("kv cache", cache)
    for verdict in check_gates(manifest):
        say("gates", verdict)
    say("codecs", check_codecs(folder, manifest.tensors, stored))
    return manifest


def verify_bytes(
    folder: Path, *, report: Report | None = None, progress: Progress | None = None, hashes: bool = True
) -> Manifest:
    """The first four checks: the files are those of the manifest, byte for byte; without ``hashes`` size for size only.

    Raises:
        Broken: the first thing that does not hold.
    """
    say = report or (lambda check, seen: None)
    with named("manifest", NAME):
        manifest = Manifest.load(folder / NAME)
    say("manifest", f"{manifest.format}, method {manifest.method}")
    total = _check_files(folder, manifest)
    say("files", f"{len(manifest.files)} files, {total:,} bytes")
    _check_unlisted(folder, manifest)
    say("unlisted", "no other file")
    if hashes:
        _check_hashes(folder, manifest, total, progress)
        say("hashes", f"{len(manifest.files)} SHA-256")
    return manifest


def _check_files(folder: Path, manifest: Manifest) -> int:
    roots = allowed_roots(folder)
    names = [file.name for file in manifest.files]
    for file in manifest.files:
        with named("files", file.name):
            path = inside(folder, file.name, roots)
            actual = path.stat().st_size if path.is_file() else "no such file"
        if actual != file.nbytes:
            raise Broken("files", "size in bytes", file=file.name, expected=file.nbytes, actual=actual)
        if file.name == NAME or names.count(file.name) > 1:
            raise Broken("files", "is listed twice, or is the manifest itself", file=file.name)
    return sum(file.nbytes for file in manifest.files)


def _check_unlisted(folder: Path, manifest: Manifest) -> None:
    listed = {file.name for file in manifest.files} | {NAME}
    for where, folders, files in os.walk(folder):
        base = Path(where)
        linked = [name for name in folders if (base / name).is_symlink()]
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for file in sorted(files + linked):
            name = (base / file).relative_to(folder).as_posix()
            if not file.startswith(".") and name not in listed:
                raise Broken("unlisted", "is in the folder but not in the manifest", file=name)


def _check_hashes(folder: Path, manifest: Manifest, total: int, progress: Progress | None) -> None:
    done = 0
    for file in sorted(manifest.files, key=lambda file: file.nbytes):
        with named("hashes", file.name):
            actual = hash_file(folder / file.name)[1]
        if actual != file.sha256:
            raise Broken("hashes", "SHA-256", file=file.name, expected=file.sha256, actual=actual)
        done += file.nbytes
        if progress is not None:
            progress(done, total)


def _check_headers(folder: Path, manifest: Manifest) -> dict[str, TensorInfo]:
    """Headers, records and index against each other; returns where each stored tensor lies."""
    parts = {(part.file, part.name): part for part in manifest.stored_parts()}
    headers = {line.file: line.header_bytes for line in manifest.ledger}
    stored: dict[str, TensorInfo] = {}
    said: dict[str, dict[str, str]] = {}
    for file in (file.name for file in manifest.files if file.role == "weights"):
        with named("headers", file):
            tensors, said[file], header_bytes = read_header(folder / file, file)
        if headers.get(file) != header_bytes:
            raise Broken("headers", "header bytes", file=file, expected=headers.get(file), actual=header_bytes)
        for name, info in tensors.items():
            part = parts.pop((file, name), None)
            if part is None:
                raise Broken("headers", "is stored but not recorded for this file", file=file, tensor=name)
            _check_part(part, info)
            stored[name] = info
    for file, name in parts:
        raise Broken("headers", "is recorded but not stored there", file=file, tensor=name)
    for key, value in _metadata(manifest).items():
        for file, metadata in said.items():
            if metadata.get(key) != value:
                raise Broken("headers", f"{key} in __metadata__", file=file, expected=value, actual=metadata.get(key))
    _check_index(folder, manifest, stored)
    return stored


def _metadata(manifest: Manifest) -> dict[str, str]:
    """What every header says of the whole artefact: its method, and bytes by role."""
    roles = Counter[str]()
    for record in manifest.tensors:
        for part in record.parts:
            roles[part.role] += part.nbytes
    bytes_by_role = {f"bitledger.{role}_bytes": str(count) for role, count in roles.items()}
    return {"format": "pt", "bitledger.method": manifest.method} | bytes_by_role


def _check_part(part: PartRecord, info: TensorInfo) -> None:
    expected = (part.dtype, tuple(part.shape), part.nbytes)
    actual = (info.dtype, info.shape, info.nbytes)
    for what, right, found in zip(("dtype", "shape", "bytes"), expected, actual, strict=True):
        if right != found:
            raise Broken("headers", what, file=part.file, tensor=part.name, expected=right, actual=found)


def _check_index(folder: Path, manifest: Manifest, stored: dict[str, TensorInfo]) -> None:
    listed = any(file.name == INDEX_NAME for file in manifest.files)
    if not listed:
        if len(manifest.ledger) > 1:
            raise Broken("headers", "several weight files need an index", file=INDEX_NAME)
        return
    with named("headers", INDEX_NAME):
        index = _load_object(folder / INDEX_NAME)
    right = {name: info.file for name, info in stored.items()}
    if index.get("weight_map") != right:
        found = index.get("weight_map")
        wrong = set(right.items()) ^ set(map(_pair, found.items())) if isinstance(found, dict) else set(right.items())
        raise Broken("headers", "weight_map disagrees with the weight files", file=INDEX_NAME, tensor=min(wrong)[0])
    metadata = index.get("metadata")
    actual = metadata.get("total_size") if isinstance(metadata, dict) else None
    total = sum(info.nbytes for info in stored.values())
    if actual != total:
        raise Broken("headers", "total_size", file=INDEX_NAME, expected=total, actual=actual)


def _load_object(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``. Raises VerifyError."""
    if path.stat().st_size > MAX_JSON_BYTES:
        raise VerifyError(f"is larger than {MAX_JSON_BYTES:,} bytes")
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise VerifyError(f"is not JSON ({str(error).splitlines()[0]})") from error
    if not isinstance(found, dict):
        raise VerifyError("is not a JSON object")
    return found


def _pair(item: tuple[str, Any]) -> tuple[str, str]:
    return item[0], str(item[1])


def _check_ledger(manifest: Manifest) -> None:
    with named("ledger", NAME):
        manifest.check_ledger()
    known = {(file.name, file.sha256) for file in manifest.files}
    known |= {(file.name, file.sha256) for file in manifest.source.files + manifest.source.origin_files}
    for measurement in manifest.measurements:
        for file, sha256 in measurement.subject.items():
            if (file, sha256) not in known:
                text = f"measurement {measurement.name} was made on other bytes than these or the source's (SHA-256 {sha256})"
                raise Broken("ledger", text, file=file)
