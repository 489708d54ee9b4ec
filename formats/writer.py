"""ShardedWriter: safetensors shards written in one pass, planned to the byte, hashed on the way, there whole or not at all.

The library's own writer wants all tensors of a file at once and orders several metadata keys at random; this one streams and
gives the same bytes each time. All sizes are known before the first byte, so the header is written first and never touched again.

Tensors whose bytes are no multiple of 8 (see ``formats.shards`` on alignment) are held in memory until their shard ends.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, Self

import numpy as np

from formats.atomic import copy_file, hash_file, output_error, sync_folder, write_bytes_atomically
from formats.finite import nonfinite_in
from formats.folder import INDEX_NAME
from formats.shards import SHARD_BYTES, ShardPlan, TensorSpec, plan_index, plan_shards
from quant.errors import CoverageError, NonFiniteTensor, OutputError

if TYPE_CHECKING:
    import torch

    Data = torch.Tensor | np.ndarray | bytes

__all__ = [
    "ShardPlan",
    "ShardedWriter",
    "TensorSpec",
    "WrittenFile",
    "copy_file",
    "hash_file",
    "plan_index",
    "plan_shards",
    "write_bytes_atomically",
]


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """One file as written: ``nbytes`` is ``header_bytes`` plus the tensors' bytes. ``role`` is ``weights`` or ``index``."""

    name: str
    nbytes: int
    sha256: str
    header_bytes: int
    tensors: dict[str, TensorSpec]
    role: str = "weights"


class ShardedWriter:
    """Writes the tensors of ``groups`` in their order; use as a context manager and call ``finish`` at the end.

    Everything goes to hidden temporary names in ``folder`` (which exists) until ``finish`` renames; leaving the context without
    it, or with an exception, removes them. Memory: the one tensor in ``put``, and the held ones of the shard (see the module).

    Raises:
        CoverageError: a tensor out of turn, twice, missing, or of another dtype, shape or size than planned.
        NonFiniteTensor: a NaN or an infinity in a float tensor, so that a broken scale never reaches a file.
        OutputError: the disk is full or refuses; nothing is left under a final name.
    """

    def __init__(
        self,
        folder: Path,
        groups: Sequence[Sequence[TensorSpec]],
        metadata: Mapping[str, str],
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        self.plans = plan_shards(groups, metadata, shard_bytes)
        self._index = plan_index(self.plans)
        self._folder = folder
        names = [plan.name for plan in self.plans] + ([INDEX_NAME] if self._index is not None else [])
        taken = [name for name in names if (folder / name).exists()]
        if taken:
            raise OutputError(f"{folder} already has {', '.join(taken)}: write into an empty folder")
        self._shard_of = {tensor.name: number for number, plan in enumerate(self.plans) for tensor in plan.tensors}
        self._queue = [tensor for group in groups for tensor in group]
        self._next = 0
        self._shard = -1
        self._file: BinaryIO | None = None
        self._hash = hashlib.sha256()
        self._held: dict[str, bytes] = {}
        self._written: list[WrittenFile] = []
        self._temporary: list[Path] = []
        self._finished = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self._finished:
            self.abort()

    def put(self, name: str, data: Data) -> None:
        """Write the next planned tensor; ``bytes`` or a 1-D uint8 array of the planned size pass as its raw bytes."""
        spec = self._queue[self._next] if self._next < len(self._queue) else None
        if spec is None or spec.name != name:
            expected = f"the next planned tensor is {spec.name!r}" if spec else "all planned tensors are written"
            raise CoverageError(f"tensor {name!r} is out of turn: {expected}")
        raw = _raw_bytes(spec, data)
        found = nonfinite_in(raw, spec.dtype, spec.shape)
        if found is not None:
            raise NonFiniteTensor(
                f"tensor {name!r} would be written with {found[1]} at index {list(found[0])}: nothing is written"
            )
        try:
            if self._shard_of[name] != self._shard:
                self._open_next()
            if spec.nbytes % 8:
                self._held[name] = raw.tobytes()
            else:
                self._write(raw.data)
            self._next += 1
            if self._next == len(self._queue) or self._shard_of[self._queue[self._next].name] != self._shard:
                self._close_shard()
        except OSError as error:
            self.abort()
            raise output_error(self._folder / self.plans[self._shard].name, self.plans[self._shard].nbytes, error) from error

    def finish(self) -> tuple[WrittenFile, ...]:
        """Give every file its final name and return them, the index last. Raises CoverageError for a missing tensor."""
        missing = [tensor.name for tensor in self._queue[self._next :]]
        if missing:
            self.abort()
            raise CoverageError(f"{len(missing)} planned tensors were not written, the first is {missing[0]!r}")
        renamed: list[Path] = []
        path = self._folder
        try:
            for temporary, plan in zip(self._temporary, self.plans, strict=True):
                path = self._folder / plan.name
                temporary.rename(path)
                renamed.append(path)
            sync_folder(self._folder)
            if self._index is not None:
                sha256 = write_bytes_atomically(self._folder / INDEX_NAME, self._index)
                self._written.append(WrittenFile(INDEX_NAME, len(self._index), sha256, 0, {}, "index"))
        except (OSError, OutputError) as error:
            for done in renamed:
                done.unlink(missing_ok=True)
            self.abort()
            if isinstance(error, OSError):
                raise output_error(path, 0, error) from error
            raise
        self._finished = True
        return tuple(self._written)

    def abort(self) -> None:
        """Remove all temporary files; harmless when called twice."""
        if self._file is not None:
            with suppress(OSError):  # closing flushes, which fails again on a full disk
                self._file.close()
            self._file = None
        for temporary in self._temporary:
            temporary.unlink(missing_ok=True)
        self._held.clear()

    def _open_next(self) -> None:
        self._shard += 1
        plan = self.plans[self._shard]
        temporary = self._folder / f".{plan.name}.partial-{os.getpid()}"
        self._temporary.append(temporary)
        self._file = temporary.open("wb")
        self._hash = hashlib.sha256()
        self._write(plan.header)

    def _write(self, data: bytes | memoryview) -> None:
        assert self._file is not None
        self._file.write(data)
        self._hash.update(data)

    def _close_shard(self) -> None:
        assert self._file is not None
        plan = self.plans[self._shard]
        for tensor in plan.tensors:  # in file order: what is held comes last
            if tensor.name in self._held:
                self._write(self._held.pop(tensor.name))
        self._file.flush()
        os.fsync(self._file.fileno())
        os.fchmod(self._file.fileno(), 0o644)
        size = os.fstat(self._file.fileno()).st_size
        self._file.close()
        self._file = None
        if size != plan.nbytes:
            raise CoverageError(f"{plan.name} has {size:,} bytes, planned were {plan.nbytes:,}")
        tensors = {tensor.name: tensor for tensor in plan.tensors}
        self._written.append(WrittenFile(plan.name, size, self._hash.hexdigest(), plan.header_bytes, tensors))


def _raw_bytes(spec: TensorSpec, data: Data) -> np.ndarray:
    """``data`` as a uint8 view or copy ``[nbytes]``, in row-major order, after checking it against ``spec``."""
    if isinstance(data, bytes):
        raw, found = np.frombuffer(data, dtype=np.uint8), None
    elif isinstance(data, np.ndarray):
        little = data.astype(data.dtype.newbyteorder("<"), copy=False)
        raw = np.ascontiguousarray(little).reshape(-1).view(np.uint8)
        code = {"b": "BOOL", "f": f"F{8 * data.itemsize}", "i": f"I{8 * data.itemsize}", "u": f"U{8 * data.itemsize}"}
        bytes_of_it = data.dtype == np.uint8 and data.shape == (spec.nbytes,)
        found = None if bytes_of_it else (code.get(data.dtype.kind, str(data.dtype)), data.shape)
    else:
        import torch

        from formats.checkpoint import STORED_DTYPES

        names = {getattr(torch, name): code for code, name in STORED_DTYPES.items()}
        found = (names.get(data.dtype, str(data.dtype)), tuple(data.shape))
        raw = data.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    if found is not None and found != (spec.dtype, spec.shape):
        raise CoverageError(f"tensor {spec.name!r} is {found[0]} {list(found[1])}, planned was {spec.dtype} {list(spec.shape)}")
    if len(raw) != spec.nbytes:
        raise CoverageError(f"tensor {spec.name!r} has {len(raw):,} bytes, planned were {spec.nbytes:,}")
    return raw
