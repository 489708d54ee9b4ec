"""Checkpoint folders written by hand, byte by byte, so that a test can break any part of them."""

from __future__ import annotations

import json
import math
import shlex
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

CONFIG: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32"}
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I32": 4, "I64": 8, "U8": 1, "I8": 1, "F8_E4M3": 1, "BOOL": 1}


def pack(header: Any, data: bytes = b"") -> bytes:
    """A safetensors file with any header: an object to be spelled as JSON, or bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str, shape: list[int], start: int) -> dict[str, Any]:
    """The header entry of a tensor whose bytes begin at ``start``."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, start + math.prod(shape) * ITEM_BYTES[dtype]]}


def safetensors_of(tensors: dict[str, tuple[str, list[int]]], metadata: Any = None) -> bytes:
    """A valid file of tensors that are all zero, each given as (dtype, shape)."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, (dtype, shape) in tensors.items():
        header[name] = entry(dtype, shape, end)
        end = header[name]["data_offsets"][1]
    return pack(header, bytes(end))


def write_folder(
    folder: Path,
    tensors: dict[str, tuple[str, list[int]]] | None = None,
    config: dict[str, Any] | None = None,
    data: bytes | None = None,
) -> Path:
    """A checkpoint folder with one shard: of zero ``tensors``, or of the bytes ``data``."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    if data is None:
        data = safetensors_of({"model.norm.weight": ("F32", [4])} if tensors is None else tensors)
    (folder / "model.safetensors").write_bytes(data)
    return folder


def write_index(folder: Path, weight_map: dict[str, str], total: int | None = None) -> None:
    metadata = {} if total is None else {"total_size": total}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))


def read_index(folder: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return found


def poke(path: Path, offset: int, value: float) -> None:
    """Overwrite one float32 of a file in place."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(np.float32(value).tobytes())


def with_mount(place: Path, mount: list[str], command: list[str]) -> str:
    """Output of ``command`` with ``mount`` mounted at ``place``, seen by it alone; skips where that is not allowed."""
    place.mkdir()
    alone = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
    mounting = shlex.join(["mount", *mount, str(place)])
    try:
        allowed = subprocess.run([*alone, mounting], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        allowed = False
    if not allowed:
        pytest.skip("this user may not mount a file system in a namespace of its own")
    done = subprocess.run([*alone, f"{mounting} && exec {shlex.join(command)}"], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout
