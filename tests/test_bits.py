"""Dense bit rows against an independent one-bit-at-a-time oracle, exhaustively over widths and row lengths."""

from __future__ import annotations

import time

import pytest
import torch

from formats.bits import pack_octets, pack_rows, unpack_octets, unpack_rows, words


def oracle(row: list[int], bits: int) -> list[int]:
    """Lay the fields into one big integer, low bits first, and cut it into signed 32-bit words."""
    number = sum(value << (index * bits) for index, value in enumerate(row))
    count = -(-len(row) * bits // 32)
    unsigned = [(number >> (32 * word)) & 0xFFFFFFFF for word in range(count)]
    return [word - 2**32 if word >= 2**31 else word for word in unsigned]


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("columns", [1, 2, 7, 8, 31, 32, 33, 64, 96, 100])
def test_packing_equals_the_oracle_and_comes_back(bits: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(bits * 1000 + columns)
    fields = torch.randint(0, 2**bits, (3, columns), dtype=torch.uint8, generator=generator)
    packed = pack_rows(fields, bits)
    assert packed.shape == (3, words(columns, bits))
    assert packed.tolist() == [oracle(row, bits) for row in fields.tolist()]
    assert torch.equal(unpack_rows(packed, bits, columns), fields)
    octets = pack_octets(fields, bits)
    assert octets.shape == (3, -(-columns * bits // 8))
    numbers = [sum(value << (index * bits) for index, value in enumerate(row)) for row in fields.tolist()]
    assert octets.tolist() == [list(number.to_bytes(octets.shape[1], "little")) for number in numbers]
    assert torch.equal(unpack_octets(octets, bits, columns), fields)


@pytest.mark.parametrize("bits", range(2, 9))
def test_every_code_at_every_place_of_a_word_cycle(bits: int) -> None:
    codes = torch.arange(2**bits, dtype=torch.uint8)
    fields = torch.stack([codes.roll(shift) for shift in range(32)])
    assert torch.equal(unpack_rows(pack_rows(fields, bits), bits, fields.shape[1]), fields)
    assert torch.equal(unpack_octets(pack_octets(fields, bits), bits, fields.shape[1]), fields)


def test_a_large_matrix_is_packed_in_under_a_second() -> None:
    """4096 x 14336 at 4 bits; the best of three, since the machine may be busy."""
    fields = torch.randint(0, 16, (4096, 14336), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    times = []
    for _ in range(3):
        start = time.perf_counter()
        pack_rows(fields, 4)
        times.append(time.perf_counter() - start)
    assert min(times) < 1.0
