"""Float formats and their scales against the specification, torch's own casts and ml_dtypes: every code and every edge."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from quant.elements import ELEMENTS
from quant.errors import SchemeError
from quant.grid import from_codes, snap, to_codes
from quant.qtensor import real_scales
from quant.quantizers.rtn import round_to_nearest
from quant.scales import BlockGrid, power_of_two
from quant.scheme import ALIASES, Scheme
from tests.numerics.number_oracle import FORMATS, PRINTED, block_power, meaning, nearest, numbers

NAMES = sorted(FORMATS)
RULES = ("floor", "even", "ceil")
TORCH = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e4m3fnuz": torch.float8_e4m3fnuz}
ML_DTYPES = {
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "e4m3fnuz": "float8_e4m3fnuz",
    "e3m2": "float6_e3m2fn",
    "e2m3": "float6_e2m3fn",
    "e2m1": "float4_e2m1fn",
}


def plain(name: str) -> Scheme:
    """The format with float32 scales: what is tested is the grid, not the scale."""
    return Scheme.parse(f"{name}-channel-f32")


def edges(name: str) -> Tensor:
    """Every number of the format, every half way point, their float32 neighbours, and what lies beyond the largest."""
    table = sorted({float(value) for value in numbers(name).values()})
    middles = [(a + b) / 2 for a, b in itertools.pairwise(table)]
    points = torch.tensor([*table, *middles, 1.1 * table[-1], 4 * table[-1], 1.1 * table[0], 4 * table[0], 1e-30, -1e-30])
    infinity = torch.full_like(points, torch.inf)
    return torch.cat([points, torch.nextafter(points, infinity), torch.nextafter(points, -infinity)])


@pytest.mark.parametrize("name", NAMES)
def test_every_code_means_what_the_specification_says(name: str) -> None:
    for code, value in enumerate(ELEMENTS[name].values()):
        expected = meaning(name, code)
        assert math.isfinite(value) == (expected is not None)
        assert expected is None or Fraction(value) == expected


@pytest.mark.parametrize("name", NAMES)
def test_largest_smallest_and_exponent_are_those_printed_in_the_specification(name: str) -> None:
    element, (largest, smallest, emax) = ELEMENTS[name], PRINTED[name]
    assert Fraction(element.largest) == Fraction(largest)
    assert Fraction(element.smallest) == Fraction(smallest)
    assert element.emax == emax
    above = min(value for value in numbers(name).values() if value > 1)
    assert Fraction(element.epsilon) == above - 1


@pytest.mark.parametrize("name", NAMES)
def test_rounding_is_to_nearest_half_to_even_and_saturates(name: str) -> None:
    values = edges(name)
    expected = [nearest(name, Fraction(value)) for value in values.tolist()]
    assert [Fraction(value) for value in snap(values, 0.0, plain(name)).tolist()] == expected


@pytest.mark.parametrize("name", NAMES)
def test_codes_come_back_and_no_code_is_nonfinite_or_minus_zero(name: str) -> None:
    scheme = plain(name)
    snapped = snap(edges(name), 0.0, scheme)
    codes = to_codes(snapped, scheme)
    assert codes.dtype == torch.uint8
    assert torch.equal(from_codes(codes, scheme), snapped + 0.0)
    used = set(codes.tolist())
    minus_zero = {1 << (FORMATS[name].bits - 1)} if FORMATS[name].exponent_bits else set()
    assert used == set(numbers(name)) - minus_zero
    assert int(to_codes(torch.tensor([-0.0]), scheme)) == 0


@pytest.mark.parametrize("name", sorted(TORCH))
def test_torch_reads_every_code_alike_and_casts_alike(name: str) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    ours, theirs = from_codes(codes, plain(name)), codes.view(TORCH[name]).float()
    assert torch.equal(ours.nan_to_num(7e7), theirs.nan_to_num(7e7))
    inside = edges(name).clamp(-ELEMENTS[name].largest, ELEMENTS[name].largest)
    assert torch.equal(snap(inside, 0.0, plain(name)), inside.to(TORCH[name]).float())


@pytest.mark.parametrize("name", sorted(ML_DTYPES))
def test_ml_dtypes_reads_every_code_alike_and_casts_alike(name: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtype = getattr(ml_dtypes, ML_DTYPES[name])
    count = 2 ** FORMATS[name].bits
    codes = torch.arange(count, dtype=torch.int32).to(torch.uint8)
    theirs = torch.from_numpy(codes.numpy().view(dtype).astype("float32"))
    assert torch.equal(from_codes(codes, plain(name)).nan_to_num(7e7), theirs.nan_to_num(7e7))
    inside = edges(name).clamp(-ELEMENTS[name].largest, ELEMENTS[name].largest)
    cast = torch.from_numpy(inside.numpy().astype(dtype).astype("float32"))
    assert torch.equal(snap(inside, 0.0, plain(name)), cast)


def blocks(seed: int) -> Tensor:
    """Blocks of 32 of very different sizes, and blocks whose largest number lies just at, below and above powers of two."""
    generator = torch.Generator().manual_seed(seed)
    random = torch.randn(64, 32, generator=generator) * torch.exp2(torch.linspace(-100, 100, 64)).unsqueeze(1)
    rows = []
    for fraction in (1.0, 1.25, 1.4375, 1.46875, 1.5, 1.625, 1.75, 1.875, 1.9375, 1.96875, 1.984375, 1.99):
        for neighbour in (-torch.inf, 0.0, torch.inf):
            row = torch.rand(32, generator=generator) * 0.9
            top = torch.tensor(fraction)
            row[5] = -(top if neighbour == 0 else torch.nextafter(top, torch.tensor(neighbour)))
            rows.append(row)
    return torch.cat([random, torch.stack(rows)])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", [name for name in NAMES if name != "e4m3fnuz"])
def test_blocks_with_a_power_of_two_equal_the_oracle(name: str, rule: str) -> None:
    """Scale, codes and numbers of whole blocks in exact fractions. R15: the stored scale is the one that made the codes."""
    scheme = Scheme.parse(f"{name}-b32-e8m0.{rule}")
    weights = blocks(1)
    stored = round_to_nearest(weights, scheme)
    means = stored.dequantise()
    for row in range(len(weights)):
        exact = [Fraction(value) for value in weights[row].tolist()]
        power = block_power(name, rule, exact)
        assert int(stored.scales[row, 0]) == power + 127
        scale = Fraction(2) ** power
        expected = [nearest(name, value / scale) * scale for value in exact]
        assert [Fraction(value) for value in means[row].tolist()] == expected


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e3m2", "e2m3", "e2m1", "mxint8"])
def test_ceil_clips_nothing_and_the_next_smaller_scale_would(name: str) -> None:
    scheme = Scheme.parse(f"{name}-b32-e8m0.ceil")
    weights = blocks(2)
    grid = BlockGrid.of(weights, scheme)
    top = weights.abs().amax(1, keepdim=True)
    assert bool((top <= scheme.top * grid.steps()).all())
    assert bool((top > scheme.top * grid.steps() / 2).all())


@pytest.mark.parametrize(("name", "bits"), [("e2m1", 4), ("e2m3", 6)])
def test_the_even_rule_is_the_one_of_compressed_tensors(name: str, bits: int) -> None:
    found = pytest.importorskip("compressed_tensors.quantization.utils.mxfp_utils")
    scheme = Scheme.parse(f"{name}-b32-e8m0.even")
    tops = blocks(3).abs().amax(1)
    assert torch.equal(power_of_two(tops, scheme).float(), found.generate_mx_scales(tops, bits).float())


def test_a_short_last_block_has_its_own_scale() -> None:
    scheme = Scheme.parse("mxfp4")
    weights = torch.cat([torch.full((1, 32), 6.0), torch.full((1, 3), 0.75)], dim=1)
    stored = round_to_nearest(weights, scheme)
    assert stored.scales.tolist() == [[127, 124]]
    assert torch.equal(stored.dequantise(), weights)


def test_two_level_scales_equal_the_formula() -> None:
    """NVFP4: divisor 448 x 6 / largest of the tensor, block scales E4M3 of largest / 6 x divisor, codes with what was stored."""
    scheme = Scheme.parse("nvfp4")
    weights = torch.randn(8, 64, generator=torch.Generator().manual_seed(4)) * torch.logspace(-3, 1, 8).unsqueeze(1)
    stored = round_to_nearest(weights, scheme)
    assert stored.divisor is not None
    assert float(stored.divisor) == pytest.approx(2688 / float(weights.abs().max()), rel=1e-6)
    tops = weights.reshape(8, 4, 16).abs().amax(-1)
    wanted = [nearest("e4m3", Fraction(float(stored.divisor)) * Fraction(top) / 6) for top in tops.flatten().tolist()]
    assert [Fraction(value) for value in stored.scales.float().flatten().tolist()] == wanted
    steps = real_scales(stored.scales, scheme, stored.divisor)
    assert torch.equal(steps, stored.scales.float() / stored.divisor)
    for row, column in itertools.product(range(8), range(64)):
        ratio = float(weights[row, column] / steps[row, column // 16])
        assert Fraction(float(stored.levels()[row, column])) == nearest("e2m1", Fraction(ratio))


def test_block_scales_beyond_their_type_are_clamped_and_never_nan() -> None:
    """R14: one outlier block under a divisor that is too large for it: 448 and a saturated block, never the bytes of NaN."""
    scheme = Scheme.parse("nvfp4")
    weights = torch.ones(2, 32)
    weights[1, 20] = 1000.0
    stored = round_to_nearest(weights, scheme, largest=1.0)
    bytes_ = stored.scales.view(torch.uint8)
    assert not bool(((bytes_ & 0x7F) == 0x7F).any())
    assert float(stored.scales.float().max()) == 448.0
    assert bool(torch.isfinite(stored.dequantise()).all())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("alias", sorted(ALIASES))
def test_a_broken_weight_is_refused_and_never_saturated(alias: str, bad: float) -> None:
    """R14: a cast would turn an infinity into the largest number and hide a broken weight."""
    weights = torch.ones(4, 64)
    weights[2, 33] = bad
    with pytest.raises(SchemeError, match="NaN or infinit"):
        round_to_nearest(weights, Scheme.parse(alias))


@pytest.mark.parametrize("alias", sorted(ALIASES))
def test_a_name_is_short_for_a_scheme_and_its_string_is_the_identity(alias: str) -> None:
    scheme = Scheme.parse(alias)
    assert str(scheme) == ALIASES[alias]
    assert Scheme.parse(str(scheme)) == scheme


@pytest.mark.parametrize(
    "text",
    [
        "e2m1-b32-e8m0",
        "e2m1-b32-e8m0.up",
        "e2m1-g32-e8m0.floor",
        "e2m1-channel-e8m0.floor",
        "e9m9-b32-e8m0.floor",
        "e4m3-b32-f16.floor",
        "e2m1-b0-e8m0.floor",
        "e2m1-b16-e4m3",
        "int4-b32-e8m0.floor",
        "mxfp4 ",
        "MXFP4",
    ],
)
def test_what_is_no_scheme_is_refused(text: str) -> None:
    with pytest.raises(SchemeError):
        Scheme.parse(text)
