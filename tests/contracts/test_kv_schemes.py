"""What every cache scheme owes: all combinations of element, sharing and group that can be named."""

from __future__ import annotations

import itertools
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from quant.errors import SchemeError
from quant.kvcache import restore, static_scales, store
from quant.kvscheme import ALIASES, CODE_BITS, LARGEST, Element, KvScheme, Sharing

HEADS, TOKENS, DIM = 2, 5, 16
LAYOUTS = [
    (element, keys, values, group)
    for element, keys, values in itertools.product(get_args(Element), get_args(Sharing), get_args(Sharing))
    for group in ((None, 8) if "token" in (keys, values) else (None,))
]
SCHEMES = [KvScheme(*layout) for layout in LAYOUTS]
SIDES = ("keys", "values")

pytestmark = pytest.mark.parametrize("scheme", SCHEMES, ids=str)


def states(seed: int = 0) -> Tensor:
    return torch.randn(3, HEADS, TOKENS, DIM, generator=torch.Generator().manual_seed(seed))


def calibrated(x: Tensor, scheme: KvScheme, side: str) -> Tensor | None:
    sharing = getattr(scheme, side)
    if sharing == "token":
        return None
    largest = x.abs().amax(dim=(0, 2)).unsqueeze(1)
    return static_scales(largest if sharing == "channel" else largest.amax().reshape(1, 1, 1), scheme.element)


def through(x: Tensor, scheme: KvScheme, side: str, static: Tensor | None) -> Tensor:
    return restore(store(x, scheme.element, getattr(scheme, side), scheme.group, static), scheme.element, static, x.dtype)


def test_the_name_is_the_identity(scheme: KvScheme) -> None:
    assert KvScheme.parse(str(scheme)) == scheme
    assert scheme.static == any(calibrated(states(), scheme, side) is not None for side in SIDES)


@pytest.mark.parametrize("side", SIDES)
def test_the_bytes_held_are_those_of_the_scheme(scheme: KvScheme, side: str) -> None:
    both = {s: calibrated(states(), scheme, s) for s in SIDES}
    held = sum(store(states(), scheme.element, getattr(scheme, s), scheme.group, both[s]).nbytes for s in SIDES)
    assert held == 3 * TOKENS * scheme.bytes_per_token(layers=1, kv_heads=HEADS, head_dim=DIM)
    static = sum(scale.numel() * scale.element_size() for scale in both.values() if scale is not None)
    assert static == scheme.static_bytes(layers=1, kv_heads=HEADS, head_dim=DIM)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_shape_and_type_come_back_and_the_same_states_give_the_same_codes(
    scheme: KvScheme, side: str, dtype: torch.dtype
) -> None:
    x = states().to(dtype)
    static = calibrated(x, scheme, side)
    back = through(x, scheme, side, static)
    assert (back.shape, back.dtype) == (x.shape, dtype)
    assert torch.equal(x, states().to(dtype))
    assert torch.equal(back, through(x, scheme, side, static))


@pytest.mark.parametrize("side", SIDES)
def test_what_lies_on_the_grid_is_left_alone(scheme: KvScheme, side: str) -> None:
    """Twice is once, with the scales that were calibrated once; but for the last bit of a float16 scale made again."""
    static = calibrated(states(), scheme, side)
    once = through(states(), scheme, side, static)
    twice = through(once, scheme, side, static)
    if static is not None:
        assert torch.equal(twice, once)
    else:
        assert float((twice - once).abs().max()) <= 2e-3 * float(once.abs().max())


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("case", ["zero", "constant", "outlier", "tiny", "one-sided"])
def test_odd_states_come_back_finite_and_within_a_step(scheme: KvScheme, side: str, case: str) -> None:
    outlier = states()
    outlier[0, 0, 0, 0] = 1e4
    x = {
        "zero": torch.zeros_like(outlier),
        "constant": torch.full_like(outlier, -3.25),
        "outlier": outlier,
        "tiny": states() * 1e-6,
        "one-sided": states().abs(),
    }[case]
    back = through(x, scheme, side, calibrated(x, scheme, side))
    largest = float(x.abs().max())
    step = largest / LARGEST[scheme.element] if scheme.element != "e4m3" else largest / 8  # three bits of mantissa
    assert bool(torch.isfinite(back).all())
    assert float((back - x).abs().max()) <= 0.51 * step + 1e-7
    if case == "zero":
        assert not back.any()


@pytest.mark.parametrize("side", SIDES)
def test_codes_are_those_of_numpy(scheme: KvScheme, side: str) -> None:
    """An independent reading of the scheme's name: scales, codes, and what they mean."""
    x = states().numpy()
    sharing, top = getattr(scheme, side), LARGEST[scheme.element]
    group = scheme.group or DIM
    if sharing == "token":
        scale = np.abs(x).reshape(3, HEADS, TOKENS, DIM // group, group).max(-1) / np.float32(top)
        scale = np.repeat(scale.astype(np.float16).astype(np.float32), group, axis=-1)
    else:
        scale = np.abs(x).max(axis=(0, 2), keepdims=True) if sharing == "channel" else np.abs(x).max(keepdims=True)
        scale = scale.astype(np.float32) / np.float32(top)
    ratio = np.clip(x / scale, -top, top)
    if scheme.element == "e4m3":
        exponent = np.maximum(np.floor(np.log2(np.maximum(np.abs(ratio), 2.0**-30))), -6)
        step = np.exp2(exponent - 3)
        codes = np.rint(ratio / step) * step
    else:
        codes = np.rint(ratio)
    back = through(states(), scheme, side, calibrated(states(), scheme, side)).numpy()
    np.testing.assert_allclose(back, codes * scale, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_refused(scheme: KvScheme, side: str, bad: float) -> None:
    x = states()
    x[1, 0, 2, 3] = bad
    static = calibrated(states(), scheme, side)
    with pytest.raises(SchemeError, match="not finite"):
        store(x, scheme.element, getattr(scheme, side), scheme.group, static)


def test_states_beyond_the_calibrated_range_saturate(scheme: KvScheme) -> None:
    for side in SIDES:
        static = calibrated(states(), scheme, side)
        if static is not None:
            back = through(states() * 100, scheme, side, static)
            assert float(back.abs().max()) <= LARGEST[scheme.element] * float(static.max()) * (1 + 1e-6)


def test_every_short_name_is_one_of_these(scheme: KvScheme) -> None:
    known = {str(KvScheme(s.element, s.keys, s.values, 32 if s.group else None)) for s in SCHEMES}
    assert {str(KvScheme.parse(name)) for name in ALIASES} <= known
    assert CODE_BITS[scheme.element] in (4, 8)
