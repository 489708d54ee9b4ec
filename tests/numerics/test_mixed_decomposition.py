"""LLM.int8's decomposition against one product written out, with its bytes counted by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quant.errors import SchemeError
from quant.mixed_decomposition import decompose, outlier_columns
from quant.scheme import Scheme


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def case(count: int, width: int = 24) -> tuple[Tensor, Tensor, Tensor]:
    """(weights, inputs, outliers) with ``count`` columns that reach 6."""
    inputs = normal(10, width, seed=1).clamp(-3, 3)
    inputs[4, 2 : 2 + count] = 60.0
    return normal(6, width), inputs, outlier_columns(inputs.abs().amax(0))


@pytest.mark.parametrize("count", [0, 1, 5])
def test_the_product_is_two_products(count: int) -> None:
    weights, inputs, outliers = case(count)
    assert outliers.nonzero().reshape(-1).tolist() == list(range(2, 2 + count))
    part = decompose(weights, outliers)
    x, w = inputs[:, ~outliers].double(), weights[:, ~outliers].double()
    x_step = x.abs().amax(1, keepdim=True) / 127
    w_step = (w.abs().amax(1, keepdim=True) / 127).half().double()
    integers = (x / x_step).round() @ (w / w_step).round().T  # what the int8 kernel adds up, exactly
    expected = integers * x_step * w_step.T + inputs[:, outliers].double() @ weights[:, outliers].half().double().T
    torch.testing.assert_close(part.product(inputs).double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_bytes_are_codes_scales_columns_and_indices(count: int) -> None:
    weights, _, outliers = case(count)
    assert decompose(weights, outliers).nbytes == 6 * (24 - count) + 6 * 2 + 6 * count * 2 + 4 * count


def test_every_column_an_outlier_is_a_16_bit_matrix() -> None:
    weights, inputs = normal(6, 8), normal(3, 8, seed=1)
    part = decompose(weights, torch.ones(8, dtype=torch.bool))
    assert part.regular is None
    assert part.nbytes == 6 * 8 * 2 + 8 * 4
    torch.testing.assert_close(part.product(inputs), inputs @ weights.half().float().T)


def test_outliers_no_longer_cost_the_other_columns_their_precision() -> None:
    weights, inputs, outliers = case(2)
    right = inputs @ weights.T
    none = torch.zeros_like(outliers)
    errors = [float((decompose(weights, which).product(inputs) - right)[4].norm()) for which in (none, outliers)]
    assert errors[1] < errors[0] / 5


def test_the_threshold_itself_is_an_outlier() -> None:
    assert outlier_columns(torch.tensor([5.99, 6.0, 6.01])).tolist() == [False, True, True]
    assert outlier_columns(torch.tensor([5.99, 6.0]), threshold=7.0).tolist() == [False, False]


def test_what_16_bits_cannot_hold_and_other_schemes_are_refused() -> None:
    with pytest.raises(SchemeError, match="beyond float16"):
        decompose(torch.full((2, 2), 1e6), torch.tensor([True, False]))
    with pytest.raises(SchemeError, match="int4-sym-channel-f16"):
        decompose(normal(2, 4), torch.zeros(4, dtype=torch.bool), Scheme(4, "sym", "channel"))
