"""Dense bit rows: unsigned b-bit fields laid end to end, each row padded to a whole byte or to a whole 32-bit word.

Field j of a row starts at bit j*b, low bits first; fields may straddle bytes and words. As little-endian words this is the order
that compressed-tensors 0.18 and later read for every width, and earlier releases for 2, 4 and 8 bits.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def words(columns: int, bits: int) -> int:
    """Number of 32-bit words in a row of ``columns`` fields."""
    return -(-columns * bits // 32)


def pack_rows(fields: Tensor, bits: int) -> Tensor:
    """Pack uint8 ``[rows, columns]`` fields below 2^bits into int32 ``[rows, words]``."""
    packed = _packed(fields, bits).view("<i4")[:, : words(fields.shape[1], bits)]
    return torch.from_numpy(np.ascontiguousarray(packed).astype(np.int32, copy=False))


def pack_octets(fields: Tensor, bits: int) -> Tensor:
    """Pack uint8 ``[rows, columns]`` fields below 2^bits into uint8 ``[rows, ceil(columns * bits / 8)]``."""
    return torch.from_numpy(np.ascontiguousarray(_packed(fields, bits)[:, : -(-fields.shape[1] * bits // 8)]))


def unpack_rows(packed: Tensor, bits: int, columns: int) -> Tensor:
    """The inverse of ``pack_rows``: uint8 ``[rows, columns]``."""
    little = packed.contiguous().numpy().astype("<i4", copy=False)
    return _unpacked(np.ascontiguousarray(little).view(np.uint8).reshape(packed.shape[0], -1), bits, columns)


def unpack_octets(packed: Tensor, bits: int, columns: int) -> Tensor:
    """The inverse of ``pack_octets``: uint8 ``[rows, columns]``."""
    return _unpacked(packed.contiguous().numpy(), bits, columns)


def _packed(fields: Tensor, bits: int) -> NDArray[np.uint8]:
    """Bytes of all rows, filled up as if there were a multiple of 32 fields."""
    rows, columns = fields.shape
    values = fields.contiguous().numpy()
    padded = np.zeros((rows, -(-columns // 32) * 32), dtype=np.uint8)
    padded[:, :columns] = values
    if 8 % bits == 0:
        per_byte = 8 // bits
        parts = padded.reshape(rows, -1, per_byte)
        octets = parts[:, :, 0].copy()
        for i in range(1, per_byte):
            octets |= parts[:, :, i] << (i * bits)
        return octets
    # Eight fields fill exactly `bits` bytes: assemble them in one 64-bit word and keep its low bytes.
    parts = padded.reshape(rows, -1, 8)
    wide = parts[:, :, 0].astype(np.uint64)
    for i in range(1, 8):
        wide |= parts[:, :, i].astype(np.uint64) << np.uint64(i * bits)
    low = np.ascontiguousarray(wide.astype("<u8")).view(np.uint8).reshape(rows, -1, 8)[:, :, :bits]
    return np.ascontiguousarray(low).reshape(rows, -1)


def _unpacked(octets: NDArray[np.uint8], bits: int, columns: int) -> Tensor:
    rows = octets.shape[0]
    full = -(-columns // 32) * 4 * bits
    padded = np.zeros((rows, full), dtype=np.uint8)
    padded[:, : octets.shape[1]] = octets
    mask = (1 << bits) - 1
    if 8 % bits == 0:
        fields = np.stack([(padded >> (i * bits)) & mask for i in range(8 // bits)], axis=-1).reshape(rows, -1)
    else:
        wide = np.zeros((rows, full // bits, 8), dtype=np.uint8)
        wide[:, :, :bits] = padded.reshape(rows, -1, bits)
        value = wide.view("<u8")[:, :, 0]
        fields = np.stack(
            [((value >> np.uint64(i * bits)) & np.uint64(mask)).astype(np.uint8) for i in range(8)], axis=-1
        ).reshape(rows, -1)
    return torch.from_numpy(np.ascontiguousarray(fields[:, :columns]))
