"""The cache's record against what is stored: config.json, the file of scales, and the scales themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from formats.broken import Broken, named
from formats.header import read_header
from formats.kv_files import CONFIG_KEY, SIDE_NAME, engine_block, plan_kv
from formats.manifest import Manifest
from formats.records import KvCacheRecord, PartRecord
from quant.kvscheme import KvScheme


def check_kv_cache(folder: Path, manifest: Manifest, config: Mapping[str, Any]) -> str | None:
    """A sentence on the cache, or None for an artefact without one.

    Raises:
        Broken: another scheme in config.json, scales that are missing or unrecorded, not finite, not above 0 or all the same.
    """
    record = manifest.kv_cache
    block = config.get("quantization_config") or {}
    found, announced = config.get(CONFIG_KEY), block.get("kv_cache_scheme")
    if record is None:
        if found is not None or announced is not None:
            raise Broken("kv cache", "is described but not recorded", file="config.json", actual=found or announced)
        return None
    with named("kv cache", "manifest.json"):
        scheme = KvScheme.parse(record.scheme)
        record.check()
    wanted = {"scheme": record.scheme, "scales": record.file if record.file == SIDE_NAME else None}
    if found != wanted:
        raise Broken("kv cache", CONFIG_KEY, file="config.json", expected=wanted, actual=found)
    if announced != engine_block(scheme):
        raise Broken("kv cache", "kv_cache_scheme", file="config.json", expected=engine_block(scheme), actual=announced)
    with named("kv cache", "config.json"):
        plan = plan_kv(config, (tensor.name for tensor in manifest.tensors), scheme)
    expected = sorted((spec.name, spec.dtype, list(spec.shape)) for spec in plan.specs)
    actual = sorted((part.name, part.dtype, part.shape) for part in record.parts)
    if (plan.layers, plan.kv_heads, plan.head_dim) != (record.layers, record.kv_heads, record.head_dim) or expected != actual:
        raise Broken("kv cache", f"the recorded scales are not those of {scheme} for this model", file="manifest.json")
    if record.file is not None:
        _check_scales(folder, record.file, record)
    return f"{scheme}, {record.bytes_per_token:,} bytes per token, {len(record.parts)} calibrated scales"


def _check_scales(folder: Path, file: str, record: KvCacheRecord) -> None:
    with named("kv cache", file):
        tensors, _, _ = read_header(folder / file, file)
    parts = {part.name: part for part in record.parts}
    if set(tensors) != set(parts):
        raise Broken("kv cache", "other tensors than recorded", file=file, tensor=min(set(tensors) ^ set(parts)))
    values: dict[str, list[np.ndarray]] = {}
    for name, part in parts.items():
        info = tensors[name]
        if (info.dtype, list(info.shape)) != (part.dtype, part.shape):
            raise Broken("kv cache", "type and shape", file=file, tensor=name, expected=part.shape, actual=info.shape)
        scales = _read(folder / file, info.start, part)
        if not bool((np.isfinite(scales) & (scales > 0)).all()):
            raise Broken("kv cache", "a scale is not finite or not above 0", file=file, tensor=name)
        values.setdefault("keys" if name.endswith(("keys", "k_scale")) else "values", []).append(scales)
    for side, found in values.items():
        if len(np.unique(np.concatenate(found))) == 1 and (len(found) > 1 or float(found[0].flat[0]) == 1.0):
            raise Broken("kv cache", f"all scales of {side} are {found[0][0]:g}: nothing was calibrated", file=file)


def _read(path: Path, start: int, part: PartRecord) -> np.ndarray:
    with path.open("rb") as file:
        file.seek(start)
        return np.frombuffer(file.read(4 * math.prod(part.shape)), dtype="<f4")
