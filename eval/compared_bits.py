"""Bits per weight of the same matrices in every artefact of a comparison.

An artefact that leaves a third of its matrices in float has fewer bits in its quantised matrices than one that quantises all, not
in the model. So all are counted over the same matrices: those that at least one of the artefacts quantises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from formats.manifest import Manifest
from formats.records import TensorRecord, stored_bits_per_weight

_COUNTED = ("codes", "scales", "zeros", "kept")


@dataclass(frozen=True, slots=True)
class LinearsBits:
    """8 x (codes + scales + zeros, or float bytes where kept) / elements; None where nothing is quantised anywhere."""

    value: float | None
    source: str
    note: str = ""


def linears_bits(manifests: Sequence[Manifest]) -> list[LinearsBits]:
    """One figure for each manifest; they are of the same source."""
    names = {record.name for manifest in manifests for record in manifest.tensors if record.fate == "quantised"}
    return [_linears_bits(manifest, names) for manifest in manifests]


def _linears_bits(manifest: Manifest, names: set[str]) -> LinearsBits:
    own = {record.name for record in manifest.tensors if record.fate == "quantised"}
    if not names:
        return LinearsBits(None, "bits_per_weight.quantised", "no matrix is quantised")
    if own == names:
        return LinearsBits(manifest.bits_per_weight.quantised, "bits_per_weight.quantised")
    records = {record.name: record for record in manifest.tensors}
    bits, elements = 0.0, 0
    for name in sorted(names):
        record = _stored(records, name)
        if record is not None:
            bits += _bits(record) * record.elements
            elements += record.elements
    kept = len(names - own)
    note = f"{kept} of the {len(names)} matrices that others quantise are in float here and counted as such"
    return LinearsBits(bits / elements, f"tensors[*].parts of {len(names)} matrices", note)


def _stored(records: dict[str, TensorRecord], name: str) -> TensorRecord | None:
    """The record that holds the values of ``name``: itself, what it is an alias of, or None (a copy that only others made)."""
    record = records.get(name)
    return records.get(record.alias_of) if record is not None and record.alias_of is not None else record


def _bits(record: TensorRecord) -> float:
    if record.fate == "quantised":
        return stored_bits_per_weight(record.parts, record.elements)
    return 8 * sum(part.nbytes for part in record.parts if part.role in _COUNTED) / record.elements
