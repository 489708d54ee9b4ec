"""The manifest of one run, put together from what its steps left behind; nothing is measured or written here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from calib.quantise import Quantised
from calib.windows import Windows
from eval.capacity.implications import implications
from eval.measurement import windows_record
from formats.atomic import hash_file
from formats.fates import Quantise, Rule
from formats.manifest import (
    Deployment,
    Digests,
    FileRecord,
    HashedFile,
    KvCacheRecord,
    Manifest,
    MeasurementRecord,
    NoteRecord,
    RunRecord,
    SourceRecord,
    WindowsRecord,
    build_bits_per_weight,
    build_ledger,
    scales_in_weights,
    versions,
)
from formats.tables import is_table
from formats.writer import WrittenFile
from pipelines.prepare import Prepared
from quant.quantizer import Note


def build_manifest(
    prepared: Prepared,
    *,
    folder: Path,
    result: Quantised,
    written: Sequence[WrittenFile],
    files: Sequence[FileRecord],
    measurements: list[MeasurementRecord],
    source_files: list[HashedFile],
    run: RunRecord,
    kv_cache: KvCacheRecord | None = None,
) -> Manifest:
    """The manifest of the artefact in ``folder``, whose ``files`` are all but the manifest itself.

    Raises:
        CoverageError: a source tensor without a fate, or with two.
    """
    request = prepared.request
    weights = [file for file in written if file.role == "weights"]
    headers = {file.name: file.header_bytes for file in weights}
    ledger = build_ledger(result.records, headers, scales_in_weights(kv_cache, headers))
    source = prepared.source
    notes = [NoteRecord(kind=kind, where="plan", text=text) for kind, text in prepared.notes]
    manifest = Manifest(
        method=request.method.name,
        recipe={"rules": [_rule_record(rule) for rule in request.rules]},
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
        digests=_digests(prepared),
        versions=versions(),
        measurements=measurements,
        cards=_cards(prepared, sum(file.nbytes for file in weights), result),
        notes=notes + _grouped(result.notes),
        deployment=_deployment(prepared, folder),
        run=run,
        kv_cache=kv_cache,
    )
    manifest.check_coverage(prepared.checkpoint.tensors)
    return manifest


def _digests(prepared: Prepared) -> Digests:
    def record(windows: Windows) -> WindowsRecord:
        corpus = prepared.corpus
        extra = {"corpus": corpus.name, "origin": corpus.origin, "join": corpus.join, "revision": corpus.revision}
        return WindowsRecord.model_validate(windows_record(windows) | extra)

    return Digests(
        tokenizer=prepared.tokenizer.digest,
        calibration=None if prepared.calibration is None else record(prepared.calibration),
        evaluation=record(prepared.evaluation),
        ngram_overlap=prepared.overlap,
    )


def _cards(prepared: Prepared, weight_bytes: int, result: Quantised) -> list[dict[str, Any]]:
    """Implications per card. An untied input table is looked up, not read: its bytes are no traffic of a decode step."""
    shape = prepared.shape
    if shape is None:
        return []
    tables = [r.nbytes for r in result.records if is_table(r.name.removesuffix(".weight"))]
    traffic = weight_bytes if shape.tied else weight_bytes - sum(tables)
    return [
        implications(
            shape,
            card,
            weight_bytes=weight_bytes,
            traffic_bytes=traffic,
            kv_bytes=None if prepared.kv is None else prepared.kv.bytes_per_token,
            assumptions=prepared.request.assumptions,
        ).record()
        for card in prepared.cards
    ]


def _deployment(prepared: Prepared, folder: Path) -> Deployment:
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
        system_prompt=prepared.system_prompt,
        chat_template_sha256=template_hash,
    )


def _inline_template_hash(path: Path) -> str | None:
    if not path.is_file():
        return None
    template = json.loads(path.read_text(encoding="utf-8")).get("chat_template")
    return hashlib.sha256(template.encode()).hexdigest() if isinstance(template, str) else None


def _rule_record(rule: Rule) -> dict[str, Any]:
    """A rule as JSON; the schemes that it would use for shapes that the first does not fit stand in ``otherwise``."""
    pattern, fate = rule.pattern, rule.fate
    if isinstance(fate, Quantise):
        found: dict[str, Any] = {"match": pattern, "scheme": str(fate.scheme), "codec": fate.codec, "quantizer": fate.quantizer}
        found |= {"options": dict(fate.options)} if fate.options else {}
        found |= {"mse": True} if fate.mse else {}
        return found | ({"otherwise": [str(other.scheme) for other in rule.otherwise]} if rule.otherwise else {})
    return {"match": pattern, "keep": True} | ({"dtype": fate.dtype} if fate.dtype else {})


def _grouped(notes: list[Note]) -> list[NoteRecord]:
    """Notes of one kind become one record with a count; the first text stands for them, the rest are counted."""
    by_kind: dict[str, list[str]] = {}
    for note in notes:
        by_kind.setdefault(note.kind, []).append(note.text)
    return [NoteRecord(kind=kind, where="quantise", text="; ".join(texts), count=len(texts)) for kind, texts in by_kind.items()]
