"""Shards that are cut, grown or lie in their header: refused before any work, by file name, and never with a wrong exception."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from formats.checkpoint import Checkpoint, read_header
from quant.errors import SourceError, TruncatedFile
from tests.failure.damage import entry, pack, safetensors_of, write_folder


def cut(count: int) -> Callable[[bytes], bytes]:
    return lambda data: data[: len(data) - count]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "last 1000 bytes cut": cut(1000),
    "last byte cut": cut(1),
    "8 trailing bytes": lambda data: data + bytes(8),
    "cut inside the header": lambda data: data[:100],
    "cut inside the length": lambda data: data[:5],
    "zero bytes": lambda data: b"",
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_r36_a_shard_of_the_wrong_size_is_named_with_both_sizes(
    tiny_copy: Callable[[str], Path], damage: Callable[[bytes], bytes]
) -> None:
    folder = tiny_copy("sharded")
    shard = folder / "model-00002-of-00003.safetensors"
    whole = shard.read_bytes()
    broken = damage(whole)
    shard.write_bytes(broken)
    with pytest.raises(TruncatedFile) as refusal:
        Checkpoint.open(folder)
    message = str(refusal.value)
    assert shard.name in message
    assert f"{len(broken):,}" in message
    if len(broken) > 1000:
        assert f"{len(whole):,}" in message
    assert "\n" not in message
    assert "00001-of" not in message
    assert "00003-of" not in message


def test_all_damaged_shards_are_named_at_once(tiny_copy: Callable[[str], Path]) -> None:
    folder = tiny_copy("sharded")
    for number in (1, 3):
        shard = folder / f"model-0000{number}-of-00003.safetensors"
        shard.write_bytes(shard.read_bytes()[:-4])
    with pytest.raises(TruncatedFile, match=r"00001-of-00003.*00003-of-00003"):
        Checkpoint.open(folder)


def test_a_file_that_shrinks_after_it_was_opened_is_an_error_and_not_zeros(tiny_copy: Callable[[str], Path]) -> None:
    folder = tiny_copy("llama")
    checkpoint = Checkpoint.open(folder)
    last = list(checkpoint.tensors)[-1]
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-8])
    with pytest.raises(TruncatedFile, match=last):
        checkpoint.tensor(last)
    with pytest.raises(TruncatedFile, match=last):
        checkpoint.check_finite()


A, B = entry("F32", [2], 0), entry("F32", [2], 8)
BAD_HEADERS: dict[str, tuple[bytes, str]] = {
    "header above the cap": ((100_000_001).to_bytes(8, "little") + b"{}", "above the cap"),
    "header of 2^63 bytes": ((1 << 63).to_bytes(8, "little") + b"{}", "above the cap"),
    "not JSON": (pack(b"{'a': 1}"), "not JSON"),
    "not UTF-8": (pack(b'{"\xff": 1}'), "not JSON"),
    "deep nesting": (pack(b"[" * 200_000), "not JSON"),
    "a list": (pack([]), "not a JSON object"),
    "a name twice": (pack(b'{"a":' + json.dumps(A).encode() + b',"a":' + json.dumps(B).encode() + b"}", bytes(16)), "'a' twice"),
    "overlap": (pack({"a": A, "b": entry("F32", [2], 4)}, bytes(12)), "overlaps"),
    "same bytes twice": (pack({"a": A, "b": A}, bytes(8)), "overlaps"),
    "hole": (pack({"a": A, "b": entry("F32", [2], 12)}, bytes(20)), "hole"),
    "does not begin at zero": (pack({"a": B}, bytes(16)), "hole"),
    "more bytes than the shape": (pack({"a": {**A, "data_offsets": [0, 12]}}, bytes(12)), "takes 8"),
    "fewer bytes than the shape": (pack({"a": {**A, "data_offsets": [0, 4]}}, bytes(4)), "takes 8"),
    "offsets reversed": (pack({"a": {**A, "data_offsets": [8, 0]}}, bytes(8)), "no valid offsets"),
    "negative offset": (pack({"a": {**A, "data_offsets": [-8, 0]}}, bytes(8)), "no valid offsets"),
    "three offsets": (pack({"a": {**A, "data_offsets": [0, 8, 8]}}, bytes(8)), "no valid offsets"),
    "no offsets": (pack({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)), "no valid offsets"),
    "negative dimension": (pack({"a": {**A, "shape": [-2]}}, bytes(8)), "no valid shape"),
    "true as a dimension": (pack({"a": {**A, "shape": [2, True]}}, bytes(8)), "no valid shape"),
    "fractional dimension": (pack({"a": {**A, "shape": [2.0]}}, bytes(8)), "no valid shape"),
    "dimension of 2^63": (pack({"a": {"dtype": "F32", "shape": [0, 1 << 63], "data_offsets": [0, 0]}}), "no valid shape"),
    "unknown dtype": (pack({"a": {**A, "dtype": "F12"}}, bytes(8)), "'F12'"),
    "dtype of a wrong kind": (pack({"a": {**A, "dtype": ["F32"]}}, bytes(8)), "not known here"),
    "half a byte": (pack({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 2]}}, bytes(2)), "whole bytes"),
    "entry is no object": (pack({"a": 1}), "no valid shape"),
    "metadata is no map": (pack({"__metadata__": ["pt"], "a": A}, bytes(8)), "__metadata__"),
    "metadata has a number": (pack({"__metadata__": {"n": 1}, "a": A}, bytes(8)), "__metadata__"),
}


@pytest.mark.parametrize(("data", "reason"), BAD_HEADERS.values(), ids=BAD_HEADERS.keys())
def test_a_lying_header_is_refused_with_its_reason(tmp_path: Path, data: bytes, reason: str) -> None:
    folder = write_folder(tmp_path / "model", data=data)
    with pytest.raises(SourceError) as refusal:
        Checkpoint.open(folder)
    assert reason in str(refusal.value)
    assert "model.safetensors" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_the_same_bytes_with_an_honest_header_are_accepted(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", data=pack({"b": B, "a": A}, bytes(16)))
    assert list(Checkpoint.open(folder).tensors) == ["a", "b"]


@settings(max_examples=300, deadline=None)
@given(changes=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=3))
def test_no_changed_header_raises_anything_else_or_reaches_outside_the_file(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]]
) -> None:
    from safetensors import safe_open

    data = bytearray(safetensors_of({"a.weight": ("F32", [2, 3]), "b": ("BF16", [5]), "c": ("I64", [])}, {"format": "pt"}))
    for place, value in changes:
        data[place % len(data)] = value
    path = tmp_path_factory.getbasetemp() / "changed.safetensors"
    path.write_bytes(data)
    try:
        tensors, _, header_bytes = read_header(path)
    except SourceError:
        return
    assert all(header_bytes <= t.start <= t.stop <= len(data) for t in tensors.values())
    opener: Any = safe_open
    with opener(path, framework="np") as file:  # what is accepted here, the library accepts too
        assert set(file.keys()) == set(tensors)
