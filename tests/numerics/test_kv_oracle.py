"""Cache formats bit for bit against numpy, E4M3 by its definition: huge, tiny and odd states, any batch, memory."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from eval.capacity.model_shape import ModelShape
from quant.errors import SchemeError
from quant.kvcache import Stored, restore, static_scales, store
from quant.kvscheme import CODE_BITS, KvScheme, Sharing

Floats = NDArray[np.float32]

SHARINGS: tuple[Sharing, ...] = ("token", "channel", "tensor")
ALL = [
    KvScheme(element, keys, values, group)  # type: ignore[arg-type]
    for element, keys, values, group in itertools.product(CODE_BITS, SHARINGS, SHARINGS, (None, 8))
    if group is None or "token" in (keys, values)
]
SCHEMES = [scheme for scheme in ALL if scheme.keys == scheme.values]  # keys and values are stored by the same code
SHAPE = (2, 3, 5, 16)
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def numbers(case: str) -> torch.Tensor:
    """float32 states ``SHAPE`` that float16 and bfloat16 hold as well."""
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    if case == "zero":
        return torch.zeros_like(x)
    if case == "constant":
        return torch.full_like(x, -3.25)
    if case == "outlier":
        x[1, 2, 3, 4] = 3e4
    if case == "one-sided":
        return x.abs()
    if case == "subnormal":
        return x * 2.0**-18
    if case == "huge":
        return x.sign() * 65504
    return x


CASES = ("normal", "zero", "constant", "outlier", "one-sided", "subnormal", "huge")


def minifloats() -> Floats:
    """Every finite number of E4M3 that is not below 0, by the definition: 4 bits of exponent with bias 7, 3 of fraction."""
    fields = np.arange(127)  # 127 is NaN
    exponent, fraction = fields >> 3, fields & 7
    return np.where(exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0 ** (exponent - 7.0)).astype(np.float32)


def oracle_codes(quotients: Floats, element: str) -> Floats:
    """The number of the format next to each quotient: ties to the even code, beyond the largest the largest."""
    if element != "e4m3":
        top = 127 if element == "int8" else 7
        return np.clip(np.rint(quotients), -top, top).astype(np.float32)
    table = minifloats()
    size = np.minimum(np.abs(quotients), table[-1])
    above = np.clip(np.searchsorted(table, size), 1, len(table) - 1)
    low, high = table[above - 1], table[above]
    up = (size - low > high - size) | ((size - low == high - size) & (above % 2 == 0))
    return np.asarray(np.copysign(np.where(up, high, low), quotients), dtype=np.float32)


def oracle_scales(x: Floats, scheme: KvScheme, sharing: Sharing) -> Floats:
    """Scales that broadcast over ``x``: of calibration on ``x`` itself where they are static."""
    top = {"int8": 127, "int4": 7, "e4m3": 448}[scheme.element]
    if sharing == "channel":
        static = np.abs(x).max(axis=(0, 2), keepdims=True)[0] / np.float32(top)
        return np.broadcast_to(np.maximum(static, np.float32(2.0**-126)), x.shape)
    if sharing == "tensor":
        return np.full(x.shape, max(np.abs(x).max() / np.float32(top), 2.0**-126), np.float32)
    group = scheme.group or x.shape[-1]
    largest = np.abs(x.reshape(*x.shape[:-1], -1, group)).max(-1) / np.float32(top)
    steps = np.ceil(largest / np.float32(2.0**-24)) * 2.0**-24
    half = np.where(largest < 2.0**-14, np.maximum(steps, 2.0**-24), largest).astype(np.float16)
    return np.repeat(half.astype(np.float32), group, axis=-1)


def static_of(x: torch.Tensor, scheme: KvScheme, sharing: Sharing) -> torch.Tensor | None:
    if sharing == "token":
        return None
    largest = x.float().abs().amax(dim=(0, 2)).unsqueeze(1)
    return static_scales(largest if sharing == "channel" else largest.amax().reshape(1, 1, 1), scheme.element)


def kept(x: torch.Tensor, scheme: KvScheme, sharing: Sharing) -> tuple[Stored, torch.Tensor | None]:
    static = static_of(x, scheme, sharing)
    return store(x, scheme.element, sharing, scheme.group, static), static


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_what_is_read_back_is_what_numpy_reads_back(scheme: KvScheme, case: str) -> None:
    x = numbers(case)
    sharing = scheme.keys
    stored, static = kept(x, scheme, sharing)
    scales = oracle_scales(x.numpy(), scheme, sharing)
    expected = oracle_codes(np.divide(x.numpy(), scales, dtype=np.float32), scheme.element) * scales
    found = restore(stored, scheme.element, static, torch.float32)
    assert found.shape == x.shape
    assert np.array_equal(found.numpy(), expected)


@pytest.mark.parametrize("case", [case for case in CASES if case != "subnormal"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_twice_is_once(scheme: KvScheme, case: str) -> None:
    """What was read back has its own scale. Subnormal ones are left out: rounded up once, a second pass finds a finer one."""
    x = numbers(case)
    sharing = scheme.keys
    stored, static = kept(x, scheme, sharing)
    once = restore(stored, scheme.element, static, torch.float32)
    again, static = kept(once, scheme, sharing)
    twice = restore(again, scheme.element, static, torch.float32)
    assert torch.allclose(twice, once, rtol=2e-7, atol=0)  # a static float32 scale is found again but for its last bit


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_codes_do_not_depend_on_the_type_of_the_states_and_nothing_becomes_infinite(scheme: KvScheme, dtype: str) -> None:
    for case in ("normal", "huge"):
        wide = numbers(case).to(DTYPES[dtype])
        sharing = scheme.keys
        stored, static = kept(wide, scheme, sharing)
        same, _ = kept(wide.float(), scheme, sharing)
        assert torch.equal(stored.codes.view(torch.uint8), same.codes.view(torch.uint8))
        back = restore(stored, scheme.element, static, DTYPES[dtype])
        assert back.dtype == DTYPES[dtype]
        assert bool(torch.isfinite(back).all())


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_tokens_are_stored_alike_alone_together_and_in_any_batch(scheme: KvScheme) -> None:
    x = numbers("outlier")
    sharing = scheme.keys
    whole, static = kept(x, scheme, sharing)
    one = [store(x[1:, :, i : i + 1], scheme.element, sharing, scheme.group, static) for i in range(SHAPE[2])]
    joined = one[0]
    for later in one[1:]:
        joined = joined.then(later)
    assert torch.equal(joined.codes.view(torch.uint8), whole.codes[1:].view(torch.uint8))
    assert (joined.scales is None) == (whole.scales is None) == (sharing != "token")
    if joined.scales is not None and whole.scales is not None:
        assert torch.equal(joined.scales, whole.scales[1:])


@pytest.mark.parametrize("scheme", ALL, ids=str)
def test_the_bytes_are_those_of_the_tensors(scheme: KvScheme) -> None:
    """Also in the terms of a capacity plan: bytes per value, and bytes of scales per head vector."""
    batch, heads, tokens, head_dim = SHAPE
    x = numbers("normal")
    parts = [kept(x, scheme, sharing) for sharing in (scheme.keys, scheme.values)]
    held = sum(
        part.untyped_storage().nbytes() for stored, _ in parts for part in (stored.codes, stored.scales) if part is not None
    )
    assert held == sum(stored.nbytes for stored, _ in parts)
    assert held == batch * tokens * scheme.bytes_per_token(1, heads, head_dim)
    assert sum(s.untyped_storage().nbytes() for _, s in parts if s is not None) == scheme.static_bytes(1, heads, head_dim)
    shape = ModelShape.from_config(
        {
            "model_type": "llama",
            "hidden_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": head_dim,
            "intermediate_size": 64,
            "vocab_size": 32,
        }
    )
    per_vector = 2 * (head_dim // (scheme.group or head_dim)) * [scheme.keys, scheme.values].count("token") / 2
    planned = shape.kv_bytes_per_token(CODE_BITS[scheme.element] / 8, scale_bytes_per_vector=per_vector)
    assert planned == scheme.bytes_per_token(1, heads, head_dim)


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s.keys == "token"], ids=str)
def test_what_no_float16_scale_can_say_is_refused_and_not_clipped(scheme: KvScheme) -> None:
    top = {"int8": 127.0, "int4": 7.0, "e4m3": 448.0}[scheme.element] * 65504
    x = torch.full(SHAPE, top)
    back = restore(store(x, scheme.element, "token", scheme.group), scheme.element, None, torch.float32)
    assert torch.equal(back, x)
    x[0, 0, 0, 0] = 1.01 * top
    with pytest.raises(SchemeError, match="is beyond"):
        store(x, scheme.element, "token", scheme.group)
