"""Meeting a size: allocate widths by measured sensitivity, try the allocation against the best uniform scheme, keep the better.

Both candidates are quantised by the method of the run and read back from their files; what decides is their perplexity on the
calibration windows. So an allocation is never shipped because a proxy liked it.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from calib.capture import BlockRunner
from calib.quantise import Quantised
from calib.sensitivity import measure_units
from calib.windows import Windows
from eval.perplexity import window_losses
from formats.fates import TensorPlan
from formats.reader import load_model
from formats.sizing import best_uniform, matrix_bytes, units_of, with_schemes
from formats.skeleton import Skeleton
from formats.writer import WrittenFile
from pipelines.prepare import Prepared, planned_shards
from pipelines.progress import Progress
from quant.allocation import allocate
from quant.quantizer import Note

MEASURED_WINDOWS = 4
JUDGED_WINDOWS = 8
Quantiser = Callable[[Path, Prepared], tuple[Quantised, tuple[WrittenFile, ...]]]


def with_plans(prepared: Prepared, plans: tuple[TensorPlan, ...]) -> Prepared:
    """The same request with other plans, and the files that those will be written to."""
    return dataclasses.replace(prepared, plans=plans, shards=planned_shards(prepared.request, plans, prepared.kv))


class TargetSearch:
    """Finds the better of two ways to meet the request's size target, and leaves its files in the output folder.

    Args:
        quantise: writes weights and config.json of a prepared request into a folder.
    """

    def __init__(self, prepared: Prepared, progress: Progress, quantise: Quantiser) -> None:
        assert prepared.request.target is not None
        assert prepared.calibration is not None
        self.prepared, self.progress, self.quantise = prepared, progress, quantise
        self.calibration: Windows = prepared.calibration

    def run(self, folder: Path) -> tuple[Prepared, Quantised, tuple[WrittenFile, ...]]:
        """The plans that were kept, what became of every tensor, and the files, which now lie in ``folder``."""
        candidates = self._candidates()
        losses: dict[str, float] = {}
        made = {}
        for name, prepared in candidates.items():
            trial = folder / f".trial-{name}"
            trial.mkdir()
            made[name] = self.quantise(trial, prepared)
            losses[name] = self._loss(name, trial)
        best = min(candidates, key=lambda name: (losses[name], name != "uniform"))
        for name in candidates:
            trial = folder / f".trial-{name}"
            if name == best:
                for path in trial.iterdir():
                    path.rename(folder / path.name)
            shutil.rmtree(trial)
        result, written = made[best]
        result.notes.append(self._note(candidates, losses, best))
        return candidates[best], result, written

    def _candidates(self) -> dict[str, Prepared]:
        prepared, request = self.prepared, self.prepared.request
        assert request.target is not None
        runner = BlockRunner(Skeleton(prepared.checkpoint.folder), prepared.checkpoint.tensor, request.device)
        ids = torch.from_numpy(self.calibration.ids[:MEASURED_WINDOWS].copy())
        with self.progress.stage("sensitivity") as report:
            units = measure_units(runner, prepared.plans, ids, request.batch, report)
        budget = request.target.budget(prepared.plans, sum(shard.nbytes for shard in prepared.shards))
        found = with_plans(prepared, with_schemes(prepared.plans, allocate(units, budget)))
        while request.target.file_bytes is not None and (over := _file_bytes(found) - request.target.file_bytes) > 0:
            budget -= over  # headers name schemes and offsets: their length depends on what was chosen
            found = with_plans(prepared, with_schemes(prepared.plans, allocate(units, budget)))
        return {"allocated": found, "uniform": with_plans(prepared, best_uniform(prepared.plans, budget))}

    def _loss(self, name: str, folder: Path) -> float:
        """Mean nats per token of the stored files on the first calibration windows."""
        judged = dataclasses.replace(self.calibration, ids=self.calibration.ids[:JUDGED_WINDOWS], tail=None)
        with self.progress.stage(f"judge {name}", unit="window") as report:
            model = load_model(folder).to(self.prepared.request.device)
            return window_losses(model, judged, batch=self.prepared.request.batch, progress=report).mean_nats

    def _note(self, candidates: dict[str, Prepared], losses: dict[str, float], best: str) -> Note:
        said = "; ".join(
            f"{name} {_bits_per_weight(prepared.plans):.4f} bits per weight, {losses[name]:.4f} nats per token"
            for name, prepared in candidates.items()
        )
        verdict = (
            "the allocation is kept" if best == "allocated" else "the allocation did not beat the uniform scheme, which is kept"
        )
        return Note("size-target", f"{self.prepared.request.target}, judged on calibration windows: {said}: {verdict}")


def _file_bytes(prepared: Prepared) -> int:
    return sum(shard.nbytes for shard in prepared.shards)


def _bits_per_weight(plans: tuple[TensorPlan, ...]) -> float:
    matrices = [plan for unit in units_of(plans) for plan in unit]
    return 8 * sum(matrix_bytes(plan) for plan in matrices) / sum(plan.info.elements for plan in matrices)
