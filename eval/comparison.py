"""Artefacts beside each other: every figure of the table is a Measurement or a sum of a manifest, and says which.

Figures stand in one column only when they were measured on the same windows, with the same tokenizer, by the same convention and
against the same baseline; anything else is refused, naming the difference and both artefacts. What one artefact lacks is an empty
cell with a note.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from eval.columns import LANGUAGE, MeasuredColumn, measured_columns
from eval.comparable import BASELINE, differences, differences_text, foreign
from eval.compared_bits import linears_bits
from formats.atomic import hash_file
from formats.integrity import Broken, verify_bytes
from formats.manifest import NAME, Manifest, MeasurementRecord
from quant.errors import UsageError, VerifyError

_SHOWN = 8
_NOT_MAKING = ("evaluate", "hash")
_NO_CONVENTION = ("mean_nats_per_token", "pairing")
_VERSIONS = ("bitledger", "torch", "transformers")
WAY_OUT = "evaluate them alike (python -m pipelines.evaluate DIR --suite standard) or leave one out"


@dataclass(frozen=True, slots=True)
class Entry:
    """One artefact: how it is called here, its manifest's path as given, what is in it, and the SHA-256 of that file."""

    label: str
    path: str
    manifest: Manifest
    sha256: str

    def find(self, part: str, name: str) -> MeasurementRecord | None:
        """Its measurement, or None. Raises VerifyError when there are two."""
        found = [m for m in self.manifest.measurements if (m.part, m.name) == (part, name)]
        if len(found) > 1:
            raise VerifyError(f"{self.path}: {name} of part {part or 'run'} stands there {len(found)} times")
        return found[0] if found else None

    @property
    def schemes(self) -> str:
        """The schemes of its quantised matrices, the most common first."""
        names = [str(record.scheme) for record in self.manifest.tensors if record.fate == "quantised"]
        return ", ".join(sorted(set(names), key=lambda name: (-names.count(name), name))) or "nothing quantised"


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of every artefact; ``digits`` after the point where people read it."""

    key: str
    title: str
    unit: str
    digits: int


@dataclass(frozen=True, slots=True)
class Cell:
    """One figure and where it comes from: ``source`` is its place in the manifest. ``value`` is None where there is none."""

    value: float | None
    source: str
    low: float | None = None
    high: float | None = None
    level: float | None = None
    n: int | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The table: ``cells[i][key]`` is what ``entries[i]`` has in the column of that key.

    ``conventions`` says of every measured column (by its key) what it was measured on, ``notes`` what must be said besides.
    """

    entries: tuple[Entry, ...]
    columns: tuple[Column, ...]
    cells: tuple[dict[str, Cell], ...]
    conventions: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def values(self, key: str) -> list[float | None]:
        """What the artefacts have in one column; all None where there is no such column."""
        return [cells[key].value if key in cells else None for cells in self.cells]


def load_entry(folder: Path, label: str, *, hashes: bool = False) -> Entry:
    """The artefact in ``folder``, refused unless its files have the sizes (with ``hashes``: the bytes) of its manifest.

    Raises:
        VerifyError: they do not, or there is no readable manifest.
    """
    try:
        manifest = verify_bytes(folder, hashes=hashes)
    except Broken as broken:
        raise VerifyError(f"{folder} is not what its manifest says: {broken}") from None
    return Entry(label, str(folder / NAME), manifest, hash_file(folder / NAME)[1])


def labels(folders: Sequence[Path]) -> list[str]:
    """Names of the folders, with as many folders above them as tells them apart.

    Raises:
        UsageError: one folder is given twice.
    """
    real = [folder.resolve() for folder in folders]
    for place, folder in enumerate(real):
        if folder in real[:place]:
            raise UsageError(f"{folders[place]} is given twice")
    depth = [1] * len(real)
    while True:
        names = ["/".join(folder.parts[-count:]) for folder, count in zip(real, depth, strict=True)]
        again = [place for place, name in enumerate(names) if names.count(name) > 1]
        if not again:
            return names
        for place in again:
            depth[place] += 1


def compare(entries: Sequence[Entry]) -> Comparison:
    """The table of ``entries``.

    Raises:
        UsageError: two of them were made from different weights, or measured differently.
        VerifyError: a figure was measured on other files than the artefact's.
    """
    measured = measured_columns([entry.manifest for entry in entries])
    problems = [*_sources(entries), *(text for column in measured for text in _apart(entries, column))]
    if problems:
        shown = "; ".join(dict.fromkeys(problems[:_SHOWN]))
        more = f"; and {len(problems) - _SHOWN} more differences" if len(problems) > _SHOWN else ""
        raise UsageError(f"these artefacts cannot stand in one table: {shown}{more}: {WAY_OUT}")
    columns: list[Column] = []
    cells: list[dict[str, Cell]] = [{} for _ in entries]
    notes: list[str] = []
    for column, of_column in _of_manifests(entries):
        columns.append(column)
        for row, cell in zip(cells, of_column, strict=True):
            row[column.key] = cell
    for found in measured:
        columns.append(Column(found.key, found.title, found.unit, found.digits))
        for row, entry in zip(cells, entries, strict=True):
            row[found.key] = _measured(entry, found)
    columns += [Column("seconds_making", "quantising, s", "s", 1), Column("seconds_run", "whole run, s", "s", 1)]
    for row, entry in zip(cells, entries, strict=True):
        row |= _times(entry.manifest)
        titles = {column.key: column.title for column in columns}
        notes += [f"{entry.label}: {titles[key]}: {cell.note}" for key, cell in row.items() if cell.note]
    conventions = {column.key: _convention(entries, column) for column in measured}
    return Comparison(tuple(entries), tuple(columns), tuple(cells), conventions, (*notes, *_versions(entries)))


def _sources(entries: Sequence[Entry]) -> list[str]:
    """Differences between the weights that the artefacts were made from."""
    first, *others = entries
    weights = [
        {file.name: file.sha256 for file in entry.manifest.source.files if file.name.endswith(".safetensors")}
        for entry in entries
    ]
    return [
        f"{entry.label} was made from other weights ({entry.manifest.source.requested}) than {first.label} "
        f"({first.manifest.source.requested}), so that its baseline is another"
        for entry, found in zip(others, weights[1:], strict=True)
        if found != weights[0]
    ]


def _apart(entries: Sequence[Entry], column: MeasuredColumn) -> list[str]:
    """What was measured differently from the first artefact that has the figure."""
    having = [(entry, found) for entry in entries if (found := entry.find(column.part, column.name)) is not None]
    for entry, found in having:
        wrong = None if column.of_reference else foreign(found, entry.manifest)
        if wrong is not None:
            raise VerifyError(f"{entry.path}: {column.name} {wrong}: evaluate the artefact again")
    texts = []
    for entry, found in having[1:]:
        first, other = having[0]
        apart = differences(other, found)
        if column.of_reference and other.subject != found.subject:
            apart.append(("baseline", _digest(other), _digest(found)))
        if apart:
            texts.append(f"{column.title}: {differences_text(apart, first.label, entry.label)}")
    return texts


def _digest(measured: MeasurementRecord) -> str:
    return ", ".join(f"{name} {sha256[:12]}" for name, sha256 in sorted(measured.subject.items()))


def _of_manifests(entries: Sequence[Entry]) -> list[tuple[Column, list[Cell]]]:
    """Bits and bytes, which no measurement is needed for."""
    manifests = [entry.manifest for entry in entries]
    linears = [Cell(found.value, found.source, note=found.note) for found in linears_bits(manifests)]
    whole = [Cell(manifest.bits_per_weight.whole_file, "bits_per_weight.whole_file") for manifest in manifests]
    sizes = [
        Cell(float(sum(line.total_bytes for line in manifest.ledger)), "sum of ledger[*].total_bytes") for manifest in manifests
    ]
    return [
        (Column("bits_linears", "bits per weight, linears", "bits", 4), linears),
        (Column("bits_file", "bits per weight, whole file", "bits", 4), whole),
        (Column("size_bytes", "weight files, bytes", "bytes", 0), sizes),
    ]


def _measured(entry: Entry, column: MeasuredColumn) -> Cell:
    found = entry.find(column.part, column.name)
    source = f"measurements[part={column.part or 'run'},name={column.name}]"
    if found is None:
        return Cell(None, source, note=f"not measured ({column.command(Path(entry.path).parent)})")
    interval = found.interval
    note = found.flag or ""
    if found.value is None:
        note = f"not finite ({found.flag or 'no reason is recorded'})"
    return Cell(
        value=found.value,
        source=source,
        low=interval.low if interval else None,
        high=interval.high if interval else None,
        level=interval.level if interval else None,
        n=found.n,
        note=note,
    )


def _times(manifest: Manifest) -> dict[str, Cell]:
    seconds = manifest.run.seconds
    making = {stage: value for stage, value in seconds.items() if not stage.startswith(_NOT_MAKING)}
    return {
        "seconds_making": Cell(sum(making.values()) if making else None, f"sum of run.seconds: {', '.join(making) or 'none'}"),
        "seconds_run": Cell(sum(seconds.values()) if seconds else None, "sum of run.seconds"),
    }


def _convention(entries: Sequence[Entry], column: MeasuredColumn) -> str:
    """What a measured column was measured on, the same for all that have it: part, n, digests, settings."""
    found = next(found for entry in entries if (found := entry.find(column.part, column.name)) is not None)
    digests = ", ".join(f"{name} {digest[:12]}" for name, digest in found.inputs.items() if not name.startswith(BASELINE))
    settings = ", ".join(f"{name} {value}" for name, value in found.settings.items() if name not in _NO_CONVENTION)
    part = f"part {column.part}" if column.part else "the run's own"
    return f"{part}, n = {found.n}; {digests or 'no digests'}; {settings or 'no settings recorded'}"


def _versions(entries: Sequence[Entry]) -> list[str]:
    """A note on every package that was not the same; figures stay comparable, their last digits may not."""
    notes = []
    for name in _VERSIONS:
        found = {entry.label: entry.manifest.versions.get(name, "unknown") for entry in entries}
        if len(set(found.values())) > 1:
            notes.append(f"made with different versions of {name}: {', '.join(f'{v} ({k})' for k, v in found.items())}")
    return notes


__all__ = ["LANGUAGE", "Cell", "Column", "Comparison", "Entry", "compare", "labels", "load_entry"]
