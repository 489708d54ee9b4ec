"""What every quantiser owes, found by scanning the folder: a new file there is tested without a line here."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from calib.evidence import Evidence
from quant.elements import ELEMENTS
from quant.errors import SchemeError, UsageError
from quant.grid import from_codes
from quant.quantizer import Outcome, get_quantizer, quantizer_names
from quant.quantizers.rtn import round_to_nearest
from quant.scheme import Blocks, ScaleType, Scheme, Zero

ZEROS: tuple[Zero, ...] = ("sym", "zp")
BLOCKS: tuple[Blocks, ...] = (32, "channel", "tensor")
SCALES: tuple[ScaleType, ...] = ("f16", "bf16", "f32")
INTEGERS = [Scheme(bits, zero, blocks, "f16") for bits, zero, blocks in itertools.product(range(2, 9), ZEROS, BLOCKS)]
INTEGERS += [Scheme(4, zero, 32, scale) for zero, scale in itertools.product(ZEROS, SCALES[1:])]
INTEGERS += [Scheme(bits, "full", 32) for bits in range(2, 9)]
INTEGERS += [Scheme(3, "full", "channel", "bf16"), Scheme(4, "full", "tensor", "f32")]
_MX = [
    f"{name}-b32-e8m0.{rule}" for name in ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1", "mxint8") for rule in ("floor", "even", "ceil")
]
_FP8 = [
    f"{name}-{blocks}-{scale}" for name in ("e4m3", "e4m3fnuz", "e5m2") for blocks in ("channel", "tensor") for scale in SCALES
]
FLOATS = [Scheme.parse(text) for text in [*_MX, *_FP8, "e2m1-b16-e4m3.f32", "e2m1-b32-f16", "e2m3-channel-bf16"]]
SCHEMES = INTEGERS + FLOATS
SHAPES = [(1, 1), (7, 1), (1, 64), (5, 40), (3, 33), (16, 64)]
STORED = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "e8m0": torch.uint8,
    "e4m3": torch.float8_e4m3fn,
}
LARGEST = float(torch.finfo(torch.float32).max)
SMALLEST_SCALE = {"f16": 2.0**-24, "bf16": 2.0**-126, "f32": 2.0**-126, "e8m0": 2.0**-126, "e4m3": 2.0**-126}

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
        signed = scheme.element == "int" and scheme.zero != "zp"
        assert (found.shape, found.codes.dtype) == (shape, torch.int8 if signed else torch.uint8)
        assert (tuple(found.scales.shape), found.scales.dtype) == (scheme.block_grid(shape), STORED[scheme.scale])
        assert scheme.code_min <= int(found.codes.min()) <= int(found.codes.max()) <= scheme.code_max
        assert (found.divisor is not None) == (scheme.scale == "e4m3")
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
    assert torch.equal(first.scales.float(), second.scales.float())
    assert first.zeros is second.zeros or torch.equal(first.zeros, second.zeros)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_any_float_type_is_taken_at_its_own_values(name: str, scheme: Scheme, dtype: torch.dtype) -> None:
    """Narrow weights are widened, not worked on in their own type: the codes are those of the same values in float32."""
    weights = matrix((16, 64)).to(dtype)
    narrow, wide = (quantise(name, values, scheme).qtensor for values in (weights, weights.float()))
    assert torch.equal(narrow.codes, wide.codes)
    assert torch.equal(narrow.scales.float(), wide.scales.float())
    assert narrow.dequantise().dtype == torch.float32


@pytest.mark.parametrize("scheme", [scheme for scheme in INTEGERS if scheme.symmetric], ids=str)
def test_weights_on_the_grid_are_kept_exactly(name: str, scheme: Scheme) -> None:
    """Every block holds the largest code, so that its own scale is the grid's: nothing is left to choose."""
    top = scheme.code_max
    codes = torch.randint(scheme.code_min, top + 1, (16, 64), generator=torch.Generator().manual_seed(0))
    codes[:, ::32] = scheme.code_min if scheme.zero == "full" else top
    for sign in (1, -1):
        weights = sign * codes * 2.0**-5
        found = quantise(name, weights, scheme).qtensor
        assert torch.equal(found.dequantise(), weights)
        assert torch.equal(found.codes.int(), (codes if scheme.zero == "full" else sign * codes).int())


@pytest.mark.parametrize("scheme", FLOATS, ids=str)
def test_weights_on_a_float_grid_are_kept_exactly(name: str, scheme: Scheme) -> None:
    """Every number of the format with a power of two as scale, its largest one in every block."""
    table = torch.tensor(
        [value for value in ELEMENTS[scheme.element].values() if math.isfinite(value) and abs(value) <= scheme.top]
    )
    levels = table[torch.randint(len(table), (16, 64), generator=torch.Generator().manual_seed(0))]
    levels[:, ::16] = table.max()
    weights = levels * 2.0**-5
    assert torch.equal(quantise(name, weights, scheme).qtensor.dequantise(), weights)


@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if scheme.symmetric], ids=str)
def test_twice_is_once(name: str, scheme: Scheme) -> None:
    """Scales that are powers of two come back exactly; others may differ in the last bit of float32.

    Where a column makes up for others a block's largest code may move, and with it the grid that its own range gives: those
    quantisers owe it only to blocks that hold their largest code, as in the tests above.
    """
    if get_quantizer(name).needs:
        pytest.skip(f"{name} moves weights before it rounds them")
    once = quantise(name, matrix((16, 64)), scheme).qtensor.dequantise()
    twice = quantise(name, once, scheme).qtensor.dequantise()
    torch.testing.assert_close(twice, once, rtol=0 if scheme.scale == "e8m0" else 1e-6, atol=0)


@pytest.mark.parametrize("scheme", [scheme for scheme in INTEGERS if not scheme.symmetric], ids=str)
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


def groups(shape: tuple[int, int]) -> dict[str, Tensor]:
    """Matrices whose blocks are hard: no range, tiny, one-sided, with one outlier, at the end of float32."""
    plain = matrix(shape)
    outlier = plain * 1e-3
    outlier[:, 5 % shape[1]] = 100.0
    return {
        "zero": torch.zeros(shape),
        "constant": torch.full(shape, 0.37),
        "constant and negative": torch.full(shape, -0.37),
        "subnormal": plain * 1e-40,
        "tiny": plain * 1e-37,
        "one-sided": plain.abs(),
        "single outlier": outlier,
        "huge": plain / plain.abs().max() * LARGEST,
        "all largest": torch.full(shape, LARGEST),
        "both": torch.cat([plain * 1e-30, plain * 1e30]),
    }


def _refused(name: str, weights: Tensor, scheme: Scheme) -> bool:
    try:
        quantise(name, weights, scheme)
    except SchemeError:
        return True
    return False


@pytest.mark.parametrize("shape", [(4, 64), (4, 1), (3, 41)], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_hard_blocks_stay_finite_and_are_not_lost(name: str, scheme: Scheme, shape: tuple[int, int]) -> None:
    """Or the scheme is refused by its name: half-precision scales and ranges around zero have an end, others must hold all."""
    for kind, weights in groups(shape).items():
        ends = scheme.scale == "f16" or not scheme.symmetric
        if ends and kind in ("huge", "all largest", "both") and _refused(name, weights, scheme):
            with pytest.raises(SchemeError, match=str(scheme)):
                quantise(name, weights, scheme)
            continue
        stored = quantise(name, weights, scheme).qtensor
        means = stored.dequantise()
        assert bool(torch.isfinite(means).all()), kind
        if kind == "zero":
            assert not bool(means.any())
            assert not bool(from_codes(stored.codes, scheme).any()) or not scheme.symmetric
        if not get_quantizer(name).needs and kind != "both":
            top = float(weights.abs().max())
            assert float((means.double() - weights.double()).abs().max()) <= max(0.5 * top, SMALLEST_SCALE[scheme.scale]) * (
                1 + 1e-3
            ), kind


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_weight_that_is_not_finite_is_refused(name: str, scheme: Scheme, bad: float) -> None:
    """R14: never clamped to the largest number, which would hide it."""
    weights = matrix((4, 64))
    weights[1, 40] = bad
    with pytest.raises(SchemeError, match=r"NaN or infinit"):
        quantise(name, weights, scheme)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_evidence_of_no_token_is_noted_and_rounded_plainly(name: str, scheme: Scheme) -> None:
    quantizer = get_quantizer(name)
    weights = matrix((4, 64))
    found = quantizer(weights, scheme, Evidence.none(64))
    assert torch.equal(found.qtensor.dequantise(), round_to_nearest(weights, scheme).dequantise())
    assert [note.kind for note in found.notes] == (["no-evidence"] if quantizer.needs else [])


@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if scheme.shares_range], ids=str)
def test_a_scale_of_the_whole_tensor_can_be_shared(name: str, scheme: Scheme) -> None:
    """R75: two matrices that engines fuse get one tensor-level scale, from the larger of their ranges."""
    small, large = torch.full((4, 64), 0.5), torch.full((4, 64), 2.0)
    evidence = Evidence.of(matrix((100, 64), 1))
    found = [get_quantizer(name)(weights, scheme, evidence, largest=2.0).qtensor for weights in (small, large)]
    if scheme.blocks == "tensor":
        assert torch.equal(found[0].scales.float(), found[1].scales.float())
    else:
        assert found[0].divisor is not None
        assert found[1].divisor is not None
        assert torch.equal(found[0].divisor, found[1].divisor)
    for weights, stored in zip((small, large), found, strict=True):
        torch.testing.assert_close(stored.dequantise(), weights, rtol=0.07, atol=0)


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
