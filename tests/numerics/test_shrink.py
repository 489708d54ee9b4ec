"""The data-free range search against trying every candidate on every block by itself."""

from __future__ import annotations

import pytest
import torch

from quant.quantizers.rtn import round_to_nearest
from quant.scheme import Scheme
from quant.shrink import FINE, STEPS, search_shrink

SCHEMES = [
    Scheme.parse(name)
    for name in ("int2-sym-g8-f32", "int3-zp-g16-f16", "int4-sym-channel-bf16", "int2-zp-tensor-f32", "int4-sym-g12-f16")
]


def blocks_of(width: int, scheme: Scheme) -> list[slice]:
    size = scheme.blocks if isinstance(scheme.blocks, int) else width
    return [slice(start, start + size) for start in range(0, width, size)]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_every_block_gets_the_candidate_with_the_least_squared_error(scheme: Scheme) -> None:
    matrix = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)) ** 3
    found = search_shrink(matrix, scheme)
    assert found.shape == torch.Size(scheme.block_grid((6, 40)))
    single = Scheme(scheme.bits, scheme.zero, "tensor", scheme.scale)
    rows = [slice(0, 6)] if scheme.blocks == "tensor" else [slice(row, row + 1) for row in range(6)]
    for r, row in enumerate(rows):
        for c, columns in enumerate(blocks_of(40, scheme)):
            block = matrix[row, columns]

            def error(factor: float, block: torch.Tensor = block) -> float:
                rounded = round_to_nearest(block, single, torch.full((1, 1), factor)).dequantise()
                return float((rounded.double() - block).square().sum())

            coarse = min((1.0, *STEPS), key=error)
            best = min((coarse, *(min(coarse + step, 1.0) for step in FINE)), key=error)
            assert error(float(found[r, c])) == pytest.approx(error(best), rel=1e-6)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_no_block_is_worse_than_its_plain_range_and_few_bits_gain(scheme: Scheme) -> None:
    matrix = torch.randn(32, 96, generator=torch.Generator().manual_seed(1))
    plain = (round_to_nearest(matrix, scheme).dequantise() - matrix).square().sum()
    best = (round_to_nearest(matrix, scheme, search_shrink(matrix, scheme)).dequantise() - matrix).square().sum()
    assert best < (0.85 if scheme.bits == 2 else 1.0) * plain


@pytest.mark.parametrize("value", [0.0, 1.5, -2.0])
def test_constant_blocks_keep_their_range(value: float) -> None:
    for scheme in SCHEMES:
        found = search_shrink(torch.full((4, 40), value), scheme)
        rounded = round_to_nearest(torch.full((4, 40), value), scheme, found).dequantise()
        torch.testing.assert_close(rounded, torch.full((4, 40), value), rtol=4e-3, atol=0)


def test_weights_on_the_grid_keep_their_range() -> None:
    codes = torch.randint(-7, 8, (16, 64), generator=torch.Generator().manual_seed(0))
    codes[:, ::32] = 7
    assert bool((search_shrink(codes * 2.0**-5, Scheme(4, "sym", 32)) == 1).all())
