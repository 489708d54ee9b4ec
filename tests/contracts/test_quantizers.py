"""What every quantiser owes, found by scanning the folder: a new file there is tested without a line here."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from calib.evidence import Evidence
from quant.errors import UsageError
from quant.quantizer import Outcome, get_quantizer, quantizer_names
from quant.scheme import Blocks, ScaleType, Scheme, Zero

ZEROS: tuple[Zero, ...] = ("sym", "zp")
BLOCKS: tuple[Blocks, ...] = (32, "channel", "tensor")
SCALES: tuple[ScaleType, ...] = ("f16", "bf16", "f32")
SCHEMES = [Scheme(bits, zero, blocks, "f16") for bits, zero, blocks in itertools.product(range(2, 9), ZEROS, BLOCKS)]
SCHEMES += [Scheme(4, zero, 32, scale) for zero, scale in itertools.product(ZEROS, SCALES[1:])]
SHAPES = [(1, 1), (1, 64), (5, 40), (16, 64)]
CODES = {"sym": torch.int8, "zp": torch.uint8}
STORED = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}

pytestmark = pytest.mark.parametrize("name", quantizer_names())


def matrix(shape: tuple[int, int], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def quantise(name: str, weights: Tensor, scheme: Scheme) -> Outcome:
    """The quantiser with the evidence of 100 tokens, whether it needs it or not."""
    inputs = matrix((100, weights.shape[1]), 1)
    return get_quantizer(name)(weights, scheme, Evidence.of(inputs))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_shapes_types_and_range_are_those_of_the_scheme(name: str, scheme: Scheme) -> None:
    for shape in SHAPES:
        found = quantise(name, matrix(shape), scheme).qtensor
        assert found.scheme == scheme
        assert (found.shape, found.codes.dtype) == (shape, CODES[scheme.zero])
        assert (tuple(found.scales.shape), found.scales.dtype) == (scheme.block_grid(shape), STORED[scheme.scale])
        assert scheme.code_min <= int(found.codes.min()) <= int(found.codes.max()) <= scheme.code_max
        if scheme.symmetric:
            assert found.zeros is None
        else:
            assert found.zeros is not None
            assert (tuple(found.zeros.shape), found.zeros.dtype) == (scheme.block_grid(shape), torch.uint8)
            assert int(found.zeros.max()) <= scheme.code_max
        assert bool(torch.isfinite(found.dequantise()).all())


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_same_input_gives_the_same_bytes_and_is_left_alone(name: str, scheme: Scheme) -> None:
    weights = matrix((16, 64))
    first = quantise(name, weights, scheme).qtensor
    assert torch.equal(weights, matrix((16, 64)))
    torch.manual_seed(99)
    second = quantise(name, weights, scheme).qtensor
    assert torch.equal(first.codes, second.codes)
    assert torch.equal(first.scales, second.scales)
    assert first.zeros is second.zeros or torch.equal(first.zeros, second.zeros)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("scheme", [Scheme(4, "sym", 32), Scheme(4, "zp", "channel"), Scheme(8, "zp", "tensor", "f32")], ids=str)
def test_any_float_type_is_taken_at_its_own_values(name: str, scheme: Scheme, dtype: torch.dtype) -> None:
    """Narrow weights are widened, not worked on in their own type: the codes are those of the same values in float32."""
    weights = matrix((16, 64)).to(dtype)
    narrow, wide = (quantise(name, values, scheme).qtensor for values in (weights, weights.float()))
    assert torch.equal(narrow.codes, wide.codes)
    assert torch.equal(narrow.scales, wide.scales)
    assert narrow.dequantise().dtype == torch.float32


@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if scheme.symmetric], ids=str)
def test_weights_on_the_grid_are_kept_exactly(name: str, scheme: Scheme) -> None:
    """Every block holds the largest code, so that its own scale is the grid's: nothing is left to choose."""
    top = scheme.code_max
    codes = torch.randint(-top, top + 1, (16, 64), generator=torch.Generator().manual_seed(0))
    codes[:, ::32] = top
    weights = codes * 2.0**-5
    found = quantise(name, weights, scheme).qtensor
    assert torch.equal(found.dequantise(), weights)
    assert torch.equal(found.codes.int(), codes.int())


@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if not scheme.symmetric], ids=str)
def test_weights_on_a_grid_with_a_zero_point_are_kept_exactly(name: str, scheme: Scheme) -> None:
    codes = torch.randint(0, scheme.code_max + 1, (16, 64), generator=torch.Generator().manual_seed(0))
    codes[:, ::32], codes[:, 1::32] = 0, scheme.code_max
    weights = (codes - scheme.code_max // 3) * 2.0**-5
    assert torch.equal(quantise(name, weights, scheme).qtensor.dequantise(), weights)


@pytest.mark.parametrize("scheme", [Scheme(2, "zp", 32), Scheme(8, "sym", "channel")], ids=str)
def test_more_error_than_zeros_would_make_is_no_quantisation(name: str, scheme: Scheme) -> None:
    weights = matrix((16, 64))
    change = quantise(name, weights, scheme).qtensor.dequantise() - weights
    assert float(change.norm()) < {2: 0.6, 8: 0.01}[scheme.bits] * float(weights.norm())


def test_what_needs_no_evidence_works_without(name: str) -> None:
    quantizer = get_quantizer(name)
    if quantizer.needs:
        pytest.skip(f"{name} needs {', '.join(need.value for need in quantizer.needs)}")
    scheme = Scheme(4, "sym", 32)
    without, given = quantizer(matrix((4, 64)), scheme, None).qtensor, quantise(name, matrix((4, 64)), scheme).qtensor
    assert torch.equal(without.codes, given.codes)


def test_a_wrong_name_lists_the_right_ones(name: str) -> None:
    with pytest.raises(UsageError, match=name):
        get_quantizer(name + "x")
