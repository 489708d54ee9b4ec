"""Rounded inputs against plain loops over numbers, and against the compressed-tensors package."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from quant.activations import ALIASES, ActivationScheme, static_scale
from quant.errors import SchemeError

TOKEN, TENSOR, STATIC = (ActivationScheme.parse(name) for name in ALIASES.values())


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def by_hand(rows: Tensor, steps: list[float]) -> list[list[float]]:
    """Round half to even, saturate, multiply: one number at a time, each step in float32 as the kernels."""
    found = []
    for row, step in zip(rows.tolist(), steps, strict=True):
        codes = [max(-128, min(127, int(np.rint(np.float32(value) / np.float32(step))))) for value in row]
        found.append([float(np.float32(code) * np.float32(step)) for code in codes])
    return found


@pytest.mark.parametrize("short", ALIASES)
def test_names_are_identities(short: str) -> None:
    scheme = ActivationScheme.parse(short)
    assert str(scheme) == ALIASES[short]
    assert ActivationScheme.parse(str(scheme)) == scheme


@pytest.mark.parametrize("text", ["", "a8", "a8-token-static", "a4-token-dynamic", "TOKEN", "a8-token-dynamic "])
def test_a_wrong_name_is_refused_with_those_there_are(text: str) -> None:
    with pytest.raises(SchemeError, match=r"a8-token|per tensor"):
        ActivationScheme.parse(text)


def test_no_scheme_but_the_three_exists() -> None:
    made = set()
    for sharing, dynamic in itertools.product(("token", "tensor", "channel"), (True, False)):
        try:
            made.add(str(ActivationScheme(sharing, dynamic)))  # type: ignore[arg-type]
        except SchemeError:
            continue
    assert made == set(ALIASES.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_are_those_of_a_loop(dtype: torch.dtype) -> None:
    rows = (normal(7, 33) * torch.logspace(-3, 3, 7)[:, None]).to(dtype)
    wide = rows.float()
    per_token = [float(row.abs().max() / 127) for row in wide]
    whole = [float(wide.abs().max() / 127)] * 7
    for scheme, steps in ((TOKEN, per_token), (TENSOR, whole)):
        found = scheme.rounded(rows)
        assert found.dtype == dtype
        assert torch.equal(found, torch.tensor(by_hand(wide, steps)).to(dtype))
    scale = torch.tensor([0.02])
    assert torch.equal(STATIC.rounded(rows, scale), torch.tensor(by_hand(wide, [0.02] * 7)).to(dtype))


def test_a_static_scale_saturates_at_both_ends_and_dynamic_ones_never_do() -> None:
    rows = torch.tensor([[-1000.0, 1000.0, 1.0, 0.5, 1.5, 2.5]])
    assert STATIC.rounded(rows, torch.ones(1)).tolist() == [[-128.0, 127.0, 1.0, 0.0, 2.0, 2.0]]
    for scheme in (TOKEN, TENSOR):
        assert scheme.rounded(rows)[0, :2].tolist() == pytest.approx([-1000.0, 1000.0], rel=1e-6)


def test_shapes_do_not_matter_but_for_what_shares_a_scale() -> None:
    batch = normal(2, 5, 8) * torch.tensor([1.0, 100.0])[:, None, None]
    assert torch.equal(TOKEN.rounded(batch), TOKEN.rounded(batch.reshape(10, 8)).reshape(2, 5, 8))
    assert torch.equal(TOKEN.rounded(batch)[0], TOKEN.rounded(batch[:1])[0]), "a token knows no other"
    assert not torch.equal(TENSOR.rounded(batch)[0], TENSOR.rounded(batch[:1])[0]), "a batch does"


@pytest.mark.parametrize("scheme", [TOKEN, TENSOR], ids=str)
def test_rounding_is_half_a_step_at_most_and_twice_is_once(scheme: ActivationScheme) -> None:
    rows = normal(20, 64, seed=3)
    once = scheme.rounded(rows)
    step = rows.abs().amax(-1, keepdim=True) / 127 if scheme is TOKEN else rows.abs().amax() / 127
    assert bool(((once - rows).abs() <= step * 0.5001).all())
    torch.testing.assert_close(scheme.rounded(once), once, rtol=1e-6, atol=0)


@pytest.mark.parametrize("scheme", [TOKEN, TENSOR], ids=str)
def test_zeros_stay_zeros_and_nothing_hides_what_is_not_finite(scheme: ActivationScheme) -> None:
    assert torch.equal(scheme.rounded(torch.zeros(2, 4)), torch.zeros(2, 4))
    assert scheme.rounded(torch.zeros(0, 4)).shape == (0, 4) if scheme is TOKEN else True
    for bad in (float("nan"), float("inf")):
        assert not bool(torch.isfinite(scheme.rounded(torch.tensor([[bad, 1.0]]))).all())


def test_a_static_scale_reaches_what_it_was_calibrated_on() -> None:
    assert static_scale(254.0).tolist() == [2.0]
    assert STATIC.rounded(torch.tensor([[254.0, -254.0]]), static_scale(254.0)).tolist() == [[254.0, -254.0]]
    assert static_scale(0.0).tolist() == [1.0]
    with pytest.raises(SchemeError, match="needs a calibrated scale"):
        STATIC.rounded(torch.ones(1, 1))


@pytest.mark.parametrize("name", ALIASES)
def test_the_reference_simulation_is_within_a_step(name: str) -> None:
    """compressed-tensors divides the largest input by 127.5 where kernels, and we, divide by 127; static ones are the same."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    from formats.inputs import inputs_block

    scheme, rows = ActivationScheme.parse(name), normal(1, 12, 32) * 5
    args = QuantizationArgs.model_validate(inputs_block(scheme))
    if scheme.static:
        scale = torch.tensor([0.05])
        seen = fake_quantize(rows, scale, torch.zeros(1), args)
        assert torch.equal(seen, scheme.rounded(rows, scale))
        return
    axes = (-1,) if scheme.sharing == "token" else (0, 1, 2)
    scale, zero = calculate_qparams(rows.amin(axes, keepdim=True), rows.amax(axes, keepdim=True), args)
    seen = fake_quantize(rows, scale, zero, args)
    assert bool(((seen - scheme.rounded(rows)).abs() <= 1.01 * scale).all())
    assert not torch.equal(seen, scheme.rounded(rows))
