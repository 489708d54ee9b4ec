"""A small complete artefact, written with the real writer and codec: two weight files, two schemes, a tied head, side files."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from formats.atomic import hash_file, write_bytes_atomically
from formats.codec import get_codec
from formats.folder import INDEX_NAME
from formats.manifest import (
    Deployment,
    Digests,
    FileRecord,
    HashedFile,
    Manifest,
    MeasurementRecord,
    NoteRecord,
    PartRecord,
    RunRecord,
    SourceRecord,
    TensorRecord,
    WindowsRecord,
    build_bits_per_weight,
    build_ledger,
    stored_bits_per_weight,
)
from formats.writer import ShardedWriter, TensorSpec, WrittenFile
from quant.quantizers.rtn import round_to_nearest
from quant.scheme import Scheme

CODEC = "pack-quantized"
SHARD_BYTES = 12_000
FINE, COARSE = Scheme(4, "sym", 32, "f16"), Scheme(3, "zp", "channel", "f16")
KEPT = {"model.embed_tokens.weight": (16, 64), "model.norm.weight": (64,), "model.layers.0.mlp.gate.weight": (4, 64)}
QUANTISED = {
    "model.layers.0.self_attn.q_proj.weight": ((64, 64), FINE),
    "model.layers.0.self_attn.k_proj.weight": ((32, 64), FINE),
    "model.layers.0.mlp.up_proj.weight": ((96, 64), COARSE),
    "model.layers.0.mlp.down_proj.weight": ((64, 96), COARSE),
}
SIDE = {"tokenizer.json": b'{"version": 1}', "generation_config.json": b"{}\n", "assets/notes.txt": b"notes\r\n"}


@dataclass(frozen=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]
    scheme: Scheme | None
    parts: dict[str, torch.Tensor]  # full name -> tensor
    specs: tuple[TensorSpec, ...]


def build_artefact(folder: Path, *, seed: int = 0) -> Manifest:
    """Write the artefact into the new ``folder`` and return its saved manifest."""
    folder.mkdir(parents=True)
    tensors = _tensors(seed)
    roles = Counter[str]()
    for spec in (spec for tensor in tensors for spec in tensor.specs):
        roles[spec.role] += spec.nbytes
    metadata = {"bitledger.method": "rtn"} | {f"bitledger.{role}_bytes": str(count) for role, count in roles.items()}
    with ShardedWriter(folder, [tensor.specs for tensor in tensors], metadata, SHARD_BYTES) as writer:
        for tensor in tensors:
            for name, value in tensor.parts.items():
                writer.put(name, value)
        written = writer.finish()
    assert [file.role for file in written] == ["weights", "weights", "index"]
    (folder / "config.json").write_text(json.dumps(config(), indent=2))
    for name, data in SIDE.items():
        (folder / name).parent.mkdir(exist_ok=True)
        write_bytes_atomically(folder / name, data)
    manifest = _manifest(folder, tensors, written)
    manifest.save(folder)
    return manifest


def config() -> dict[str, Any]:
    codec = get_codec(CODEC)
    groups = {
        "group_0": codec.config_group(FINE, ["re:.*self_attn.[qk]_proj$"]),
        "group_1": codec.config_group(COARSE, ["re:.*mlp.(up|down)_proj$"]),
    }
    block = {
        "quant_method": "compressed-tensors",
        "format": CODEC,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ["lm_head", "model.layers.0.mlp.gate"],
    }
    return {"model_type": "llama", "tie_word_embeddings": True, "quantization_config": block}


def _tensors(seed: int) -> list[_Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for name, shape in KEPT.items():
        value = torch.randn(shape, generator=generator)
        found.append(_Tensor(name, shape, None, {name: value}, (TensorSpec(name, "F32", shape, "kept"),)))
    for name, (matrix, scheme) in QUANTISED.items():
        stem = name.removesuffix("weight")
        packed = get_codec(CODEC).pack(round_to_nearest(torch.randn(matrix, generator=generator), scheme))
        layout = get_codec(CODEC).layout(scheme, matrix)
        specs = tuple(TensorSpec(stem + part.suffix, part.dtype, part.shape, part.role) for part in layout)
        found.append(_Tensor(name, matrix, scheme, {stem + suffix: value for suffix, value in packed.items()}, specs))
    return found


def _record(tensor: _Tensor, file_of: dict[str, str]) -> TensorRecord:
    parts = [
        PartRecord(name=s.name, file=file_of[s.name], dtype=s.dtype, shape=list(s.shape), nbytes=s.nbytes, role=s.role)  # type: ignore[arg-type]
        for s in tensor.specs
    ]
    quantised = tensor.scheme is not None
    linear = quantised or tensor.name.endswith("gate.weight")
    return TensorRecord(
        name=tensor.name,
        dtype="F32",
        shape=list(tensor.shape),
        fate="quantised" if quantised else "kept",
        module_class="Linear" if linear else "Other",
        scheme=str(tensor.scheme) if quantised else None,
        codec=CODEC if quantised else None,
        reason="first rule" if quantised else "not a matrix multiplication of a block",
        parts=parts,
        nbytes=sum(part.nbytes for part in parts),
        bits_per_weight=stored_bits_per_weight(parts, math.prod(tensor.shape)) if quantised else None,
        relative_error=0.125 if quantised else None,
    )


def _manifest(folder: Path, tensors: list[_Tensor], written: tuple[WrittenFile, ...]) -> Manifest:
    weights = [file for file in written if file.role == "weights"]
    file_of = {name: file.name for file in weights for name in file.tensors}
    records = [_record(tensor, file_of) for tensor in tensors]
    embedding = records[0]
    records.append(
        TensorRecord(
            name="lm_head.weight",
            dtype="F32",
            shape=embedding.shape,
            fate="alias",
            alias_of=embedding.name,
            reason="tied",
            nbytes=0,
        )
    )
    ledger = build_ledger(records, {file.name: file.header_bytes for file in weights})
    roles = {file.name: "weights" for file in weights} | {INDEX_NAME: "index", "config.json": "config"}
    names = [*roles, *SIDE]
    hashes = {name: hash_file(folder / name) for name in names}
    windows = WindowsRecord(
        digest="d" * 64, span_tokens=[0, 4096], length_tokens=512, stride_tokens=512, count=8, bos="none",
        corpus_sha256="c" * 64, tokenizer_digest="e" * 64,
    )  # fmt: skip
    return Manifest(
        method="rtn",
        recipe={"rules": [{"match": "*", "scheme": str(FINE)}]},
        options={"seed": 0},
        seed=0,
        source=SourceRecord(
            requested="tiny", kind="folder", files=[HashedFile(name="model.safetensors", nbytes=12, sha256="a" * 64)]
        ),
        tensors=records,
        ledger=ledger,
        bits_per_weight=build_bits_per_weight(records, ledger),
        files=[
            FileRecord(name=name, nbytes=hashes[name][0], sha256=hashes[name][1], role=roles.get(name, "side"))  # type: ignore[arg-type]
            for name in names
        ],
        digests=Digests(tokenizer="e" * 64, evaluation=windows),
        versions={"python": "3.11"},
        measurements=[
            MeasurementRecord(
                name="perplexity", value=30.5, unit="1", n=8, subject={file.name: hashes[file.name][1] for file in weights}
            ),
            MeasurementRecord(name="float_perplexity", value=30.25, unit="1", n=8, subject={"model.safetensors": "a" * 64}),
        ],
        cards=[{"name": "Card", "batch": 3}],
        notes=[NoteRecord(kind="fold", where="model.layers.0", text="undone")],
        deployment=Deployment(engine="vllm", engine_version="0.32.0", sampling={"temperature": 0.0}),
        run=RunRecord(started_utc="2026-01-01T00:00:00Z", seconds={"all": 1.5}, peak_rss_bytes=1, threads=1),
    )


def reseal(folder: Path, *names: str, **changes: Any) -> Manifest:
    """Rewrite the manifest as somebody would who can compute hashes: sizes and hashes of ``names`` anew, ``changes`` as given."""
    data = json.loads((folder / "manifest.json").read_text())
    for file in data["files"]:
        if file["name"] in names:
            file["nbytes"], file["sha256"] = hash_file(folder / file["name"])
    hashes = {file["name"]: file["sha256"] for file in data["files"]}
    for measurement in data["measurements"]:
        measurement["subject"] = {name: hashes.get(name, digest) for name, digest in measurement["subject"].items()}
    data.update(changes)
    (folder / "manifest.json").write_text(json.dumps(data))
    return Manifest.load(folder)


def edit(folder: Path, name: str, change: Callable[[Any], Any]) -> None:
    """Let ``change`` edit the JSON object in the file ``name``."""
    data = json.loads((folder / name).read_text())
    change(data)
    (folder / name).write_text(json.dumps(data))
