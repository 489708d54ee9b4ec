"""Parts of an evaluation into the manifest of the artefact that they measured, in one step.

A part that was measured before is replaced, rows and all. Rows carry their hash in their name and the manifest is written last
and atomically: a reader sees the old evaluation or the new one. Rows that a killed evaluation left behind go with the next one.
"""

from __future__ import annotations

import datetime
import hashlib
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from eval.result import PartResult
from formats.manifest import EvaluationRecord, FileRecord, Manifest, MeasurementRecord, versions
from formats.writer import write_bytes_atomically
from quant.errors import UsageError, VerifyError

if TYPE_CHECKING:
    import pandas as pd

FOLDER = "evaluations"
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def append(folder: Path, parts: Sequence[PartResult]) -> Manifest:
    """Write every part's rows and measurements into the artefact in ``folder``; returns the manifest as it now is.

    Raises:
        UsageError: a part's name is no file name, or two parts have the same.
        VerifyError: a part measured other weight files than those in the manifest.
    """
    manifest = Manifest.load(folder)
    _check(manifest, parts)
    names = {part.part for part in parts}
    replaced = {record.rows for record in manifest.evaluations if record.part in names}
    files = [file for file in manifest.files if file.name not in replaced]
    records = []
    for part in parts:
        rows = None if part.rows is None else _write_rows(folder, part.part, part.rows)
        files += [] if rows is None else [rows]
        records.append(_record(part, None if rows is None else rows.name))
    measured = [MeasurementRecord.model_validate(found.record()) for part in parts for found in part.named()]
    changed = manifest.model_copy(
        update={
            "files": sorted(files, key=lambda file: file.name),
            "measurements": [found for found in manifest.measurements if found.part not in names] + measured,
            "evaluations": [record for record in manifest.evaluations if record.part not in names] + records,
        }
    )
    changed.save(folder)
    _remove_unlisted(folder, changed)
    return changed


def _remove_unlisted(folder: Path, manifest: Manifest) -> None:
    listed = {file.name for file in manifest.files}
    for path in (folder / FOLDER).glob("*.parquet"):
        if f"{FOLDER}/{path.name}" not in listed:
            path.unlink()


def _check(manifest: Manifest, parts: Sequence[PartResult]) -> None:
    names = [part.part for part in parts]
    for name in names:
        if not _PART.fullmatch(name) or names.count(name) > 1:
            raise UsageError(f"{name!r} cannot name a part: letters, digits, '.', '_' and '-', and each part once")
    weights = manifest.weights()
    for part in parts:
        if not weights.items() <= part.subject.items():
            raise VerifyError(f"part {part.part} measured other weight files than the manifest lists: evaluate these files again")


def _write_rows(folder: Path, part: str, rows: pd.DataFrame) -> FileRecord:
    sink = io.BytesIO()
    rows.to_parquet(sink, index=False)
    data = sink.getvalue()
    sha256 = hashlib.sha256(data).hexdigest()
    name = f"{FOLDER}/{part}.{sha256[:12]}.parquet"
    (folder / FOLDER).mkdir(exist_ok=True)
    write_bytes_atomically(folder / name, data)
    return FileRecord(name=name, nbytes=len(data), sha256=sha256, role="side")


def _record(part: PartResult, rows: str | None) -> EvaluationRecord:
    return EvaluationRecord(
        part=part.part,
        rows=rows,
        finished_utc=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        seconds=round(part.seconds, 3),
        versions=versions(),
        subject=dict(sorted(part.subject.items())),
        settings=dict(sorted(part.settings.items())),
        notes=list(part.notes),
    )
