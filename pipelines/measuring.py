"""What a run measures before its manifest is written: the float model, the files just written, and their cache."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.measurement import ln_ratio_measurement, perplexity_measurement
from eval.perplexity import WindowLosses, window_losses
from eval.rows import window_rows
from eval.sanity import broken_baseline, first_nonfinite, poor_baseline
from eval.stats import mean_loss, paired_difference
from formats.manifest import FileRecord, HashedFile, MeasurementRecord
from formats.reader import load_model
from pipelines.kv import CalibratedCache, measure_stored_cache
from pipelines.prepare import Prepared
from pipelines.progress import Progress
from quant.errors import GateFailed, NonFiniteTensor
from quant.quantizer import Note

if TYPE_CHECKING:
    import pandas as pd


def measure_float(prepared: Prepared, progress: Progress) -> tuple[WindowLosses, Note | None]:
    """Losses of the float model, and a note where it does poorly.

    Raises:
        NonFiniteTensor: a module of the model gives NaN or infinities, with its name.
        GateFailed: the model is broken otherwise, so that nothing could be judged against it.
    """
    model, losses = _losses("evaluate float", prepared.checkpoint.folder, prepared, progress)
    place = first_nonfinite(model, prepared.evaluation.ids[0]) if losses.nonfinite and len(prepared.evaluation.ids) else None
    if place is not None:
        raise NonFiniteTensor(f"{prepared.source.requested}: outputs of {place} are not finite: check the source weights there")
    config = prepared.checkpoint.plain_config()
    vocabulary = int(config.get("text_config", config)["vocab_size"])
    why = broken_baseline(losses, vocabulary)
    if why is not None:
        raise GateFailed(f"{prepared.source.requested}: {why}")
    warning = poor_baseline(losses, prepared.evaluation.ids)
    return losses, None if warning is None else Note("poor-baseline", warning)


def measure(
    folder: Path,
    prepared: Prepared,
    files: list[FileRecord],
    source_files: list[HashedFile],
    cache: CalibratedCache | None,
    before: WindowLosses,
    progress: Progress,
) -> tuple[list[MeasurementRecord], pd.DataFrame, list[Note]]:
    """Perplexity of the float model and of the files in ``folder`` on the same windows, their paired difference, the rows.

    ``before`` are the float model's losses, from ``measure_float``.
    Where a cache was asked for, also what it costs when it is in the loop at every position; then there may be notes.
    """
    subject = {file.name: file.sha256 for file in files if file.role == "weights"}
    baseline = {file.name: file.sha256 for file in source_files if file.name.endswith(".safetensors")}
    _, after = _losses("evaluate artefact", folder, prepared, progress)
    seed, windows = prepared.request.seed, prepared.evaluation
    found = [
        perplexity_measurement(before, mean_loss(before, seed=seed), windows=windows, subject=baseline, name="perplexity_float"),
        perplexity_measurement(after, mean_loss(after, seed=seed), windows=windows, subject=subject),
        ln_ratio_measurement(paired_difference(after, before, seed=seed), windows=windows, subject=subject, baseline=baseline),
    ]
    records = [MeasurementRecord.model_validate(measurement.record()) for measurement in found]
    if cache is None or prepared.kv is None:
        return records, window_rows(before, after, windows), []
    more, quality, notes = measure_stored_cache(
        folder,
        prepared,
        prepared.kv,
        cache,
        after,
        subject=subject | {file.name: file.sha256 for file in cache.files()},
        baseline=baseline,
        progress=progress,
    )
    return records + more, window_rows(before, after, windows, quality.losses), list(notes)


def _losses(stage: str, folder: Path, prepared: Prepared, progress: Progress) -> tuple[Any, WindowLosses]:
    with progress.stage(stage, unit="window") as report:
        model = load_model(folder).to(prepared.request.device)
        return model, window_losses(model, prepared.evaluation, batch=prepared.request.batch, progress=report)
