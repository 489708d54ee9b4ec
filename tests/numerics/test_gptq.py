"""GPTQ against a dense oracle that inverts what is left of H again at every column."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import Tensor

from calib.evidence import Evidence
from quant.quantizers.gptq import DAMPING, Gptq
from quant.quantizers.rtn import round_to_nearest
from quant.scheme import Scheme
from tests.numerics.number_oracle import nearest

SCHEMES = [
    Scheme.parse(name)
    for name in ("int4-sym-g8-f32", "int3-zp-g16-f16", "int2-sym-channel-f32", "int8-zp-tensor-f32", "int3-full-g8-f16")
]


def correlated(tokens: int, width: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, generator=generator) / width**0.5 + torch.eye(width)
    inputs: Tensor = torch.randn(tokens, width, generator=generator) @ mix
    return inputs * torch.logspace(-1, 1, width)


def oracle(matrix: Tensor, scheme: Scheme, gram: Tensor, order: list[int]) -> Tensor:
    """Codes by the definition: round a column, spread its error over the rest by the inverse of their H, drop the column."""
    grid = round_to_nearest(matrix, scheme)
    h = gram.double() + DAMPING * gram.double().diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
    size = scheme.blocks if isinstance(scheme.blocks, int) else matrix.shape[1]
    work, codes = matrix.double().clone(), torch.zeros(matrix.shape, dtype=torch.float64)
    left = list(order)
    while left:
        inverse = torch.linalg.inv(h[left][:, left])
        j = left[0]
        scale = grid.scales.double()[:, j // size].expand(len(matrix))
        zero = torch.zeros(len(matrix)) if grid.zeros is None else grid.zeros[:, j // size].double().expand(len(matrix))
        codes[:, j] = (torch.round(work[:, j] / scale) + zero).clamp(scheme.code_min, scheme.code_max)
        error = (work[:, j] - (codes[:, j] - zero) * scale) / inverse[0, 0]
        work[:, left] -= error.unsqueeze(1) * inverse[0].unsqueeze(0)
        left = left[1:]
    return codes


@pytest.mark.parametrize("order", [True, False])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_every_code_equals_the_dense_oracle(scheme: Scheme, order: bool) -> None:
    for seed in range(4):
        matrix = torch.randn(12, 32, generator=torch.Generator().manual_seed(seed))
        evidence = Evidence.of(correlated(200, 32, seed))
        columns = (
            torch.argsort(evidence.gram.diagonal().double(), descending=True, stable=True).tolist() if order else list(range(32))
        )
        found = Gptq(order="energy" if order else "none")(matrix, scheme, evidence).qtensor
        assert torch.equal(found.codes.double(), oracle(matrix, scheme, evidence.gram, columns))


def float_oracle(matrix: Tensor, scheme: Scheme, gram: Tensor, order: list[int]) -> Tensor:
    """Numbers before scaling by the same definition, each the nearest one of the format in exact fractions."""
    steps = round_to_nearest(matrix, scheme).steps().double()
    h = gram.double() + DAMPING * gram.double().diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
    size = scheme.blocks if isinstance(scheme.blocks, int) else matrix.shape[1]
    work, levels = matrix.double().clone(), torch.zeros(matrix.shape, dtype=torch.float64)
    left = list(order)
    while left:
        inverse = torch.linalg.inv(h[left][:, left])
        j = left[0]
        step = steps[:, j // size].expand(len(matrix))
        exact = [Fraction(value) for value in (work[:, j] / step).tolist()]
        levels[:, j] = torch.tensor([float(nearest(scheme.element, value)) for value in exact], dtype=torch.float64)
        work[:, left] -= ((work[:, j] - levels[:, j] * step) / inverse[0, 0]).unsqueeze(1) * inverse[0].unsqueeze(0)
        left = left[1:]
    return levels


@pytest.mark.parametrize("name", ["mxfp4", "mxfp6-e2m3", "mxfp6-e3m2", "mxfp8", "mxint8", "nvfp4", "fp8", "fp8-tensor"])
def test_every_number_of_a_float_grid_equals_the_dense_oracle(name: str) -> None:
    scheme = Scheme.parse(name)
    for seed in range(3):
        matrix = torch.randn(6, 48, generator=torch.Generator().manual_seed(seed)) * 0.02
        evidence = Evidence.of(correlated(200, 48, seed))
        columns = torch.argsort(evidence.gram.diagonal().double(), descending=True, stable=True).tolist()
        found = Gptq()(matrix, scheme, evidence).qtensor
        assert torch.equal(found.levels().double(), float_oracle(matrix, scheme, evidence.gram, columns))


def test_blocked_updates_equal_the_oracle_past_a_block_of_columns() -> None:
    scheme = Scheme.parse("int4-sym-g64-f32")
    matrix = torch.randn(4, 192, generator=torch.Generator().manual_seed(0))
    evidence = Evidence.of(correlated(600, 192, 1))
    columns = torch.argsort(evidence.gram.diagonal().double(), descending=True, stable=True).tolist()
    assert torch.equal(Gptq()(matrix, scheme, evidence).qtensor.codes.double(), oracle(matrix, scheme, evidence.gram, columns))


def test_output_error_is_below_rounding_and_codes_differ() -> None:
    scheme = Scheme.parse("int3-sym-g32-f16")
    matrix = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    inputs = correlated(500, 64, 2)
    gptq, rtn = Gptq()(matrix, scheme, Evidence.of(inputs)).qtensor, round_to_nearest(matrix, scheme)
    errors = [float((inputs @ (q.dequantise() - matrix).T).norm()) for q in (gptq, rtn)]
    assert errors[0] < 0.8 * errors[1]
    assert not torch.equal(gptq.codes, rtn.codes)


@pytest.mark.parametrize("case", ["dead", "all dead", "rank one", "duplicated", "huge", "tiny"])
def test_bad_evidence_ends_finite_and_is_noted_where_it_must(case: str) -> None:
    scheme = Scheme.parse("int4-sym-g32-f16")
    matrix = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    inputs = correlated(16, 64, 3)
    if case == "dead":
        inputs[:, 5] = 0
    elif case == "all dead":
        inputs = torch.zeros_like(inputs)
    elif case == "rank one":
        inputs = inputs[:1].repeat(40, 1)
    elif case == "duplicated":
        inputs = inputs.repeat(64, 1)
    else:
        inputs = inputs * (1e15 if case == "huge" else 1e-15)
    outcome = Gptq()(matrix, scheme, Evidence.of(inputs))
    assert bool(torch.isfinite(outcome.qtensor.dequantise()).all())
    kinds = {note.kind for note in outcome.notes}
    assert ("dead-channels" in kinds) == (case in ("dead", "all dead"))
    if case == "all dead":
        assert torch.equal(outcome.qtensor.codes, round_to_nearest(matrix, scheme).codes)


def test_no_token_is_a_note_and_not_a_guess() -> None:
    scheme = Scheme.parse("int4-sym-g32-f16")
    matrix = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    empty = Evidence(0, torch.zeros(64), torch.zeros(64, dtype=torch.float64), torch.zeros(64, 64))
    outcome = Gptq()(matrix, scheme, empty)
    assert torch.equal(outcome.qtensor.codes, round_to_nearest(matrix, scheme).codes)
    assert [note.kind for note in outcome.notes] == ["no-evidence"]
