"""What every codec owes: exact round trips, bytes as laid out, and the same weights in the reference reader."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from formats.codec import codec_names, default_codec, get_codec
from quant.errors import SchemeError, SourceError
from quant.qtensor import QTensor
from quant.quantizers.rtn import round_to_nearest
from quant.scheme import ALIASES, Scheme

SHAPES = [(1, 32), (5, 64), (12, 96), (33, 192), (257, 64), (257, 40), (12, 33), (1, 1), (3, 576)]
INTEGERS = [
    Scheme(bits, zero, blocks, scale)  # type: ignore[arg-type]
    for bits, zero, blocks, scale in itertools.product(
        range(2, 9), ("sym", "zp"), (32, 96, "channel", "tensor"), ("f16", "bf16", "f32")
    )
]
FLOATS = [Scheme.parse(text) for text in (*ALIASES.values(), "e2m1-b32-e8m0.even", "e4m3-tensor-f16", "e5m2-channel-bf16")]
INTEGERS += [Scheme(bits, "full", blocks) for bits, blocks in itertools.product(range(2, 9), (32, "channel"))]  # type: ignore[arg-type]
SCHEMES = [*INTEGERS, *FLOATS, Scheme(4, "fz", 32), Scheme(3, "fz", "channel", "f32")]
ITEM = {"I32": 4, "I64": 8, "I8": 1, "U8": 1, "F16": 2, "BF16": 2, "F32": 4, "F8_E8M0": 1, "F8_E4M3": 1}
TORCH = {
    "I32": torch.int32,
    "I64": torch.int64,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3": torch.float8_e4m3fn,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
}


def matrix(shape: tuple[int, int], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", codec_names())
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_round_trip_is_exact_and_layout_is_what_pack_makes(name: str, scheme: Scheme) -> None:
    codec = get_codec(name)
    for shape in SHAPES:
        if codec.refusal(scheme, shape):
            with pytest.raises(SchemeError):
                codec.pack(round_to_nearest(matrix(shape), scheme))
            continue
        stored = round_to_nearest(matrix(shape), scheme)
        parts = codec.pack(stored)
        layout = codec.layout(scheme, shape)
        assert [part.suffix for part in layout] == list(parts)
        for part in layout:
            tensor = parts[part.suffix]
            assert (tuple(tensor.shape), tensor.dtype) == (part.shape, TORCH[part.dtype])
            assert tensor.is_contiguous()
            assert tensor.untyped_storage().nbytes() == math.prod(part.shape) * ITEM[part.dtype], "a view onto a larger buffer"
        back = codec.unpack(parts, scheme, shape)
        assert torch.equal(back.codes, stored.codes)
        assert torch.equal(back.steps(), stored.steps())
        assert back.divisor is stored.divisor or torch.equal(back.divisor, stored.divisor)  # type: ignore[arg-type]
        assert stored.zeros is None or (back.zeros is not None and torch.equal(back.zeros, stored.zeros))


@pytest.mark.parametrize("scheme", INTEGERS, ids=str)
def test_reference_reader_sees_the_same_weights(scheme: Scheme) -> None:
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationScheme

    codec = get_codec("pack-quantized")
    for shape in SHAPES:
        if codec.refusal(scheme, shape):
            continue
        stored = round_to_nearest(matrix(shape, 1), scheme)
        parts = codec.pack(stored)
        reference = QuantizationScheme.model_validate(codec.config_group(scheme, ["Linear"]))
        # The reference multiplies in the type of the scale; float32 scales make the comparison exact.
        wide = {**parts, "weight_scale": parts["weight_scale"].float()}
        seen = PackedQuantizationCompressor.decompress(wide, reference)["weight"]
        assert torch.equal(seen, stored.dequantise()), (scheme, shape)


@pytest.mark.parametrize("scheme", [scheme for scheme in INTEGERS if scheme.bits == 8], ids=str)
def test_reference_reader_sees_the_same_int8_weights(scheme: Scheme) -> None:
    from compressed_tensors.compressors.naive_quantized.base import IntQuantizationCompressor
    from compressed_tensors.quantization import QuantizationScheme

    codec = get_codec("int-quantized")
    for shape in SHAPES:
        if codec.refusal(scheme, shape):
            continue
        stored = round_to_nearest(matrix(shape, 1), scheme)
        parts = codec.pack(stored)
        reference = QuantizationScheme.model_validate(codec.config_group(scheme, ["Linear"]))
        wide = {**parts, "weight_scale": parts["weight_scale"].float()}
        assert torch.equal(IntQuantizationCompressor.decompress(wide, reference)["weight"], stored.dequantise()), (scheme, shape)


@pytest.mark.parametrize("name", codec_names())
def test_config_group_names_the_scheme(name: str) -> None:
    codec = get_codec(name)
    dtype = {"f16": "F16", "bf16": "BF16", "f32": "F32", "e8m0": "F8_E8M0", "e4m3": "F8_E4M3"}
    for scheme in SCHEMES:
        if codec.refusal(scheme, (1, scheme.blocks if isinstance(scheme.blocks, int) else 1)):
            continue
        assert codec.scheme_of_group(codec.config_group(scheme, ["Linear"]), dtype[scheme.scale]) == scheme


def test_zero_points_are_written_whatever_their_values() -> None:
    """R11: all weights at or above zero, so every zero point is 0; the part is there all the same."""
    scheme = Scheme(4, "zp", 32)
    stored = round_to_nearest(matrix((8, 64)).abs(), scheme)
    assert stored.zeros is not None
    assert int(stored.zeros.max()) == 0
    parts = get_codec("pack-quantized").pack(stored)
    assert "weight_zero_point" in parts
    back = get_codec("pack-quantized").unpack(parts, scheme, (8, 64))
    assert torch.equal(back.dequantise(), stored.dequantise())


@pytest.mark.parametrize("bits", range(2, 9))
def test_every_zero_point_comes_back(bits: int) -> None:
    scheme = Scheme(bits, "zp", 32)
    count = 2**bits
    codes = torch.arange(32, dtype=torch.int32).remainder(count).to(torch.uint8).expand(count, 32).contiguous()
    stored = QTensor(
        scheme, codes, torch.ones(count, 1, dtype=torch.float16), torch.arange(count, dtype=torch.uint8).reshape(count, 1)
    )
    codec = get_codec("pack-quantized")
    back = codec.unpack(codec.pack(stored), scheme, (count, 32))
    assert back.zeros is not None
    assert stored.zeros is not None
    assert torch.equal(back.zeros, stored.zeros)
    assert torch.equal(back.codes, codes)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_every_scheme_has_a_default_layout_that_holds_it(scheme: Scheme) -> None:
    name = default_codec(scheme)
    assert get_codec(name).refusal(scheme, (4, 192)) is None
    assert (name == "pack-quantized") == (scheme.integer and scheme.zero != "fz")


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dense_takes_the_bits_of_the_scheme_and_no_more_than_a_row_needs(scheme: Scheme, shape: tuple[int, int]) -> None:
    """R21: 12 outputs, a vocabulary of 257, one output: any shape is held, with less than a byte lost per row."""
    out, width = shape
    parts = get_codec("dense").layout(scheme, shape)
    found: float = sum(math.prod(part.shape) * ITEM[part.dtype] for part in parts if part.role != "shape")
    if scheme.zero == "fz":  # the formula counts integer zero points
        rows, columns = scheme.block_grid(shape)
        found -= 4 * rows * columns - rows * columns * scheme.bits / 8
    ideal = scheme.bits_per_weight(shape) * out * width / 8
    assert ideal - 1e-6 <= found < ideal + out + 1


def test_dense_codes_are_laid_out_low_bits_first() -> None:
    """Three E2M3 codes by hand: -0.125 is 0b100001, 7.5 is 0b011111, 1 is 0b001000."""
    scheme = Scheme.parse("e2m3-tensor-f32")
    codes = torch.tensor([[0b100001, 0b011111, 0b001000]], dtype=torch.uint8)
    stored = QTensor(scheme, codes, torch.ones(1, 1), None)
    assert stored.dequantise().tolist() == [[-0.125, 7.5, 1.0]]
    number = 0b100001 | 0b011111 << 6 | 0b001000 << 12
    assert get_codec("dense").pack(stored)["weight_packed"].tolist() == [list(number.to_bytes(3, "little"))]


@pytest.mark.parametrize("element", ["e4m3", "e5m2", "e4m3fnuz"])
def test_a_stored_code_that_is_no_number_is_refused(element: str) -> None:
    """R14 on the way back: NaN and infinities in damaged codes and scales are named, not multiplied."""
    scheme = Scheme.parse(f"{element}-channel-f32")
    codec = get_codec("dense")
    parts = codec.pack(round_to_nearest(matrix((2, 32)), scheme))
    parts["weight_packed"][1, 7] = {"e4m3": 0x7F, "e5m2": 0xFC, "e4m3fnuz": 0x80}[element]
    with pytest.raises(SourceError, match="1 stored codes mean no finite number"):
        codec.unpack(parts, scheme, (2, 32))


def test_a_stored_power_of_two_that_is_no_number_is_refused() -> None:
    scheme = Scheme.parse("mxfp4")
    parts = get_codec("dense").pack(round_to_nearest(matrix((2, 32)), scheme))
    parts["weight_scale"].view(torch.uint8)[1, 0] = 0xFF
    with pytest.raises(SchemeError, match="not finite"):
        get_codec("dense").unpack(parts, scheme, (2, 32))
