"""An index that disagrees with its shards (R37): refused from the headers, with the keys listed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from formats.checkpoint import Checkpoint
from quant.errors import SourceError
from tests.failure.damage import read_index, safetensors_of, write_folder, write_index

SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]


@pytest.fixture
def sharded(tiny_copy: Callable[[str], Path]) -> Path:
    folder = tiny_copy("sharded")
    assert sorted(set(read_index(folder).values())) == SHARDS
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(SourceError) as caught:
        Checkpoint.open(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_key_that_is_in_no_shard(sharded: Path) -> None:
    write_index(sharded, {**read_index(sharded), "model.layers.9.bogus.weight": SHARDS[0]})
    message = refusal(sharded)
    assert "model.layers.9.bogus.weight is in no shard" in message
    assert "model.layers.0" not in message


def test_two_shard_files_swapped(sharded: Path) -> None:
    (sharded / SHARDS[0]).rename(sharded / "swap")
    (sharded / SHARDS[1]).rename(sharded / SHARDS[0])
    (sharded / "swap").rename(sharded / SHARDS[1])
    message = refusal(sharded)
    assert "in another shard than the index says" in message
    assert "model.embed_tokens.weight" in message


def test_a_shard_that_is_missing(sharded: Path) -> None:
    (sharded / SHARDS[2]).unlink()
    message = refusal(sharded)
    assert SHARDS[2] in message
    assert SHARDS[0] not in message


def test_a_shard_that_the_index_invents(sharded: Path) -> None:
    write_index(sharded, {**read_index(sharded), "lm_head.weight": "model-00004-of-00003.safetensors"})
    assert "model-00004-of-00003.safetensors" in refusal(sharded)


def test_a_tensor_in_two_shards(sharded: Path) -> None:
    shutil.copy(sharded / SHARDS[0], sharded / SHARDS[1])
    message = refusal(sharded)
    assert "in two shards" in message
    assert "model.embed_tokens.weight" in message


def test_a_tensor_that_the_index_forgets(sharded: Path) -> None:
    write_index(sharded, {key: file for key, file in read_index(sharded).items() if key != "model.norm.weight"})
    assert "model.norm.weight is in a shard but not in the index" in refusal(sharded)


def test_a_shard_of_the_model_that_the_index_does_not_name(sharded: Path) -> None:
    shutil.copy(sharded / SHARDS[0], sharded / "model-00009-of-00009.safetensors")
    assert "model-00009-of-00009.safetensors" in refusal(sharded)


def test_shards_without_an_index(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    message = refusal(sharded)
    assert SHARDS[0] in message
    assert "model.safetensors.index.json" in message


def test_many_wrong_keys_are_counted_and_not_all_printed(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", {f"layer{n}.weight": ("F32", [1]) for n in range(500)})
    write_index(folder, {f"other{n}.weight": "model.safetensors" for n in range(500)})
    message = refusal(folder)
    assert "and 492 more are in no shard" in message
    assert len(message) < 1000


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"weight_map": []}'])
def test_an_index_that_is_no_index(tmp_path: Path, text: str) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json" in refusal(folder)


def test_a_wrong_total_is_noted_and_weights_of_another_layout_are_left_out(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", {"a.weight": ("F32", [4])})
    write_index(folder, {"a.weight": "model.safetensors"}, total=16 + 99)
    (folder / "consolidated.safetensors").write_bytes(safetensors_of({"b": ("F32", [1])}))
    checkpoint = Checkpoint.open(folder)
    assert list(checkpoint.tensors) == ["a.weight"]
    assert checkpoint.side_files() == ()
    notes = "; ".join(checkpoint.notes)
    assert "total_size 115 but the tensors take 16" in notes
    assert "consolidated.safetensors is left out" in notes
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    write_index(folder, index["weight_map"], total=16)
    assert "total_size" not in "; ".join(Checkpoint.open(folder).notes)
