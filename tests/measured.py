"""Artefacts with made-up measurements, for what judges and compares them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from formats.manifest import Manifest, MeasurementRecord
from formats.records import IntervalRecord
from tests.artefact import build_artefact

FLOAT = {"model.safetensors": "a" * 64}
INPUTS = {"corpus": "c" * 64, "tokenizer": "e" * 64, "windows": "d" * 64}
SETTINGS = {"window_tokens": "512", "stride_tokens": "512", "bos": "none", "first_scored": "1"}
RELATIVE = ("ln_perplexity_ratio", "kl")


def measurement(
    subject: dict[str, str], name: str, value: float | None, half: float | None = 0.01, /, part: str = "", **changes: Any
) -> MeasurementRecord:
    """A measurement on the windows of this module; ``half`` is half of its interval's width, ``changes`` replace fields."""
    interval = None
    if value is not None and half is not None:
        interval = IntervalRecord(low=value - half, high=value + half, level=0.95, method="bootstrap")
    relative = {f"baseline {file}": digest for file, digest in FLOAT.items()} if name in RELATIVE else {}
    record = MeasurementRecord(
        name=name,
        part=part,
        value=value,
        unit="nats/token" if relative else "1",
        n=8,
        interval=interval,
        inputs=INPUTS | relative,
        subject=subject,
        settings=SETTINGS,
    )
    return MeasurementRecord.model_validate({**record.model_dump(), **changes})


def of_run(weights: dict[str, str], ratio: float = 0.25, kl: float | None = None, **changes: Any) -> list[MeasurementRecord]:
    """What a run measures, and the divergence of an evaluation's part ``language`` where ``kl`` is given."""
    found = [
        measurement(FLOAT, "perplexity_float", 20.0, 2.0, **changes),
        measurement(weights, "perplexity", 20.0 * 2.718281828459045**ratio, 2.0, **changes),
        measurement(weights, "ln_perplexity_ratio", ratio, **changes),
    ]
    return found if kl is None else [*found, measurement(weights, "kl", kl, kl / 10, part="language", **changes)]


def measured_artefact(folder: Path, *, seed: int = 0, ratio: float = 0.25, kl: float | None = None, **changes: Any) -> Manifest:
    """A small complete artefact in ``folder`` with the measurements of ``of_run``; it passes ``verify``."""
    manifest = build_artefact(folder, seed=seed)
    return with_measurements(folder, of_run(manifest.weights(), ratio, kl, **changes))


def with_measurements(folder: Path, measurements: list[MeasurementRecord]) -> Manifest:
    """The artefact in ``folder`` with these measurements instead of its own."""
    manifest = Manifest.load(folder).model_copy(update={"measurements": measurements})
    manifest.save(folder)
    return manifest
