"""What one part of an evaluation gives: its measurements, a row for every window or item, and what must be said about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from eval.measurement import Measurement

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class PartResult:
    """The finished part ``part`` (letters, digits, ``-``, ``.``, ``_``: it names a file).

    Attributes:
        measurements: each gets the part's name when it goes into the manifest.
        rows: one row per window or item, for ``evaluations/PART.parquet``; None when there is nothing below the measurements.
        subject: file to SHA-256 of what was evaluated.
        settings: conventions that hold for the whole part, as text.
        notes: sentences: what was skipped and why.
    """

    part: str
    measurements: tuple[Measurement, ...]
    rows: pd.DataFrame | None
    subject: Mapping[str, str]
    seconds: float
    settings: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def named(self) -> tuple[Measurement, ...]:
        """The measurements with the part's name."""
        return tuple(replace(measurement, part=self.part) for measurement in self.measurements)
