"""R18: NaN and infinity in the source, wherever they hide, are named with tensor and index before any work."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from formats.checkpoint import Checkpoint
from formats.finite import read_exactly
from quant.errors import NonFiniteTensor
from tests.failure.damage import poke, write_folder

CASES = {
    "nan in a weight to be quantised": ("model.layers.1.self_attn.k_proj.weight", (31, 63), math.nan, "nan"),
    "plus infinity in the head": ("lm_head.weight", (0, 0), math.inf, "inf"),
    "minus infinity in the embedding": ("model.embed_tokens.weight", (7, 5), -math.inf, "inf"),
    "nan in a norm that is only copied": ("model.norm.weight", (63,), math.nan, "nan"),
}


@pytest.mark.parametrize("model", ["llama", "sharded"])
@pytest.mark.parametrize(("name", "index", "value", "kind"), CASES.values(), ids=CASES.keys())
def test_the_tensor_the_index_and_the_file_are_named(
    tiny_copy: Callable[[str], Path], model: str, name: str, index: tuple[int, ...], value: float, kind: str
) -> None:
    folder = tiny_copy(model)
    Checkpoint.open(folder).check_finite()
    info = Checkpoint.open(folder).tensors[name]
    flat = index[0] if len(index) == 1 else index[0] * info.shape[1] + index[1]
    poke(folder / info.file, info.start + 4 * flat, value)
    checkpoint = Checkpoint.open(folder)
    found = checkpoint.first_nonfinite()
    assert found is not None
    assert (found.tensor, found.index, found.kind, found.file) == (name, index, kind, info.file)
    with pytest.raises(NonFiniteTensor) as refusal:
        checkpoint.check_finite()
    assert f"tensor {name} has {kind} at index {list(index)} in {info.file}" in str(refusal.value)


class Dribble(io.BytesIO):
    """A file that gives three bytes at a time, as a network file system may."""

    def readinto(self, into: Any) -> int:
        return super().readinto(memoryview(into)[:3])


def test_short_reads_are_put_together(tmp_path: Path) -> None:
    info = next(iter(Checkpoint.open(write_folder(tmp_path / "model")).tensors.values()))
    into = np.zeros(16, np.uint8)
    read_exactly(Dribble(bytes(range(16))), into, info)
    assert into.tolist() == list(range(16))


@pytest.mark.parametrize("row", [0, 261, 262, 299])
def test_every_chunk_of_a_large_tensor_is_searched(tmp_path: Path, row: int) -> None:
    folder = write_folder(tmp_path / "model", {"a.weight": ("F32", [300, 1000]), "b.weight": ("F32", [8])})  # 1.2 MB: two chunks
    checkpoint = Checkpoint.open(folder)
    steps: list[tuple[int, int]] = []
    checkpoint.check_finite(lambda done, total: steps.append((done, total)))
    assert steps == [(1_200_000, 1_200_032), (1_200_032, 1_200_032)]
    poke(folder / "model.safetensors", checkpoint.tensors["a.weight"].start + 4 * (row * 1000 + 144), math.nan)
    found = checkpoint.first_nonfinite()
    assert found is not None
    assert found.index == (row, 144)
