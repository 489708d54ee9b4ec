"""What every codec owes: exact round trips, bytes as laid out, and the same weights in the reference reader."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from formats.codec import codec_names, get_codec
from quant.errors import SchemeError
from quant.qtensor import QTensor
from quant.quantizers.rtn import round_to_nearest
from quant.scheme import Scheme

SHAPES = [(1, 32), (5, 64), (12, 96), (33, 192), (257, 64)]
SCHEMES = [
    Scheme(bits, zero, blocks, scale)  # type: ignore[arg-type]
    for bits, zero, blocks, scale in itertools.product(
        range(2, 9), ("sym", "zp"), (32, 96, "channel", "tensor"), ("f16", "bf16", "f32")
    )
]
ITEM = {"I32": 4, "I64": 8, "I8": 1, "F16": 2, "BF16": 2, "F32": 4}
TORCH = {
    "I32": torch.int32,
    "I64": torch.int64,
    "I8": torch.int8,
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
        assert torch.equal(back.scales, stored.scales)
        assert stored.zeros is None or (back.zeros is not None and torch.equal(back.zeros, stored.zeros))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
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


@pytest.mark.parametrize("name", codec_names())
def test_config_group_names_the_scheme(name: str) -> None:
    codec = get_codec(name)
    dtype = {"f16": "F16", "bf16": "BF16", "f32": "F32"}
    for scheme in SCHEMES:
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
