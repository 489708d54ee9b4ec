"""Writes the calibrated scales of a cache: as the last weight file where engines read them, else as a side file.

The weights are finished by then. Weight files are numbered, so that one more renames the others; their bytes do not change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from formats.atomic import sync_folder, write_bytes_atomically
from formats.finite import nonfinite_in
from formats.folder import INDEX_NAME
from formats.kv_files import SIDE_NAME, KvPlan, scales_file, shard_names
from formats.records import KvCacheRecord, PartRecord, TensorRecord
from formats.shards import ShardPlan, plan_index
from formats.writer import WrittenFile
from quant.errors import CoverageError, NonFiniteTensor

Scales = Mapping[tuple[str, int], NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class StoredCache:
    """What came of it: the cache's record, all files as they are now called, and the new names of weight files by old ones."""

    record: KvCacheRecord
    written: tuple[WrittenFile, ...]
    side: tuple[str, int, str] | None
    renamed: dict[str, str]

    def moved(self, records: Sequence[TensorRecord]) -> list[TensorRecord]:
        """The records with the weight files' new names."""
        return [
            record.model_copy(
                update={
                    "parts": [part.model_copy(update={"file": self.renamed.get(part.file, part.file)}) for part in record.parts]
                }
            )
            for record in records
        ]


def store_cache(
    folder: Path,
    plan: KvPlan,
    scales: Scales,
    written: Sequence[WrittenFile],
    metadata: Mapping[str, str],
    *,
    calibration_tokens: int,
) -> StoredCache:
    """Write the scales that ``plan`` wants into ``folder``, which holds the ``written`` weight files.

    Args:
        scales: float32 by (side, layer), of the planned shapes.
        metadata: the header's, as in the other weight files.

    Raises:
        CoverageError: a scale that is missing or of another shape.
        NonFiniteTensor: a scale that is not finite.
        OutputError: the disk is full or refuses.
    """
    renamed: dict[str, str] = {}
    files: tuple[WrittenFile, ...] = tuple(written)
    side: tuple[str, int, str] | None = None
    name: str | None = None
    if plan.scales:
        data = _payload(plan, scales)
        if plan.for_engines:
            files, renamed = _append(folder, plan, data, written, metadata)
            name = [file.name for file in files if file.role == "weights"][-1]
        else:
            name = SIDE_NAME
            (folder / name).parent.mkdir(exist_ok=True)
            whole = scales_file(name, plan, metadata).header + data
            side = (name, len(whole), write_bytes_atomically(folder / name, whole))
    parts = [
        PartRecord(name=spec.name, file=str(name), dtype=spec.dtype, shape=list(spec.shape), nbytes=spec.nbytes, role="kv_scales")
        for spec in plan.specs
    ]
    record = KvCacheRecord(
        scheme=str(plan.scheme),
        layers=plan.layers,
        kv_heads=plan.kv_heads,
        head_dim=plan.head_dim,
        bytes_per_token=plan.bytes_per_token,
        static_bytes=plan.static_bytes,
        calibration_tokens=calibration_tokens if plan.scales else 0,
        file=name,
        parts=parts,
    )
    return StoredCache(record, files, side, renamed)


def _payload(plan: KvPlan, scales: Scales) -> bytes:
    found = []
    for side, layer, spec in plan.scales:
        value = scales.get((side, layer))
        if value is None or value.size * 4 != spec.nbytes:
            shape = None if value is None else value.shape
            raise CoverageError(f"the calibrated scale {spec.name} has shape {shape}, planned was {list(spec.shape)}")
        raw = np.ascontiguousarray(value, dtype="<f4").reshape(-1).view(np.uint8)
        bad = nonfinite_in(raw, spec.dtype, spec.shape)
        if bad is not None:
            raise NonFiniteTensor(f"the calibrated scale {spec.name} has a value that is not finite: nothing is written")
        found.append(raw.tobytes())
    return b"".join(found)


def _append(
    folder: Path, plan: KvPlan, data: bytes, written: Sequence[WrittenFile], metadata: Mapping[str, str]
) -> tuple[tuple[WrittenFile, ...], dict[str, str]]:
    """The scales as one more weight file; every weight file of now is renamed and the index written anew."""
    weights = [file for file in written if file.role == "weights"]
    names = shard_names(len(weights) + 1)
    renamed = {file.name: name for file, name in zip(weights, names, strict=False)}
    for file in weights:
        (folder / file.name).rename(folder / renamed[file.name])
    moved = [dataclasses.replace(file, name=renamed[file.name]) for file in weights]
    shard = scales_file(names[-1], plan, metadata)
    sha256 = write_bytes_atomically(folder / shard.name, shard.header + data)
    tensors = {spec.name: spec for spec in plan.specs}
    moved.append(WrittenFile(shard.name, shard.nbytes, sha256, shard.header_bytes, tensors))
    index = plan_index([ShardPlan(file.name, tuple(file.tensors.values()), b"") for file in moved])
    assert index is not None  # two files at least
    digest = write_bytes_atomically(folder / INDEX_NAME, index)
    sync_folder(folder)
    return (*moved, WrittenFile(INDEX_NAME, len(index), digest, 0, {}, "index")), renamed
