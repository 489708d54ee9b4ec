"""Rounding to nearest against a slow oracle: Python numbers, one weight at a time, types narrowed bit by bit."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quant.errors import SchemeError
from quant.qtensor import QTensor
from quant.quantizers.rtn import round_to_nearest
from quant.scheme import Blocks, ScaleType, Scheme, Zero
from quant.shrink import search_shrink
from tests.numerics.rtn_oracle import TINY, UNIT, blocks_of, f32, oracle_block

BITS = range(2, 9)
ZEROS: tuple[Zero, ...] = ("sym", "full", "zp", "fz")
BLOCKS: tuple[Blocks, ...] = (1, 2, 32, 48, "channel", "tensor")
SCALES: tuple[ScaleType, ...] = ("f16", "bf16", "f32")


def check(matrix: Tensor, scheme: Scheme) -> QTensor:
    """``round_to_nearest`` equals the oracle in every code, scale, zero point and value, and errs by half a step at most."""
    found = round_to_nearest(matrix, scheme)
    rows = matrix.float().tolist()
    codes, values = found.codes.tolist(), found.dequantise().tolist()
    scales = found.scales.float().tolist()
    zeros = None if found.zeros is None else found.zeros.tolist()
    assert found.codes.shape == matrix.shape
    assert found.dequantise().dtype == torch.float32
    for (row, column), places in blocks_of(rows, scheme.blocks):
        block = oracle_block([rows[r][c] for r, c in places], scheme)
        where = f"{scheme} block {row}, {column}"
        assert scales[row][column] == block.scale, where
        assert zeros is None or zeros[row][column] == block.zero, where
        assert [codes[r][c] for r, c in places] == block.codes, where
        assert [values[r][c] for r, c in places] == block.values, where
        # Half a step, and what the rounding of the scale takes off the end of the range.
        reach = abs(block.scale) * (0.5 + (2**scheme.bits - 1) * UNIT[scheme.scale]) * 1.001
        if scheme.zero != "fz" and abs(block.scale) > TINY:
            assert max(abs(rows[r][c] - values[r][c]) for r, c in places) <= reach, where
    return found


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_outlier(matrix: Tensor) -> Tensor:
    matrix[1, 3] = 1000.0
    return matrix


MATRICES: dict[str, Callable[[], Tensor]] = {
    "normal": lambda: normal(3, 40),
    "wide range": lambda: normal(2, 64) * torch.logspace(-6, 3, 64),
    "ties": lambda: (torch.arange(-40, 40).float() * 0.25).reshape(2, 40),
    "one column": lambda: normal(5, 1),
    "one weight": lambda: torch.tensor([[-0.3]]),
    "constant": lambda: torch.full((2, 40), 9.0),
    "constant below": lambda: torch.full((2, 40), -0.3),
    "zeros": lambda: torch.zeros(2, 40),
    "one sided": lambda: normal(3, 40).abs() + 0.5,
    "one sided below": lambda: -normal(3, 40).abs(),
    "single outlier": lambda: with_outlier(normal(2, 40)),
    "bfloat16": lambda: normal(3, 40).bfloat16(),
    "float16": lambda: normal(3, 40).half(),
    "half subnormal": lambda: normal(2, 40) * 1e-6,
    "R03 tiny": lambda: torch.cat([torch.full((2, 32), 1e-7), normal(2, 8)], dim=1),
}


@pytest.mark.parametrize("zero", ZEROS)
@pytest.mark.parametrize("bits", BITS)
def test_codes_scales_and_values_are_the_oracles(bits: int, zero: Zero) -> None:
    for make in MATRICES.values():
        for blocks in BLOCKS:
            for scale in SCALES:
                check(make(), Scheme(bits, zero, blocks, scale))


def test_the_oracle_rounds_half_to_even() -> None:
    """Scale 1 exactly, weights halfway between codes: they go to the even one."""
    weights = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 6.5, 7.0]])
    found = check(weights, Scheme(4, "sym", 8))
    assert float(found.scales) == 1.0
    assert found.codes.tolist() == [[0, 2, 2, 0, -2, -2, 6, 7]]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("bits", BITS)
def test_quantising_symmetric_weights_again_changes_nothing(bits: int, blocks: Blocks, scale: ScaleType) -> None:
    """R07: the restricted range reaches as far as the scale says, so the second scale is the first one.

    This holds where scales are normal numbers of their type. Among half precision's subnormals, which are rounded up, the largest
    code may lie below the end of the range, and the second scale may then be smaller.
    """
    for seed, plain in enumerate((normal(4, 72), with_outlier(normal(2, 96)), normal(3, 40) * 0.01)):
        matrix = torch.where(plain.abs() < 0.01, 0.01, plain) if scale == "f16" else plain
        once = round_to_nearest(matrix, Scheme(bits, "sym", blocks, scale))
        twice = round_to_nearest(once.dequantise(), once.scheme)
        assert torch.equal(twice.codes, once.codes), seed
        if scale == "f32":  # code_max * scale has up to 31 bits: dividing it again may miss the last one
            torch.testing.assert_close(twice.scales, once.scales, rtol=2.0**-23, atol=0)
        else:
            assert torch.equal(twice.scales, once.scales), seed


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("bits", BITS)
def test_quantising_with_the_full_range_again_keeps_every_value(bits: int, scale: ScaleType) -> None:
    """Codes and scales may both change their sign; what they mean does not."""
    for plain in (normal(4, 72), with_outlier(normal(2, 96)), -with_outlier(normal(3, 40))):
        matrix = torch.where(plain.abs() < 0.01, 0.01, plain) if scale == "f16" else plain
        once = round_to_nearest(matrix, Scheme(bits, "full", 24, scale))
        twice = round_to_nearest(once.dequantise(), once.scheme)
        torch.testing.assert_close(twice.dequantise(), once.dequantise(), rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("bits", BITS)
def test_the_full_range_gives_its_extra_code_to_the_side_that_reaches_further(bits: int) -> None:
    half = 2 ** (bits - 1)
    levels = torch.arange(-half, half).float()
    below, above = (round_to_nearest(sign * levels.reshape(1, -1), Scheme(bits, "full", "channel", "f32")) for sign in (1, -1))
    assert (float(below.scales), float(above.scales)) == (1.0, -1.0)
    assert torch.equal(below.codes, above.codes)
    assert torch.equal(below.dequantise()[0], levels)
    assert torch.equal(above.dequantise()[0], -levels)


def test_the_full_range_is_worth_most_where_codes_are_few() -> None:
    """Squared error of bell-shaped weights with ranges searched, against the restricted range at the same bytes."""
    weights = normal(64, 512)
    ratios = []
    for bits in (2, 3, 4, 8):
        plain, full = (Scheme(bits, zero, 64) for zero in ("sym", "full"))
        assert plain.bits_per_weight((64, 512)) == full.bits_per_weight((64, 512))
        errors = [
            (round_to_nearest(weights, scheme, search_shrink(weights, scheme)).dequantise() - weights).square().sum()
            for scheme in (full, plain)
        ]
        ratios.append(float(errors[0] / errors[1]))
    assert ratios == sorted(ratios)
    assert ratios[0] < 0.72
    assert ratios[1] < 0.77
    assert ratios[2] < 0.85
    assert ratios[3] < 1.0


def test_r07_weights_on_the_full_range_grid_lose_only_its_lowest_point() -> None:
    weights = 0.1 * torch.tensor([[-8.0, -5.0, 0.0, 3.0, 7.0]])
    once = check(weights, Scheme(4, "sym", "channel", "f32"))
    assert int(once.codes.min()) == -7
    assert torch.equal(round_to_nearest(once.dequantise(), once.scheme).codes, once.codes)


@pytest.mark.parametrize("zero", ZEROS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("scale", SCALES)
def test_r03_and_r04_tiny_blocks_stay_finite_and_small(bits: int, zero: Zero, scale: ScaleType) -> None:
    """A stored scale is never zero, whatever rounds to nothing in its type."""
    tiny = torch.zeros(4, 32)
    tiny[0] = 1e-39
    tiny[2, 7] = 1e-30
    tiny[3] = torch.linspace(-1e-39, 1e-39, 32)
    found = check(tiny, Scheme(bits, zero, 32, scale))
    assert bool((found.scales.float() != 0).all())
    assert zero == "full" or bool((found.scales.float() > 0).all())
    assert float((found.dequantise() - tiny).abs().max()) <= f32(1e-30)
    small = round_to_nearest(torch.full((1, 32), 1e-7), Scheme(bits, zero, 32, scale))  # below half precision's smallest, over 7
    assert float((small.dequantise() - 1e-7).abs().max()) <= TINY


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("zero", ZEROS)
def test_r03_a_scale_that_overflows_is_refused_and_wider_types_hold_it(bits: int, zero: Zero) -> None:
    huge = normal(2, 32)
    huge[1, 5] = 1e9
    with pytest.raises(SchemeError, match=f"int{bits}-{zero}-g32-f16.*overflows f16.*bf16 or f32"):
        round_to_nearest(huge, Scheme(bits, zero, 32, "f16"))
    for scale in SCALES[1:]:
        found = check(huge, Scheme(bits, zero, 32, scale))
        assert bool(torch.isfinite(found.dequantise()).all())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("zero", ZEROS)
@pytest.mark.parametrize("scale", SCALES)
def test_non_finite_weights_give_no_codes(bad: float, zero: Zero, scale: ScaleType) -> None:
    matrix = normal(2, 32)
    matrix[0, 3] = bad
    with pytest.raises(SchemeError):
        round_to_nearest(matrix, Scheme(4, zero, 32, scale))


@pytest.mark.parametrize("zero", ZEROS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("scale", SCALES)
def test_r05_constant_groups_are_reproduced(bits: int, zero: Zero, scale: ScaleType) -> None:
    """With 0 in the range a constant lies at its end: no step of the grid is lost, only the rounding of the scale."""
    for matrix, blocks in ((torch.tensor([[9.0, 9.0], [-9.0, -9.0]]), 2), (torch.full((1, 64), 9.0), 32)):
        found = round_to_nearest(matrix, Scheme(bits, zero, blocks, scale))
        torch.testing.assert_close(found.dequantise(), matrix, rtol=UNIT[scale] * 1.01, atol=0)


@pytest.mark.parametrize("zero", ZEROS)
@pytest.mark.parametrize("bits", BITS)
def test_short_last_group_is_a_block_of_its_own(bits: int, zero: Zero) -> None:
    matrix = normal(3, 40, seed=bits)
    matrix[:, 32:] *= 100  # the last 8 columns need another scale than the first 32
    scheme = Scheme(bits, zero, 32)
    whole = round_to_nearest(matrix, scheme)
    assert whole.scales.shape == (3, 2)
    left, right = (round_to_nearest(part.contiguous(), scheme) for part in (matrix[:, :32], matrix[:, 32:]))
    assert torch.equal(whole.codes, torch.cat([left.codes, right.codes], dim=1))
    assert torch.equal(whole.scales, torch.cat([left.scales, right.scales], dim=1))
    assert torch.equal(whole.dequantise(), torch.cat([left.dequantise(), right.dequantise()], dim=1))


def test_a_short_group_does_not_see_the_filling() -> None:
    """The filling repeats the last weight: a one-sided last group must not get a zero from it."""
    matrix = torch.cat([normal(2, 32), torch.tensor([[5.0, 6.0], [-7.0, -6.0]])], dim=1)
    found = check(matrix, Scheme(4, "fz", 32, "f32"))
    assert float((found.dequantise()[:, 32:] - matrix[:, 32:]).abs().max()) < 1e-5


@pytest.mark.parametrize("bits", BITS)
def test_one_sided_weights_use_the_whole_grid(bits: int) -> None:
    scheme = Scheme(bits, "zp", 32)
    above, below = round_to_nearest(normal(2, 32).abs(), scheme), round_to_nearest(-normal(2, 32).abs(), scheme)
    assert above.zeros is not None
    assert below.zeros is not None
    assert above.zeros.tolist() == [[0], [0]]
    assert below.zeros.tolist() == [[2**bits - 1]] * 2
    assert above.codes.amax(1).tolist() == [2**bits - 1] * 2
    assert below.codes.amin(1).tolist() == [0, 0]


@pytest.mark.parametrize("scale", ["f16", "bf16"])
@pytest.mark.parametrize("zero", ["sym", "zp"])
def test_r15_codes_belong_to_the_scale_as_stored(zero: Zero, scale: ScaleType) -> None:
    """Codes made with the exact scale but read with the stored one drift apart at the ends of an 8-bit grid; ours do not."""
    matrix = normal(64, 256)
    stored = round_to_nearest(matrix, Scheme(8, zero, "channel", scale))
    exact = round_to_nearest(matrix, Scheme(8, zero, "channel", "f32"))
    mixed = QTensor(stored.scheme, exact.codes, stored.scales, exact.zeros)  # the wrong order
    error, wrong = ((q.dequantise() - matrix).norm() / matrix.norm() for q in (stored, mixed))
    best = (exact.dequantise() - matrix).norm() / matrix.norm()
    assert error < 1.1 * best
    assert error < wrong


def test_r16_arithmetic_is_float32_whatever_the_weights_are() -> None:
    matrix = normal(64, 4096).bfloat16()
    scheme = Scheme(8, "sym", "channel", "f32")
    reference = matrix.double()
    step = reference.abs().amax(1, keepdim=True) / 127
    ideal = (reference / step).round().clamp(-127, 127) * step

    def sqnr(values: Tensor) -> float:
        return float(10 * torch.log10(reference.square().sum() / (values - reference).square().sum()))

    assert abs(sqnr(round_to_nearest(matrix, scheme).dequantise().double()) - sqnr(ideal)) < 0.1
    narrow = matrix / (matrix.abs().amax(1, keepdim=True) / 127)  # the same in bfloat16: what the case warns of
    coarse = narrow.round().clamp(-127, 127).double() * (matrix.abs().amax(1, keepdim=True) / 127).double()
    assert sqnr(coarse) < sqnr(ideal) - 0.1


def test_shrink_clips_every_block_by_its_own_factor() -> None:
    matrix, scheme = normal(3, 64), Scheme(4, "zp", 32, "f32")
    shrink = torch.tensor([[1.0, 0.5], [0.8, 1.0], [0.6, 0.7]])
    found, plain = round_to_nearest(matrix, scheme, shrink), round_to_nearest(matrix, scheme)
    torch.testing.assert_close(found.scales, plain.scales * shrink, rtol=1e-6, atol=0)
    assert found.zeros is not None
    step, zero = (part.float().repeat_interleave(32, 1) for part in (found.scales, found.zeros))
    inside = torch.minimum(torch.maximum(matrix, -zero * step), (15 - zero) * step)
    assert bool((inside != matrix).any()), "nothing was clipped"
    assert bool(((found.dequantise() - inside).abs() <= step / 2 * 1.00001).all())


@pytest.mark.parametrize("bits", BITS)
def test_clipped_symmetric_codes_stay_in_the_restricted_range(bits: int) -> None:
    """What lies beyond the end goes to the end, not to the most negative code, which no scheme of ours uses."""
    scheme = Scheme(bits, "sym", 32)
    found = round_to_nearest(normal(4, 64), scheme, torch.full((4, 2), 0.3))
    top = 2 ** (bits - 1) - 1
    assert (int(found.codes.min()), int(found.codes.max())) == (-top, top)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"scales": torch.ones(2, 3, dtype=torch.float16)}, "do not fit"),
        ({"scales": torch.ones(2, 2)}, "do not fit"),
        ({"scales": torch.tensor([[1, 0], [1, 1]], dtype=torch.float16)}, "zero, negative or not finite"),
        ({"scales": torch.tensor([[1, -1], [1, 1]], dtype=torch.float16)}, "zero, negative or not finite"),
        ({"scales": torch.tensor([[1, torch.inf], [1, 1]], dtype=torch.float16)}, "zero, negative or not finite"),
        ({"scales": torch.tensor([[1, torch.nan], [1, 1]], dtype=torch.float16)}, "zero, negative or not finite"),
        ({"scheme": Scheme(4, "full", 32), "scales": torch.tensor([[-1, 0], [1, 1]], dtype=torch.float16)}, "zero"),
        ({"zeros": torch.zeros(2, 2, dtype=torch.uint8)}, "not allowed"),
        ({"scheme": Scheme(4, "zp", 32)}, "missing"),
        ({"scheme": Scheme(4, "zp", 32), "zeros": torch.zeros(2, 1, dtype=torch.uint8)}, "do not fit"),
    ],
)
def test_a_qtensor_cannot_be_inconsistent(change: dict[str, object], sentence: str) -> None:
    good = round_to_nearest(normal(2, 64), Scheme(4, "sym", 32))
    fields = {"scheme": good.scheme, "codes": good.codes, "scales": good.scales, "zeros": good.zeros} | change
    with pytest.raises(SchemeError, match=sentence):
        QTensor(**fields)  # type: ignore[arg-type]
