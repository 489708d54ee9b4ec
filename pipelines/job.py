"""The job itself, after all checks: quantise, write, read back, measure, work out the cards, and bind it all in the manifest."""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch

from calib.blockwise import BlockwiseDriver, check_linears
from calib.held import Held
from calib.quantise import Quantised, Sink, TensorSink, quantise_without_data
from calib.tune import tune
from eval.perplexity import WindowLosses
from eval.plots import run_plot
from eval.rows import rows_bytes
from formats.engine_config import output_config, quantization_config
from formats.experts import unfuse_experts, use_stored_names
from formats.fates import Quantise
from formats.folder import REPORT_NAME, WINDOWS_NAME
from formats.kv_files import CONFIG_KEY, kv_config
from formats.manifest import FileRecord, HashedFile, Manifest, RunRecord
from formats.output import OutputFolder
from formats.skeleton import Skeleton
from formats.writer import ShardedWriter, WrittenFile, copy_file, hash_file, write_bytes_atomically
from pipelines.kv import CalibratedCache, calibrate_cache, check_cache
from pipelines.ledger import build_manifest
from pipelines.measuring import measure, measure_float
from pipelines.memory import give_back_freed_memory, peak_rss_bytes, restart_peak
from pipelines.prepare import Prepared, header_metadata
from pipelines.progress import Progress
from pipelines.target import TargetSearch
from pipelines.text import CalibrationText, calibration_text
from quant.quantizer import Note, get_quantizer


@dataclass(frozen=True, slots=True)
class Finished:
    """The manifest as written, and the SHA-256 of its file."""

    manifest: Manifest
    sha256: str


class Job:
    """One run: ``execute`` does the work and leaves ``output`` complete or untouched."""

    def __init__(self, prepared: Prepared, progress: Progress) -> None:
        self.prepared = prepared
        self.progress = progress
        self.started = datetime.datetime.now(datetime.UTC)
        self._quantise_peak = self._float_peak = 0
        self._calibration_text: CalibrationText | None = None

    def execute(self) -> Finished:
        """Do everything. Raises a BitledgerError and leaves nothing under the output's name when a step fails."""
        request = self.prepared.request
        source_files = self._hash_source()
        with OutputFolder(request.output, request.force) as folder:
            before, warning = self._float()
            result, written = self._stored(folder)
            result.notes += [] if warning is None else [warning]
            self._quantise_peak = peak_rss_bytes()
            config = self._config(folder)
            cache = self._cache(folder, written, result)
            written = written if cache is None else cache.stored.written
            files = [
                FileRecord(name=file.name, nbytes=file.nbytes, sha256=file.sha256, role=cast(Any, file.role)) for file in written
            ]
            files += self._side_files(folder)
            files += [config, *(cache.files() if cache is not None else ())]
            measurements, rows, notes = measure(folder, self.prepared, files, source_files, cache, before, self.progress)
            result.notes += notes
            files.append(_write(folder, WINDOWS_NAME, rows_bytes(rows), "side"))
            manifest = build_manifest(
                self.prepared,
                folder=folder,
                result=result,
                written=written,
                files=files,
                measurements=measurements,
                source_files=source_files,
                run=self._run(),
                kv_cache=None if cache is None else cache.stored.record,
            )
            files.append(_write(folder, REPORT_NAME, run_plot(manifest, rows), "side"))
            manifest = manifest.model_copy(update={"files": sorted(files, key=lambda file: file.name)})
            sha256 = manifest.save(folder)
        return Finished(manifest, sha256)

    def _hash_source(self) -> list[HashedFile]:
        """Hash weight files, index and configuration of the source: the subject of the float measurement."""
        checkpoint = self.prepared.checkpoint
        names = [file.name for file in checkpoint.weight_files] + ["config.json"]
        names += [name for name in ("model.safetensors.index.json",) if (checkpoint.folder / name).is_file()]
        found = []
        with self.progress.stage("hash source", total=len(names), unit="file") as report:
            for done, name in enumerate(names, start=1):
                path = checkpoint.folder / name
                nbytes, sha256 = hash_file(path)
                found.append(HashedFile(name=name, nbytes=nbytes, sha256=sha256))
                report(done, len(names))
        return found

    def _float(self) -> tuple[WindowLosses, Note | None]:
        """The float model's losses, before any work is built on it; its memory does not count as the quantiser's."""
        found = measure_float(self.prepared, self.progress)
        give_back_freed_memory()
        self._float_peak = peak_rss_bytes()
        restart_peak()
        return found

    def _stored(self, folder: Path) -> tuple[Quantised, tuple[WrittenFile, ...]]:
        """Weights and config.json in ``folder``; where a size is to be met, those of the better candidate."""
        if self.prepared.request.target is None:
            return self._quantise(folder)
        search = TargetSearch(self.prepared, self.progress, self._candidate)
        self.prepared, result, written = search.run(folder)
        return result, written

    def _candidate(self, folder: Path, prepared: Prepared) -> tuple[Quantised, tuple[WrittenFile, ...]]:
        self.prepared = prepared
        made = self._quantise(folder)
        self._config(folder)
        return made

    def _quantise(self, folder: Path) -> tuple[Quantised, tuple[WrittenFile, ...]]:
        prepared, request = self.prepared, self.prepared.request
        groups = [plan.stored for plan in prepared.plans]
        metadata = header_metadata(request.method.name, prepared.plans)
        skeleton = Skeleton(prepared.checkpoint.folder)
        use_stored_names(skeleton, prepared.checkpoint.tensors)
        skeleton.check_stored({name: info.shape for name, info in prepared.checkpoint.tensors.items()})
        result = Quantised(notes=check_cache(skeleton.model.config, prepared.kv))
        if request.self_written_windows and request.calibrates:
            result.notes.append(self._text().note())
        with ShardedWriter(folder, groups, metadata, request.shard_bytes) as writer:
            sink = TensorSink(writer, result, prepared.plans)
            if request.tune_steps:
                held = Held()
                self._codes(skeleton, held, result)
                self._tune(held, result)
                held.write(sink, prepared.checkpoint)
            else:
                self._codes(skeleton, sink, result)
            return result, writer.finish()

    def _codes(self, skeleton: Skeleton, sink: Sink, result: Quantised) -> None:
        """Put what the method makes of every tensor into ``sink``."""
        prepared, request = self.prepared, self.prepared.request
        for fate in {plan.fate for plan in prepared.plans if isinstance(plan.fate, Quantise)}:
            get_quantizer(fate.quantizer, fate.options)  # refuses options that it does not have, before any work
        if not request.needs_calibration:
            with self.progress.stage("quantise", unit="tensor") as report:
                quantise_without_data(prepared.checkpoint, prepared.plans, sink, report)
            return
        unfuse_experts(skeleton, prepared.checkpoint.tensors)
        check_linears(skeleton, prepared.plans)
        driver = BlockwiseDriver(
            prepared.checkpoint,
            prepared.plans,
            sink,
            result,
            skeleton,
            method=request.method,
            device=request.device,
            clip=request.clip,
            learn_iterations=request.learn_iterations,
            smoothing=request.smoothing,
        )
        with self.progress.stage("quantise") as report:
            driver.run(self._text().training, request.batch, report)

    def _tune(self, held: Held, result: Quantised) -> None:
        request, text = self.prepared.request, self._text()
        with self.progress.stage("tune", unit="step") as report:
            tuned = tune(
                held,
                self.prepared.checkpoint,
                text.training,
                text.held_back,
                steps=request.tune_steps,
                seed=request.seed,
                device=request.device,
                batch=request.batch,
                report=report,
            )
        result.notes.append(tuned.note)

    def _text(self) -> CalibrationText:
        """The windows to calibrate on, made once: those of the corpus, and those that the float model writes itself."""
        if self._calibration_text is None:
            self._calibration_text = calibration_text(self.prepared, self.progress)
        return self._calibration_text

    def _side_files(self, folder: Path) -> list[FileRecord]:
        found = []
        for name in self.prepared.checkpoint.side_files():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            nbytes, sha256 = copy_file(self.prepared.checkpoint.folder / name, target)
            found.append(FileRecord(name=name, nbytes=nbytes, sha256=sha256, role="side"))
        return found

    def _config(self, folder: Path) -> FileRecord:
        """config.json as in the source with exactly one quantisation block, untied where both halves of a pair are stored."""
        kv = self.prepared.kv
        block = quantization_config(self.prepared.plans, None if kv is None else kv.scheme)
        plain = output_config(self.prepared.checkpoint.plain_config(), self.prepared.plans)
        config = plain | ({} if kv is None else {CONFIG_KEY: kv_config(kv)}) | {"quantization_config": block}
        data = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
        return _write(folder, "config.json", data, "config")

    def _cache(self, folder: Path, written: tuple[WrittenFile, ...], result: Quantised) -> CalibratedCache | None:
        """The cache's scales, calibrated on what was just written and stored beside it, where a cache was asked for."""
        plan = self.prepared.kv
        if plan is None:
            return None
        found = calibrate_cache(folder, self.prepared, plan, written, lambda: self._text().training, self.progress)
        result.records = found.stored.moved(result.records)
        result.notes += found.notes
        return found

    def _run(self) -> RunRecord:
        return RunRecord(
            started_utc=self.started.isoformat(timespec="seconds"),
            seconds={name: round(seconds, 3) for name, seconds in self.progress.seconds.items()},
            quantise_peak_rss_bytes=self._quantise_peak,
            peak_rss_bytes=max(self._float_peak, peak_rss_bytes()),
            threads=torch.get_num_threads(),
        )


def _write(folder: Path, name: str, data: bytes, role: Literal["config", "side"]) -> FileRecord:
    return FileRecord(name=name, nbytes=len(data), sha256=write_bytes_atomically(folder / name, data), role=role)
