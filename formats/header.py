"""The header of a safetensors file: strict reading and deterministic writing, without the library.

Layout: 8 bytes little-endian header length, that many bytes of JSON, then the tensors' bytes. The JSON maps each tensor's name
to ``{"dtype", "shape", "data_offsets": [start, stop]}`` with offsets relative to the end of the header, and ``__metadata__`` to
a map of strings (https://github.com/huggingface/safetensors, README, "Format"). Reading is strict because everything behind it
trusts these offsets: sorted, they must tile the rest of the file exactly, with no hole and no overlap.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quant.errors import SourceError, TruncatedFile

MAX_HEADER_BYTES = 100_000_000  # the library's own cap; a longer length field is damage or an attack
LENGTH_BYTES = 8
GET_IT_AGAIN = "download or copy it again"
NOT_SAFETENSORS = "not a safetensors file, or damaged"

DTYPE_BITS: dict[str, int] = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor of ``shape``; raises KeyError for an unknown dtype and ValueError for a broken last byte."""
    whole, rest = divmod(math.prod(shape) * DTYPE_BITS[dtype], 8)
    if rest:
        raise ValueError(f"{dtype} {list(shape)} does not fill whole bytes")
    return whole


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one stored tensor lies: absolute byte offsets ``start`` to ``stop`` in ``file``, a name relative to the folder."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def read_header(path: Path, name: str | None = None) -> tuple[dict[str, TensorInfo], dict[str, str], int]:
    """Tensors in file order, metadata, and header bytes (8 + JSON length) of the file at ``path``; ``name`` is what to call it.

    Raises:
        TruncatedFile: the file is shorter or longer than its header promises (both sizes are in the message).
        SourceError: the header is no valid header: cap, JSON, dtype, shape, overlap, hole.
    """
    name = path.name if name is None else name
    actual = path.stat().st_size
    if actual < LENGTH_BYTES:
        raise TruncatedFile(f"{name} is {actual} bytes long, too short to be a safetensors file: {GET_IT_AGAIN}")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if length > MAX_HEADER_BYTES:
            raise SourceError(
                f"{name} declares a header of {length:,} bytes, above the cap of {MAX_HEADER_BYTES:,}: {NOT_SAFETENSORS}"
            )
        header_bytes = LENGTH_BYTES + length
        if header_bytes > actual:
            raise TruncatedFile(
                f"{name} ends inside its own header: expected at least {header_bytes:,} bytes, found {actual:,}; {GET_IT_AGAIN}"
            )
        text = file.read(length)
    entries = _parse(name, text)
    metadata = _metadata(name, entries.pop("__metadata__", None))
    tensors = sorted((_entry(name, key, entry, header_bytes) for key, entry in entries.items()), key=lambda t: (t.start, t.stop))
    _check_tiling(name, tensors, header_bytes, actual)
    return {t.name: t for t in tensors}, metadata, header_bytes


def build_header(tensors: Iterable[tuple[str, str, tuple[int, ...], int, int]], metadata: Mapping[str, str]) -> bytes:
    """Length field and padded JSON for ``(name, dtype, shape, start, stop)`` with offsets relative to the end of the header.

    Keys are sorted and the JSON has one spelling, so equal arguments give equal bytes; spaces pad it to a multiple of 8 so that
    the first tensor is aligned. ``format`` is always ``pt``: transformers refuses or warns about files without it.
    """
    entries: dict[str, Any] = {
        name: {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]} for name, dtype, shape, start, stop in tensors
    }
    entries["__metadata__"] = {**metadata, "format": "pt"}
    text = json.dumps(entries, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _parse(name: str, text: bytes) -> dict[str, Any]:
    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            raise SourceError(f"{name} names {next(k for k in keys if keys.count(k) > 1)!r} twice in its header: damaged file")
        return found

    try:
        entries = json.loads(text.decode(), object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError):
        raise SourceError(f"{name} has a header that is not JSON: {NOT_SAFETENSORS}") from None
    if not isinstance(entries, dict):
        raise SourceError(f"{name} has a header that is not a JSON object: {NOT_SAFETENSORS}")
    return entries


def _metadata(name: str, found: Any) -> dict[str, str]:
    if found is None:  # absent or null: older writers; transformers accepts both
        return {}
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise SourceError(f"{name} has a __metadata__ that is not a map of strings: damaged file")
    return dict(found)


def _entry(file: str, key: str, entry: Any, header_bytes: int) -> TensorInfo:
    def whole(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63

    dtype, shape, offsets = (entry.get(k) for k in ("dtype", "shape", "data_offsets")) if isinstance(entry, dict) else (None,) * 3
    if not isinstance(shape, list) or not all(map(whole, shape)):
        raise SourceError(f"{file} gives tensor {key!r} no valid shape: damaged file")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise SourceError(f"{file} stores tensor {key!r} as {dtype!r}, a type that is not known here: {', '.join(DTYPE_BITS)}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(whole, offsets)) or offsets[0] > offsets[1]:
        raise SourceError(f"{file} gives tensor {key!r} no valid offsets: damaged file")
    start, stop = offsets
    try:
        expected = tensor_bytes(dtype, tuple(shape))
    except ValueError as error:
        raise SourceError(f"{file}, tensor {key!r}: {error}: damaged file") from None
    if stop - start != expected:
        raise SourceError(
            f"{file} gives tensor {key!r} {stop - start:,} bytes, but {dtype} {shape} takes {expected:,}: damaged header"
        )
    return TensorInfo(key, dtype, tuple(shape), file, header_bytes + start, header_bytes + stop)


def _check_tiling(file: str, tensors: list[TensorInfo], header_bytes: int, actual: int) -> None:
    end = header_bytes
    for tensor in tensors:
        if tensor.start != end:
            what = "overlaps the tensor before it" if tensor.start < end else "leaves a hole before it"
            raise SourceError(f"{file}, tensor {tensor.name!r} at byte {tensor.start:,} {what} ({end:,}): damaged header")
        end = tensor.stop
    if end != actual:
        kind = "truncated" if actual < end else "followed by bytes that no tensor owns"
        raise TruncatedFile(f"{file} is {kind}: expected {end:,} bytes from its header, found {actual:,}; {GET_IT_AGAIN}")
