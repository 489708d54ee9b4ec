"""The job itself, after all checks: quantise, write, read back, measure, work out the cards, and bind it all in the manifest."""

from __future__ import annotations

import datetime
import hashlib
import json
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from calib.blockwise import BlockwiseDriver, check_architecture
from calib.quantise import Quantised, quantise_without_data
from eval.capacity.implications import implications
from eval.measurement import ln_ratio_measurement, perplexity_measurement, windows_record
from eval.perplexity import WindowLosses, window_losses
from eval.stats import mean_loss, paired_difference
from formats.engine_config import is_table, quantization_config
from formats.fates import Quantise
from formats.manifest import (
    Deployment,
    Digests,
    FileRecord,
    HashedFile,
    Manifest,
    MeasurementRecord,
    NoteRecord,
    RunRecord,
    SourceRecord,
    WindowsRecord,
    build_bits_per_weight,
    build_ledger,
    versions,
)
from formats.output import OutputFolder
from formats.reader import load_model
from formats.skeleton import Skeleton
from formats.writer import ShardedWriter, WrittenFile, copy_file, hash_file, write_bytes_atomically
from pipelines.prepare import Prepared, header_metadata
from pipelines.progress import Progress
from quant.quantizer import Note


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
        self._quantise_peak = 0
        self._notes: list[NoteRecord] = [
            NoteRecord(kind="source", where="config", text=text) for text in prepared.checkpoint.notes
        ]

    def execute(self) -> Finished:
        """Do everything. Raises a BitledgerError and leaves nothing under the output's name when a step fails."""
        request = self.prepared.request
        source_files = self._hash_source()
        with OutputFolder(request.output, request.force) as folder:
            result, written = self._quantise(folder)
            self._quantise_peak = peak_rss_bytes()
            files = [
                FileRecord(name=file.name, nbytes=file.nbytes, sha256=file.sha256, role=cast(Any, file.role)) for file in written
            ]
            files += self._side_files(folder)
            files.append(self._config(folder))
            measurements = self._measure(
                folder, {file.name: file.sha256 for file in written if file.role == "weights"}, source_files
            )
            manifest = self._manifest(folder, result, written, files, measurements, source_files)
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

    def _quantise(self, folder: Path) -> tuple[Quantised, tuple[WrittenFile, ...]]:
        prepared, request = self.prepared, self.prepared.request
        groups = [plan.stored for plan in prepared.plans]
        metadata = header_metadata(request.method.name, prepared.plans)
        with ShardedWriter(folder, groups, metadata, request.shard_bytes) as writer:
            if prepared.calibration is None:
                with self.progress.stage("quantise", unit="tensor") as report:
                    result = quantise_without_data(prepared.checkpoint, prepared.plans, writer, report)
            else:
                skeleton = Skeleton(prepared.checkpoint.folder)
                check_architecture(skeleton, prepared.plans)
                driver = BlockwiseDriver(
                    prepared.checkpoint,
                    prepared.plans,
                    writer,
                    skeleton,
                    method=request.method,
                    device=request.device,
                    clip=request.clip,
                )
                with self.progress.stage("quantise") as report:
                    result = driver.run(torch.from_numpy(prepared.calibration.ids.copy()), request.batch, report)
            return result, writer.finish()

    def _side_files(self, folder: Path) -> list[FileRecord]:
        found = []
        for name in self.prepared.checkpoint.side_files():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            nbytes, sha256 = copy_file(self.prepared.checkpoint.folder / name, target)
            found.append(FileRecord(name=name, nbytes=nbytes, sha256=sha256, role="side"))
        return found

    def _config(self, folder: Path) -> FileRecord:
        """config.json as in the source, with exactly one quantisation block."""
        block = quantization_config(self.prepared.plans)
        config = self.prepared.checkpoint.plain_config() | {"quantization_config": block}
        data = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
        return FileRecord(
            name="config.json", nbytes=len(data), sha256=write_bytes_atomically(folder / "config.json", data), role="config"
        )

    def _measure(self, folder: Path, subject: dict[str, str], source_files: list[HashedFile]) -> list[MeasurementRecord]:
        """Perplexity of the float model and of the files just written, on the same windows, and their paired difference."""
        baseline = {file.name: file.sha256 for file in source_files if file.name.endswith(".safetensors")}
        before = self._losses("evaluate float", self.prepared.checkpoint.folder)
        after = self._losses("evaluate artefact", folder)
        seed, windows = self.prepared.request.seed, self.prepared.evaluation
        found = [
            perplexity_measurement(
                before, mean_loss(before, seed=seed), windows=windows, subject=baseline, name="perplexity_float"
            ),
            perplexity_measurement(after, mean_loss(after, seed=seed), windows=windows, subject=subject),
            ln_ratio_measurement(
                paired_difference(after, before, seed=seed), windows=windows, subject=subject, baseline=baseline
            ),
        ]
        return [MeasurementRecord.model_validate(measurement.record()) for measurement in found]

    def _losses(self, stage: str, folder: Path) -> WindowLosses:
        with self.progress.stage(stage, unit="window") as report:
            model = load_model(folder).to(self.prepared.request.device)
            return window_losses(model, self.prepared.evaluation, batch=self.prepared.request.batch, progress=report)

    def _manifest(
        self,
        folder: Path,
        result: Quantised,
        written: tuple[WrittenFile, ...],
        files: list[FileRecord],
        measurements: list[MeasurementRecord],
        source_files: list[HashedFile],
    ) -> Manifest:
        prepared, request = self.prepared, self.prepared.request
        weights = [file for file in written if file.role == "weights"]
        ledger = build_ledger(result.records, {file.name: file.header_bytes for file in weights})
        source = prepared.source
        manifest = Manifest(
            method=request.method.name,
            recipe={"rules": [_rule_record(rule.pattern, rule.fate) for rule in request.rules]},
            options=dict(request.options),
            seed=request.seed,
            source=SourceRecord(
                requested=source.requested,
                kind=source.kind,
                repo=source.repo,
                revision=source.revision,
                note=source.note,
                files=source_files,
                origin_files=[HashedFile(name=name, sha256=sha256) for name, sha256 in source.origin_files],
            ),
            tensors=result.records,
            ledger=ledger,
            bits_per_weight=build_bits_per_weight(result.records, ledger),
            files=sorted(files, key=lambda file: file.name),
            digests=self._digests(),
            versions=versions(),
            measurements=measurements,
            cards=self._cards(sum(file.nbytes for file in weights), result),
            notes=self._notes + _grouped(result.notes),
            deployment=self._deployment(folder),
            run=RunRecord(
                started_utc=self.started.isoformat(timespec="seconds"),
                seconds={name: round(seconds, 3) for name, seconds in self.progress.seconds.items()},
                quantise_peak_rss_bytes=self._quantise_peak,
                peak_rss_bytes=peak_rss_bytes(),
                threads=torch.get_num_threads(),
            ),
        )
        manifest.check_coverage(prepared.checkpoint.tensors)
        return manifest

    def _digests(self) -> Digests:
        prepared = self.prepared

        def record(windows: Any) -> WindowsRecord:
            corpus = prepared.corpus
            extra = {"corpus": corpus.name, "origin": corpus.origin, "join": corpus.join, "revision": corpus.revision}
            return WindowsRecord.model_validate(windows_record(windows) | extra)

        return Digests(
            tokenizer=prepared.tokenizer.digest,
            calibration=None if prepared.calibration is None else record(prepared.calibration),
            evaluation=record(prepared.evaluation),
            ngram_overlap=prepared.overlap,
        )

    def _cards(self, weight_bytes: int, result: Quantised) -> list[dict[str, Any]]:
        """Implications per card. An untied input table is looked up, not read: its bytes are no traffic of a decode step."""
        shape = self.prepared.shape
        if shape is None:
            return []
        tables = [r.nbytes for r in result.records if is_table(r.name.removesuffix(".weight"))]
        traffic = weight_bytes if shape.tied else weight_bytes - sum(tables)
        return [
            implications(
                shape, card, weight_bytes=weight_bytes, traffic_bytes=traffic, assumptions=self.prepared.request.assumptions
            ).record()
            for card in self.prepared.cards
        ]

    def _deployment(self, folder: Path) -> Deployment:
        """What else decides the answers of these weights."""
        generation = folder / "generation_config.json"
        template = folder / "chat_template.jinja"
        sampling = json.loads(generation.read_text(encoding="utf-8")) if generation.is_file() else {}
        inline = folder / "tokenizer_config.json"
        template_hash = hash_file(template)[1] if template.is_file() else _inline_template_hash(inline)
        return Deployment(
            engine="transformers",
            engine_version=versions()["transformers"],
            tested=True,
            sampling={key: value for key, value in sampling.items() if not key.startswith("_")},
            system_prompt=self.prepared.system_prompt,
            chat_template_sha256=template_hash,
        )


def peak_rss_bytes() -> int:
    """Largest resident size of this process so far (kibibytes on Linux, bytes on macOS)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _inline_template_hash(path: Path) -> str | None:
    if not path.is_file():
        return None
    template = json.loads(path.read_text(encoding="utf-8")).get("chat_template")
    return hashlib.sha256(template.encode()).hexdigest() if isinstance(template, str) else None


def _rule_record(pattern: str, fate: Any) -> dict[str, Any]:
    if isinstance(fate, Quantise):
        return {"match": pattern, "scheme": str(fate.scheme), "codec": fate.codec}
    return {"match": pattern, "keep": True}


def _grouped(notes: list[Note]) -> list[NoteRecord]:
    """Notes of one kind become one record with a count; the first text stands for them, the rest are counted."""
    by_kind: dict[str, list[str]] = {}
    for note in notes:
        by_kind.setdefault(note.kind, []).append(note.text)
    return [NoteRecord(kind=kind, where="quantise", text="; ".join(texts), count=len(texts)) for kind, texts in by_kind.items()]
