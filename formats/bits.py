"""Dense bit rows: unsigned b-bit fields laid end to end in 32-bit little-endian words, each row padded to a whole word.

Field j of a row starts at bit j*b, low bits first; fields may straddle words. This is the order that compressed-tensors
0.18 and later read for every width, and earlier releases for 2, 4 and 8 bits.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def words(columns: int, bits: int) -> int:
    """Number of 32-bit words in a row of ``columns`` fields."""
    return -(-columns * bits // 32)


def pack_rows(fields: Tensor, bits: int) -> Tensor:
    """Pack uint8 ``[rows, columns]`` fields below 2^bits into int32 ``[rows, words]``."""
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
    else:
        # Eight fields fill exactly `bits` bytes: assemble them in one 64-bit word and keep its low bytes.
        parts = padded.reshape(rows, -1, 8)
        wide = parts[:, :, 0].astype(np.uint64)
        for i in range(1, 8):
            wide |= parts[:, :, i].astype(np.uint64) << np.uint64(i * bits)
        octets = np.ascontiguousarray(wide.astype("<u8")).view(np.uint8).reshape(rows, -1, 8)[:, :, :bits].reshape(rows, -1)
    packed = np.ascontiguousarray(octets).view("<i4")[:, : words(columns, bits)]
    return torch.from_numpy(np.ascontiguousarray(packed).astype(np.int32, copy=False))


def unpack_rows(packed: Tensor, bits: int, columns: int) -> Tensor:
    """The inverse of ``pack_rows``: uint8 ``[rows, columns]``."""
    rows = packed.shape[0]
    octets = np.ascontiguousarray(packed.contiguous().numpy().astype("<i4", copy=False)).view(np.uint8).reshape(rows, -1)
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
