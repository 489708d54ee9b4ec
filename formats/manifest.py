"""The manifest: one ledger that binds the bytes of an artefact to what was done, measured and implied.

``manifest.json`` lies beside the weights and is written last, once, atomically. Every source tensor has exactly one fate, the
byte ledger sums to the size of every weight file, every other file is listed with its hash. Unknown keys are refused, so that a
newer manifest is never read as an older one. Nothing here imports torch.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from formats.gates import BoundRecord, GateRecord
from formats.records import (
    BitsPerWeight,
    Deployment,
    Digests,
    EvaluationRecord,
    FileRecord,
    HashedFile,
    IntervalRecord,
    Json,
    KvCacheRecord,
    LedgerLine,
    MeasurementRecord,
    NoteRecord,
    PartRecord,
    Record,
    RunRecord,
    SourceRecord,
    TensorRecord,
    WindowsRecord,
    stored_bits_per_weight,
)
from formats.writer import write_bytes_atomically
from quant.errors import CoverageError, VerifyError

__all__ = [
    "BitsPerWeight",
    "BoundRecord",
    "Deployment",
    "Digests",
    "EvaluationRecord",
    "FileRecord",
    "GateRecord",
    "HashedFile",
    "IntervalRecord",
    "KvCacheRecord",
    "LedgerLine",
    "Manifest",
    "MeasurementRecord",
    "NoteRecord",
    "PartRecord",
    "RunRecord",
    "SourceRecord",
    "TensorRecord",
    "WindowsRecord",
    "build_bits_per_weight",
    "build_ledger",
    "stored_bits_per_weight",
    "versions",
]

NAME = "manifest.json"
FORMAT: Literal["bitledger-manifest/1"] = "bitledger-manifest/1"
MAX_BYTES = 200_000_000
_DISTRIBUTIONS = ("bitledger", "torch", "transformers", "numpy", "safetensors", "tokenizers")
_SHOWN = 8


class Manifest(Record):
    """The whole ledger; see the module. ``recipe`` and ``options`` are what was asked for, as JSON."""

    format: Literal["bitledger-manifest/1"] = FORMAT
    method: str
    recipe: Json
    options: Json
    seed: int
    source: SourceRecord
    tensors: list[TensorRecord]
    ledger: list[LedgerLine]
    bits_per_weight: BitsPerWeight
    files: list[FileRecord]
    digests: Digests
    versions: dict[str, str]
    measurements: list[MeasurementRecord]
    cards: list[Json]
    notes: list[NoteRecord]
    deployment: Deployment
    run: RunRecord
    kv_cache: KvCacheRecord | None = None
    evaluations: list[EvaluationRecord] = Field(default_factory=list)
    gates: list[GateRecord] = Field(default_factory=list)

    @classmethod
    def load(cls, path: Path) -> Manifest:
        """Read a manifest, or the one in the folder ``path``.

        Raises:
            VerifyError: no such file, not JSON, another format, or a key or value that does not belong.
        """
        path = path / NAME if path.is_dir() else path
        try:
            with path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise VerifyError(f"no readable {NAME} at {path}: {error.strerror or error}") from None
        if len(data) > MAX_BYTES:
            raise VerifyError(f"{path} is larger than {MAX_BYTES} bytes: not a manifest of this tool")
        return cls.parse(data, str(path))

    @classmethod
    def parse(cls, data: bytes, where: str = NAME) -> Manifest:
        """The manifest in ``data``; ``where`` names it in the message. Raises VerifyError."""
        try:
            found = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise VerifyError(f"{where} is not JSON: {error}") from None
        kind = found.get("format") if isinstance(found, dict) else None
        if kind != FORMAT:
            raise VerifyError(f"{where} has format {kind!r}, expected {FORMAT!r}: made by another version or another tool")
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(step) for step in first["loc"])
            raise VerifyError(f"{where}: {place}: {first['msg']} ({error.error_count()} in all)") from None

    def text(self) -> str:
        """The file's content: keys in the order of the schema, one stable spelling, UTF-8, strict JSON."""
        return json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    def save(self, folder: Path) -> str:
        """Check the ledger against itself and against the files in ``folder``, then write atomically; returns the SHA-256.

        Raises:
            CoverageError: the ledger does not sum, or a listed file is missing or of another size.
        """
        self.check_ledger()
        for file in self.files:
            path = folder / file.name
            actual = path.stat().st_size if path.is_file() else None
            if actual != file.nbytes:
                raise CoverageError(f"{file.name}: {file.nbytes} bytes in the manifest, {actual} on disk; no manifest is written")
        return write_bytes_atomically(folder / NAME, self.text().encode())

    def weights(self) -> dict[str, str]:
        """Weight file to SHA-256: what an evaluation measures and a gate judges."""
        return {file.name: file.sha256 for file in self.files if file.role == "weights"}

    def stored_parts(self) -> list[PartRecord]:
        """Every tensor in the weight files: those that source tensors became, and what engines read of a cache."""
        return [part for record in self.tensors for part in record.parts] + self.weight_scales()

    def weight_scales(self) -> list[PartRecord]:
        """The cache's scales as far as they lie in a weight file."""
        return scales_in_weights(self.kv_cache, {line.file for line in self.ledger})

    def check_coverage(self, source_names: Iterable[str]) -> None:
        """Raise CoverageError unless every source tensor has exactly one record (an alias or a copy may be new)."""
        counts = Counter(record.name for record in self.tensors)
        names = set(source_names)
        made = {record.name for record in self.tensors if record.fate == "alias" or record.copy_of in names}
        problems = {
            "without a fate": sorted(names - set(counts)),
            "with more than one fate": sorted(name for name, count in counts.items() if count > 1),
            "that the source does not have": sorted(set(counts) - names - made),
        }
        for what, found in problems.items():
            if found:
                more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
                raise CoverageError(f"{len(found)} tensors {what}: {', '.join(found[:_SHOWN])}{more}")

    def check_ledger(self) -> None:
        """Raise CoverageError at the first sum that does not hold: records, stored names, aliases, ledger lines, totals."""
        for record in self.tensors:
            record.check()
        self.check_coverage(record.name for record in self.tensors)
        if self.kv_cache is not None:
            self.kv_cache.check()
        stored = Counter(part.name for part in self.stored_parts())
        repeated = sorted(name for name, count in stored.items() if count > 1)
        if repeated:
            raise CoverageError(f"stored tensors that belong to two records: {', '.join(repeated[:_SHOWN])}")
        owners = {record.name for record in self.tensors if record.fate != "alias"}
        for record in self.tensors:
            if record.alias_of is not None and record.alias_of not in owners:
                raise CoverageError(f"{record.name} is an alias of {record.alias_of}, which is not stored")
        listed = {file.name for file in self.files}
        for evaluation in self.evaluations:
            if evaluation.rows is not None and evaluation.rows not in listed:
                raise CoverageError(f"evaluation {evaluation.part}: its rows {evaluation.rows} are not among the files")
        sizes = {file.name: file.nbytes for file in self.files if file.role == "weights"}
        if sizes != {line.file: line.total_bytes for line in self.ledger} or len(self.ledger) != len(sizes):
            totals = [(line.file, line.total_bytes) for line in self.ledger]
            raise CoverageError(f"the ledger's totals {totals} are not the sizes of the weight files {sizes}")
        expected = build_ledger(self.tensors, {line.file: line.header_bytes for line in self.ledger}, self.weight_scales())
        for line, right in zip(self.ledger, expected, strict=True):
            if line != right:
                raise CoverageError(f"{line.file}: the ledger says {_sums(line)}, but its tensors give {_sums(right)}")
        total = build_bits_per_weight(self.tensors, self.ledger)
        if self.bits_per_weight != total:
            raise CoverageError(f"bits per weight recorded as {self.bits_per_weight!r}, but the records give {total!r}")


def _sums(line: LedgerLine) -> str:
    return ", ".join(f"{name} {value}" for name, value in line if name != "file")


def scales_in_weights(cache: KvCacheRecord | None, weight_files: Collection[str]) -> list[PartRecord]:
    """The parts of a cache's record that lie in one of ``weight_files``."""
    return [part for part in cache.parts if part.file in weight_files] if cache is not None else []


def build_ledger(
    tensors: Iterable[TensorRecord], header_bytes: Mapping[str, int], others: Iterable[PartRecord] = ()
) -> list[LedgerLine]:
    """One line per weight file (the keys of ``header_bytes``, in their order) from the parts' recorded bytes.

    ``others`` are stored tensors that belong to no source tensor.

    Raises CoverageError for a part in a file that has no header count.
    """
    sums = {file: Counter[str]() for file in header_bytes}
    for part in [*(part for record in tensors for part in record.parts), *others]:
        if part.file not in sums:
            raise CoverageError(f"{part.name} is recorded in {part.file}, which is no weight file of the ledger")
        sums[part.file][part.role] += part.nbytes
    return [
        LedgerLine(
            file=file,
            codes_bytes=roles["codes"],
            scales_bytes=roles["scales"],
            zeros_bytes=roles["zeros"],
            shape_bytes=roles["shape"],
            kept_bytes=roles["kept"],
            header_bytes=header_bytes[file],
            total_bytes=roles.total() + header_bytes[file],
            kv_scales_bytes=roles["kv_scales"],
            input_scales_bytes=roles["input_scales"],
        )
        for file, roles in sums.items()
    ]


def build_bits_per_weight(tensors: Iterable[TensorRecord], ledger: Iterable[LedgerLine]) -> BitsPerWeight:
    """Both figures with their denominators; the quantised one is None when nothing was quantised."""
    stored = [record for record in tensors if record.fate != "alias"]
    quantised = [record for record in stored if record.fate == "quantised"]
    every = sum(record.elements for record in stored if record.copy_of is None)
    if not every:
        raise CoverageError("no tensor of the manifest has any elements")
    elements = sum(record.elements for record in quantised)
    parts = [part for record in quantised for part in record.parts]
    return BitsPerWeight(
        quantised=stored_bits_per_weight(parts, elements) if elements else None,
        whole_file=8 * sum(line.total_bytes for line in ledger) / every,
        quantised_elements=elements,
        all_elements=every,
    )


def versions() -> dict[str, str]:
    """What computed: distributions by their installed metadata (nothing is imported), Python, platform and CPU architecture."""
    found = {"python": platform.python_version(), "platform": platform.platform(), "cpu": platform.machine()}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return dict(sorted(found.items()))
