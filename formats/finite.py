"""Search for NaN and infinity in stored tensors, by bit pattern, in one streaming pass with constant memory.

With the sign bit as the top bit, an exponent of all ones (and nothing else) makes a positive value the largest of the *signed*
integers and a negative value the largest of the *unsigned* ones. So two integer maxima, without a temporary array, tell whether a
chunk has a non-finite value: about the speed of reading memory. Only a chunk that has one is searched for its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from formats.header import TensorInfo
from quant.errors import TruncatedFile

Progress = Callable[[int, int], None]

# stays in the second-level cache, so that the second maximum reads no memory; a multiple of every item size
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Layout:
    """Bit layout of a float type: item size in bytes, and the smallest positive pattern that is not a finite number.

    ``infinity`` is the pattern of plus infinity, or None where the type has none and every such pattern is NaN.
    """

    size: int
    first_bad: int
    infinity: int | None


_LAYOUTS: dict[str, _Layout] = {
    "F64": _Layout(8, 0x7FF0_0000_0000_0000, 0x7FF0_0000_0000_0000),
    "F32": _Layout(4, 0x7F80_0000, 0x7F80_0000),
    "C64": _Layout(4, 0x7F80_0000, 0x7F80_0000),  # pairs of F32
    "BF16": _Layout(2, 0x7F80, 0x7F80),
    "F16": _Layout(2, 0x7C00, 0x7C00),
    "F8_E5M2": _Layout(1, 0x7C, 0x7C),
    "F8_E4M3": _Layout(1, 0x7F, None),
}
_ONE_NAN_BYTE = {"F8_E8M0": 0xFF, "F8_E4M3FNUZ": 0x80, "F8_E5M2FNUZ": 0x80}  # no infinity, one pattern for NaN


@dataclass(frozen=True, slots=True)
class NonFinite:
    """The first value of a tensor that is not a number or not finite: ``index`` into its shape, ``kind`` ``nan`` or ``inf``."""

    tensor: str
    index: tuple[int, ...]
    kind: str
    file: str


def first_nonfinite(folder: Path, tensors: Iterable[TensorInfo], progress: Progress | None = None) -> NonFinite | None:
    """The first NaN or infinity of ``tensors`` (in the given order), or None; integer tensors are passed over.

    ``progress`` is called with bytes read and bytes to read. Raises TruncatedFile when a file shrank since its header was read.
    """
    wanted = [t for t in tensors if t.dtype in _LAYOUTS or t.dtype in _ONE_NAN_BYTE]
    total, done = sum(t.nbytes for t in wanted), 0
    buffer = np.empty(_CHUNK_BYTES, dtype=np.uint8)
    by_file: dict[str, list[TensorInfo]] = {}
    for tensor in wanted:
        by_file.setdefault(tensor.file, []).append(tensor)
    for name, group in by_file.items():
        with (folder / name).open("rb", buffering=0) as file:
            for tensor in group:
                found = _search(file, tensor, buffer)
                if found is not None:
                    return found
                done += tensor.nbytes
                if progress is not None:
                    progress(done, total)
    return None


def read_exactly(file: BinaryIO, into: np.ndarray, tensor: TensorInfo) -> None:
    """Fill the byte array ``into`` from the file's position, or raise TruncatedFile naming the file and ``tensor``."""
    filled = 0
    view = into.data
    while filled < len(view):
        count = file.readinto(view[filled:])  # type: ignore[attr-defined]
        if not count:
            raise TruncatedFile(f"{tensor.file} became shorter while it was read: {tensor.name!r} is cut off")
        filled += count


def _search(file: BinaryIO, tensor: TensorInfo, buffer: np.ndarray) -> NonFinite | None:
    file.seek(tensor.start)
    for begin in range(0, tensor.nbytes, _CHUNK_BYTES):
        chunk = buffer[: min(_CHUNK_BYTES, tensor.nbytes - begin)]
        read_exactly(file, chunk, tensor)
        found = nonfinite_in(chunk, tensor.dtype, tensor.shape, begin)
        if found is not None:
            return NonFinite(tensor.name, found[0], found[1], tensor.file)
    return None


def nonfinite_in(chunk: np.ndarray, dtype: str, shape: tuple[int, ...], begin: int = 0) -> tuple[tuple[int, ...], str] | None:
    """Index and kind of the first non-finite value in ``chunk``: the bytes from ``begin`` on of a tensor of ``shape``."""
    place = _place(chunk, dtype)
    if place is None:
        return None
    item, kind = place
    flat = begin // (_LAYOUTS[dtype].size if dtype in _LAYOUTS else 1) + item
    if dtype == "C64":
        flat //= 2
    index = np.unravel_index(flat, shape) if shape else ()
    return tuple(int(i) for i in index), kind


def _place(chunk: np.ndarray, dtype: str) -> tuple[int, str] | None:
    """Position (in items of the chunk) and kind of the first non-finite value of ``chunk`` (bytes), or None."""
    if not chunk.size or not (dtype in _LAYOUTS or dtype in _ONE_NAN_BYTE):
        return None
    if dtype in _ONE_NAN_BYTE:
        hits = np.flatnonzero(chunk == _ONE_NAN_BYTE[dtype])
        return (int(hits[0]), "nan") if hits.size else None
    layout = _LAYOUTS[dtype]
    unsigned = chunk.view(f"u{layout.size}")
    sign = 1 << (8 * layout.size - 1)
    if int(chunk.view(f"i{layout.size}").max()) < layout.first_bad and int(unsigned.max()) < sign | layout.first_bad:
        return None
    magnitude = unsigned & unsigned.dtype.type(sign - 1)
    item = int(np.flatnonzero(magnitude >= layout.first_bad)[0])
    return item, "inf" if int(magnitude[item]) == layout.infinity else "nan"
