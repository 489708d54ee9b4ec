"""Every option of GPTQ against a dense implementation that inverts what is left of H again at every column."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from calib.evidence import Evidence
from quant.errors import UsageError
from quant.quantizer import Need, get_quantizer
from quant.quantizers.gptq import Gptq
from quant.quantizers.rtn import round_to_nearest
from quant.scheme import Scheme
from tests.numerics.test_gptq import correlated

NAMES = ("int4-sym-g8-f32", "int3-zp-g16-f16", "int2-sym-channel-f32", "int8-zp-tensor-f32", "int3-sym-g12-bf16")
SCHEMES = [Scheme.parse(name) for name in NAMES]


def pair(tokens: int, width: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs of the quantised model and of the float model: apart by what depends on them and by noise."""
    inputs = correlated(tokens, width, seed)
    noise = torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed + 100))
    mixed = inputs @ torch.randn(width, width, generator=torch.Generator().manual_seed(seed + 200))
    return inputs, inputs + 0.02 * mixed + 0.1 * noise


def range_of(weights: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Scale and zero point, one per row, of a grid over ``weights`` ``[rows, n]``: written from the definition."""
    grid = round_to_nearest(weights.float(), Scheme(scheme.bits, scheme.zero, "channel", scheme.scale))
    return grid.scales.double()[:, 0], torch.zeros(len(weights)).double() if grid.zeros is None else grid.zeros.double()[:, 0]


def oracle(
    matrix: Tensor,
    scheme: Scheme,
    inputs: Tensor,
    floats: Tensor | None,
    *,
    by_energy: bool,
    updated: bool,
    damping: float,
    share: float,
) -> tuple[Tensor, Tensor]:
    """Codes and the grid's scales per column by the definition, without any factor.

    Round a column; spread its error over the rest by the inverse of their H; let the columns after it make up for the difference
    of its own input between the two models, by the inverse of what is left *without* it; drop the column.
    """
    x = inputs.double()
    h = inputs.T.float() @ inputs.float()
    cross = torch.zeros_like(h).double() if floats is None else ((floats - inputs).T.float() @ inputs.float()).double()
    energy = h.diagonal().double()
    order = torch.argsort(energy, descending=True, stable=True).tolist() if by_energy else list(range(x.shape[1]))
    h = h.double() + damping * energy.mean() * torch.eye(len(energy), dtype=torch.float64)
    size = scheme.blocks if isinstance(scheme.blocks, int) else matrix.shape[1]
    work, codes, scales = matrix.double().clone(), torch.zeros(matrix.shape, dtype=torch.float64), torch.zeros(matrix.shape)
    original = round_to_nearest(matrix, scheme)
    left = list(order)
    while left:
        j, rest = left[0], left[1:]
        group = j // size
        if updated and isinstance(scheme.blocks, int):
            if j % size == 0:
                scale, zero = range_of(work[:, j : j + size], scheme)
        else:
            scale = original.scales.double()[:, group].expand(len(matrix))
            zero = (
                torch.zeros(len(matrix)).double()
                if original.zeros is None
                else original.zeros.double()[:, group].expand(len(matrix))
            )
        scales[:, j] = scale
        value = work[:, j].clone()
        codes[:, j] = (torch.round(value / scale) + zero).clamp(scheme.code_min, scheme.code_max)
        inverse = torch.linalg.inv(h[left][:, left])
        work[:, left] -= ((value - (codes[:, j] - zero) * scale) / inverse[0, 0]).unsqueeze(1) * inverse[0]
        if rest and share:
            pull = cross[j, rest] @ torch.linalg.inv(h[rest][:, rest])
            work[:, rest] += share * value.unsqueeze(1) * pull
        left = rest
    return codes, scales


CASES = [
    (order, policy, damping, share)
    for order, policy, damping, share in itertools.product(
        ("energy", "none"), ("static", "updated"), (0.01, 0.2), (0.0, 0.25, 1.0)
    )
    if (order, policy) != ("energy", "updated")
]


@pytest.mark.parametrize(("order", "policy", "damping", "share"), CASES)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_every_code_of_every_option_equals_the_dense_oracle(
    scheme: Scheme, order: str, policy: str, damping: float, share: float
) -> None:
    for seed in range(3):
        matrix = torch.randn(12, 32, generator=torch.Generator().manual_seed(seed))
        inputs, floats = pair(200, 32, seed)
        found = Gptq(order, policy, damping, share)(matrix, scheme, Evidence.of_pair(inputs, floats)).qtensor  # type: ignore[arg-type]
        codes, scales = oracle(
            matrix, scheme, inputs, floats, by_energy=order == "energy", updated=policy == "updated", damping=damping, share=share
        )
        assert torch.equal(found.codes.double(), codes)
        size = scheme.blocks if isinstance(scheme.blocks, int) else 32
        columns = torch.arange(32) // size
        # Grids of updated weights are taken from float32 sums here and from float64 ones in the oracle.
        torch.testing.assert_close(found.scales.float()[:, columns].expand(12, -1), scales.float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("order", "policy"), [("energy", "static"), ("none", "static"), ("none", "updated")])
@pytest.mark.parametrize("blocks", ["g48", "g64", "channel"])
def test_past_a_run_of_columns_the_blocked_updates_equal_the_oracle(blocks: str, order: str, policy: str) -> None:
    """192 columns are more than are updated one by one; groups of 48 lie across the edge of such a run. R34: any width."""
    scheme = Scheme.parse(f"int4-sym-{blocks}-f32")
    matrix = torch.randn(4, 192, generator=torch.Generator().manual_seed(0))
    inputs, floats = pair(600, 192, 1)
    found = Gptq(order, policy, 0.01, 0.5)(matrix, scheme, Evidence.of_pair(inputs, floats)).qtensor  # type: ignore[arg-type]
    codes, _ = oracle(
        matrix, scheme, inputs, floats, by_energy=order == "energy", updated=policy == "updated", damping=0.01, share=0.5
    )
    assert torch.equal(found.codes.double(), codes)


def test_r34_one_scale_per_row_works_at_any_width_and_is_not_plain_rounding() -> None:
    """R34: matrices wider than the run of columns that is updated at once; codes differ, the output error is lower."""
    for width in (127, 128, 129, 192, 300):
        scheme = Scheme(3, "sym", "channel")
        matrix = torch.randn(8, width, generator=torch.Generator().manual_seed(width))
        inputs = correlated(2 * width, width, 4)
        gptq, rtn = Gptq()(matrix, scheme, Evidence.of(inputs)).qtensor, round_to_nearest(matrix, scheme)
        assert not torch.equal(gptq.codes, rtn.codes)
        errors = [float((inputs @ (q.dequantise() - matrix).T).norm()) for q in (gptq, rtn)]
        assert errors[0] < errors[1]


def test_asymmetric_calibration_comes_closer_to_the_float_outputs() -> None:
    """The aim is W X_float: the error against it falls, in the mean over seeds, by as much of the difference as can be undone."""
    scheme = Scheme(4, "sym", 32)
    errors = {0.0: 0.0, 1.0: 0.0}
    for seed in range(5):
        matrix = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed))
        inputs, floats = pair(500, 64, seed)
        for share in errors:
            found = Gptq(asymmetric=share)(matrix, scheme, Evidence.of_pair(inputs, floats)).qtensor.dequantise()
            errors[share] += float((inputs @ found.T - floats @ matrix.T).norm())
    assert errors[1.0] < 0.9 * errors[0.0]


def test_equal_streams_make_asymmetric_calibration_plain() -> None:
    matrix, scheme = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)), Scheme(4, "sym", 32)
    inputs = correlated(200, 64, 0)
    plain = Gptq()(matrix, scheme, Evidence.of(inputs)).qtensor
    assert torch.equal(Gptq(asymmetric=1.0)(matrix, scheme, Evidence.of_pair(inputs, inputs)).qtensor.codes, plain.codes)


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize(("order", "policy"), [("energy", "static"), ("none", "static"), ("none", "updated")])
@pytest.mark.parametrize("case", ["dead", "all dead", "rank one", "duplicated", "few", "huge", "tiny"])
def test_r01_r02_bad_evidence_ends_finite_with_every_option_and_says_so(case: str, order: str, policy: str, share: float) -> None:
    """R01: dead channels, no activation at all; R02: the same rows again and again, fewer rows than channels."""
    scheme = Scheme(4, "zp", 32)
    matrix = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    inputs, floats = pair(16 if case in ("rank one", "duplicated") else 4 if case == "few" else 100, 64, 3)
    if case in ("dead", "all dead"):
        inputs[:, slice(5, 6) if case == "dead" else slice(None)] = 0
    elif case in ("rank one", "duplicated"):
        rows = 1 if case == "rank one" else 16
        inputs, floats = (value[:rows].repeat(64, 1) for value in (inputs, floats))
    elif case in ("huge", "tiny"):
        inputs, floats = (value * (1e15 if case == "huge" else 1e-15) for value in (inputs, floats))
    outcome = Gptq(order, policy, 0.01, share)(matrix, scheme, Evidence.of_pair(inputs, floats))  # type: ignore[arg-type]
    assert bool(torch.isfinite(outcome.qtensor.dequantise()).all())
    kinds = {note.kind for note in outcome.notes}
    assert ("dead-channels" in kinds) == (case in ("dead", "all dead"))
    assert ("rank-deficient" in kinds) == (case == "few")
    assert all("rank 4 at most" in note.text for note in outcome.notes if note.kind == "rank-deficient")


def test_no_token_is_rounded_to_nearest_with_every_option() -> None:
    matrix, scheme = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)), Scheme(4, "sym", 32)
    empty = Evidence(0, torch.zeros(64), torch.zeros(64, dtype=torch.float64), torch.zeros(64, 64))
    for quantizer in (Gptq(asymmetric=1.0), Gptq("none", "updated")):
        outcome = quantizer(matrix, scheme, empty)
        assert torch.equal(outcome.qtensor.codes, round_to_nearest(matrix, scheme).codes)
        assert [note.kind for note in outcome.notes] == ["no-evidence"]


def test_r81_groups_stay_contiguous_so_that_halves_of_the_inputs_are_halves_of_the_matrix() -> None:
    """R81: columns by energy, but group k is columns 32k to 32k + 31: each half of them has its own codes and scales."""
    scheme = Scheme(4, "sym", 32)
    matrix = torch.randn(8, 128, generator=torch.Generator().manual_seed(0))
    whole = Gptq()(matrix, scheme, Evidence.of(correlated(400, 128, 0))).qtensor
    dequantised = whole.dequantise()
    for half in range(2):
        columns, groups = slice(64 * half, 64 * half + 64), slice(2 * half, 2 * half + 2)
        own = whole.codes[:, columns].float().reshape(8, 2, 32) * whole.scales[:, groups].float().unsqueeze(-1)
        assert torch.equal(own.reshape(8, 64), dequantised[:, columns])


def test_options_are_named_and_contradictions_refused() -> None:
    assert get_quantizer("gptq", (("damping", 0.5), ("order", "none"))) == Gptq("none", damping=0.5)
    assert get_quantizer("gptq").needs == {Need.GRAM}
    assert get_quantizer("gptq", (("asymmetric", 0.25),)).needs == {Need.GRAM, Need.CROSS}
    with pytest.raises(UsageError, match="needs order none"):
        get_quantizer("gptq", (("scale_policy", "updated"),))
    with pytest.raises(UsageError, match=r"gptq has no option 'ordr' \(there are: order, scale_policy, damping, asymmetric\)"):
        get_quantizer("gptq", (("ordr", "none"),))
    with pytest.raises(UsageError, match=r"rtn has no option 'order'"):
        get_quantizer("rtn", (("order", "none"),))
    with pytest.raises(UsageError, match="needs calibration evidence"):
        Gptq(asymmetric=1.0)(torch.ones(2, 4), Scheme(4, "sym", 4), Evidence.of(torch.ones(3, 4)))
