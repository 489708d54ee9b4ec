"""The cache's part of a run: calibrated on the finished artefact, stored beside it, measured with it in the loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eval.kv_quality import BLAME_TOKENS, KvQuality, blamed_layers, cache_measurements, cache_warning, measure_cache
from eval.kvcache import SLIDING, KvEvidence, StaticScales, WithCache, calibrate, check_config, layer_kinds
from eval.perplexity import WindowLosses
from formats.kv_files import KvPlan
from formats.kv_write import StoredCache, store_cache
from formats.manifest import FileRecord, MeasurementRecord
from formats.reader import load_model
from formats.writer import WrittenFile
from pipelines.prepare import Prepared, header_metadata
from pipelines.progress import Progress
from quant.errors import SchemeError
from quant.quantizer import Note


@dataclass(frozen=True, slots=True)
class CalibratedCache:
    """What was stored of the cache, and the scales as they were stored."""

    stored: StoredCache
    scales: StaticScales | None
    notes: tuple[Note, ...]

    def files(self) -> list[FileRecord]:
        """The side file with the scales, where there is one; weight files are in ``stored.written``."""
        side = self.stored.side
        return [] if side is None else [FileRecord(name=side[0], nbytes=side[1], sha256=side[2], role="side")]


def calibrate_cache(
    folder: Path,
    prepared: Prepared,
    plan: KvPlan,
    written: tuple[WrittenFile, ...],
    text: Callable[[], Tensor],
    progress: Progress,
) -> CalibratedCache:
    """Find the scales of a static scheme on the artefact in ``folder`` and store them.

    The artefact and not the float model: folds and rounding change what its matrices put into the cache.

    Args:
        text: gives the calibration windows ``[n, length]``, asked for only where scales are calibrated.

    Raises:
        SchemeError: scales that are not finite, or all the same.
    """
    request = prepared.request
    scales: StaticScales | None = None
    notes: list[Note] = []
    values: dict[tuple[str, int], np.ndarray] = {}
    tokens = 0
    if plan.scheme.static:
        ids = text()
        tokens = ids.numel()
        with progress.stage("calibrate cache", unit="window") as report:
            evidence = calibrate(load_model(folder).to(request.device), ids, request.batch, report)
        scales = evidence.scales(plan.scheme)
        scales.check()
        values = _values(scales)
        notes += _odd(evidence, plan)
    stored = store_cache(
        folder, plan, values, written, header_metadata(request.method.name, prepared.plans), calibration_tokens=tokens
    )
    return CalibratedCache(stored, scales, tuple(notes))


def _values(scales: StaticScales) -> dict[tuple[str, int], np.ndarray]:
    sides = (("keys", scales.keys), ("values", scales.values))
    return {(side, n): s.cpu().numpy() for side, each in sides for n, s in enumerate(each) if s is not None}


def _odd(evidence: KvEvidence, plan: KvPlan) -> list[Note]:
    """Key channels that are huge beside the others: one scale for a whole layer drowns these."""
    layers = evidence.odd_layers() if plan.scheme.keys == "tensor" else []
    if not layers:
        return []
    return [
        Note(
            "kv-cache",
            f"keys of layers {', '.join(map(str, layers))} have channels more than 20 times larger than the median one, and one "
            "scale per layer for all of them: see the measured perplexity_kv, or use --kv-cache int8 (a scale per channel)",
        )
    ]


def measure_stored_cache(
    folder: Path,
    prepared: Prepared,
    plan: KvPlan,
    cache: CalibratedCache,
    after: WindowLosses,
    *,
    subject: Mapping[str, str],
    baseline: Mapping[str, str],
    progress: Progress,
) -> tuple[list[MeasurementRecord], KvQuality, list[Note]]:
    """Measure the artefact with its quantised cache on the evaluation windows; notes name the layers where it costs too much."""
    request, windows = prepared.request, prepared.evaluation
    reference = load_model(prepared.checkpoint.folder).to(request.device)
    model = load_model(folder).to(request.device)
    scales = _on(cache.scales, request.device)
    cached = WithCache(model, plan.scheme, scales)
    with progress.stage("evaluate cache", unit="window") as report:
        quality = measure_cache(reference, model, cached, windows, report)
    found = cache_measurements(quality, after, plan.scheme, windows, subject, baseline, request.seed)
    ids = torch.tensor(windows.ids[:1, :BLAME_TOKENS], device=request.device)
    warning = cache_warning(quality, after, plan.scheme, lambda: blamed_layers(model, plan.scheme, scales, ids))
    notes = [] if warning is None else [Note("kv-cache-quality", warning)]
    return [MeasurementRecord.model_validate(each.record()) for each in found], quality, notes


def _on(scales: StaticScales | None, device: str) -> StaticScales | None:
    if scales is None:
        return None
    return StaticScales(*([None if s is None else s.to(device) for s in each] for each in (scales.keys, scales.values)))


def check_cache(config: Any, plan: KvPlan | None) -> list[Note]:
    """Notes on a model's cache. Raises SchemeError where it cannot be quantised; asked before any work on the weights."""
    if plan is None:
        return []
    text = check_config(config, plan.scheme)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if (text.num_hidden_layers, kv_heads, head_dim) != (plan.layers, plan.kv_heads, plan.head_dim):
        raise SchemeError(
            f"{plan.scheme}: config.json gives a cache of {plan.layers} x {plan.kv_heads} x {plan.head_dim}, the architecture "
            f"one of {text.num_hidden_layers} x {kv_heads} x {head_dim}"
        )
    windowed = layer_kinds(text).count(SLIDING)
    if not windowed:
        return []
    return [
        Note(
            "kv-cache",
            f"{windowed} of {plan.layers} layers look at a sliding window; bytes per token are counted as if they kept "
            "all tokens, as this project's cache does",
        )
    ]
