"""Which tensors go to which safetensors shard, and the exact bytes of every file, before anything is written; pure.

Alignment: the format allows no holes between tensors, so order does it. The header is padded to 8 bytes; tensors of a multiple of
8 bytes come first, in production order; the few others (an odd number of bfloat16 values) follow at the end of their shard,
largest items first. Every tensor then starts at a multiple of its item size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from formats.folder import SINGLE_NAME
from formats.header import DTYPE_BITS, build_header, tensor_bytes
from quant.errors import CoverageError

SHARD_BYTES = 5_000_000_000  # the hub's customary limit, in decimal gigabytes


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor to be written: safetensors dtype name, shape, and what its bytes are to the ledger.

    ``role`` is ``codes``, ``scales``, ``zeros``, ``shape`` or ``kept``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: str

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.dtype, self.shape)

    @property
    def item_bytes(self) -> int:
        return max(1, DTYPE_BITS[self.dtype] // 8)


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One file to be: its name, its tensors in file order, its header's bytes, and its exact size in bytes."""

    name: str
    tensors: tuple[TensorSpec, ...]
    header: bytes = field(repr=False)

    @property
    def header_bytes(self) -> int:
        return len(self.header)

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)


def plan_shards(
    groups: Sequence[Sequence[TensorSpec]], metadata: Mapping[str, str], shard_bytes: int = SHARD_BYTES
) -> tuple[ShardPlan, ...]:
    """The files that ``ShardedWriter`` writes for the same arguments, byte for byte in size; pure.

    A group (the parts of one module) stays in one file. No file is larger than ``shard_bytes``, header included, unless one group
    alone is. Raises CoverageError for a name that comes twice or for no tensor at all.
    """
    _check_names(groups)
    base = len(build_header((), metadata)) + 8
    shards: list[list[TensorSpec]] = []
    room = -1
    for group in (g for g in groups if g):
        size = sum(t.nbytes + _entry_bound(t, shard_bytes) for t in group)
        if room < size:
            shards.append([])
            room = shard_bytes - base
        shards[-1].extend(group)
        room -= size
    count = len(shards)
    names = [SINGLE_NAME] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    return tuple(_plan(name, tensors, metadata) for name, tensors in zip(names, shards, strict=True))


def plan_index(plans: Sequence[ShardPlan]) -> bytes | None:
    """The bytes of model.safetensors.index.json, or None for a single file. ``total_size`` counts tensor bytes, no headers."""
    if len(plans) == 1:
        return None
    weight_map = {tensor.name: plan.name for plan in plans for tensor in plan.tensors}
    total = sum(tensor.nbytes for plan in plans for tensor in plan.tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()


def _check_names(groups: Sequence[Sequence[TensorSpec]]) -> None:
    seen: set[str] = set()
    for tensor in (t for group in groups for t in group):
        if tensor.name in seen:
            raise CoverageError(f"tensor {tensor.name!r} is planned twice")
        seen.add(tensor.name)
    if not seen:
        raise CoverageError("no tensor is planned to be written")


def _entry_bound(tensor: TensorSpec, limit: int) -> int:
    """Header bytes of ``tensor`` at most: with offsets of as many digits as the limit has."""
    entry = {tensor.name: {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [limit, limit]}}
    return len(json.dumps(entry, separators=(",", ":"), ensure_ascii=False).encode())


def _plan(name: str, tensors: Sequence[TensorSpec], metadata: Mapping[str, str]) -> ShardPlan:
    streamed = [tensor for tensor in tensors if tensor.nbytes % 8 == 0]
    held = sorted((tensor for tensor in tensors if tensor.nbytes % 8), key=lambda tensor: -tensor.item_bytes)  # stable
    offset = 0
    entries = []
    for tensor in streamed + held:
        entries.append((tensor.name, tensor.dtype, tensor.shape, offset, offset + tensor.nbytes))
        offset += tensor.nbytes
    return ShardPlan(name, tuple(streamed + held), build_header(entries, metadata))
