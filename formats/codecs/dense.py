"""``dense``: this project's own layout, for any scheme and any shape; no engine reads it.

====================  =========  ==============================  ==================================================
part                  dtype      shape                           content
====================  =========  ==============================  ==================================================
weight_packed         U8         [out, ceil(in*b/8)]             unsigned codes, dense bit rows
weight_scale          see below  [rows, columns] of the blocks   stored scales, the short last block's included
weight_global_scale   F32        [1]                             only with E4M3 scales: what they are divided by
weight_zero_point     U8         [ceil(rows*columns*b/8)]        integer zero points, one dense bit row
weight_zero_point     F32        [rows, columns]                 floating zero points
weight_shape          I64        [2]                             [out, in]
====================  =========  ==============================  ==================================================

Signed codes q are stored as q + 2^(b-1), bit patterns of floats as they are. A bit row has field j at bit j*b, low bits first,
and is filled up to a whole byte. Scales are F16, BF16 or F32, F8_E8M0 (powers of two) or F8_E4M3. Which parts exist depends on
the scheme, never on values. Its group in the configuration carries the scheme's own string.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from formats.codec import Part
from quant.errors import SchemeError, SourceError
from quant.scheme import Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from quant.qtensor import QTensor

_SCALE_DTYPE = {"f16": "F16", "bf16": "BF16", "f32": "F32", "e8m0": "F8_E8M0", "e4m3": "F8_E4M3"}


def _octets(fields: int, bits: int) -> int:
    return -(-fields * bits // 8)


class Dense:
    """Codec of ``dense``; stateless."""

    name = "dense"
    quant_method = None
    activations = None

    def refusal(self, scheme: Scheme, shape: tuple[int, int]) -> str | None:
        return None

    def advice(self, scheme: Scheme) -> tuple[str, ...]:
        return ("dense is this project's own layout: formats.reader.load_model reads it, vLLM and transformers refuse it",)

    def layout(self, scheme: Scheme, shape: tuple[int, int]) -> tuple[Part, ...]:
        grid = scheme.block_grid(shape)
        parts = [
            Part("weight_packed", "U8", (shape[0], _octets(shape[1], scheme.bits)), "codes"),
            Part("weight_scale", _SCALE_DTYPE[scheme.scale], grid, "scales"),
        ]
        if scheme.scale == "e4m3":
            parts.append(Part("weight_global_scale", "F32", (1,), "scales"))
        if scheme.zero == "zp":
            parts.append(Part("weight_zero_point", "U8", (_octets(math.prod(grid), scheme.bits),), "zeros"))
        elif scheme.zero == "fz":
            parts.append(Part("weight_zero_point", "F32", grid, "zeros"))
        parts.append(Part("weight_shape", "I64", (2,), "shape"))
        return tuple(parts)

    def pack(self, qtensor: QTensor) -> dict[str, Tensor]:
        import torch

        from formats.bits import pack_octets

        scheme = qtensor.scheme
        signed = scheme.integer and scheme.symmetric
        fields = (qtensor.codes.to(torch.int16) + 2 ** (scheme.bits - 1)).to(torch.uint8) if signed else qtensor.codes
        scales = qtensor.scales.contiguous()
        parts = {
            "weight_packed": pack_octets(fields, scheme.bits),
            "weight_scale": scales.view(torch.float8_e8m0fnu) if scheme.scale == "e8m0" else scales,
        }
        if qtensor.divisor is not None:
            parts["weight_global_scale"] = qtensor.divisor
        if qtensor.zeros is not None:
            integers = scheme.zero == "zp"
            zeros = qtensor.zeros.contiguous()
            parts["weight_zero_point"] = pack_octets(zeros.reshape(1, -1), scheme.bits).reshape(-1) if integers else zeros
        parts["weight_shape"] = torch.tensor(qtensor.shape, dtype=torch.int64)
        return parts

    def unpack(self, parts: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int]) -> QTensor:
        """The stored matrix.

        Raises:
            SourceError: a code that means NaN or an infinity, which no run writes.
            SchemeError: a scale that does (``QTensor``).
        """
        import torch

        from formats.bits import unpack_octets
        from quant.grid import nonfinite_codes
        from quant.qtensor import QTensor

        grid = scheme.block_grid(shape)
        codes = unpack_octets(parts["weight_packed"], scheme.bits, shape[1])
        if scheme.integer and scheme.symmetric:
            codes = (codes.to(torch.int16) - 2 ** (scheme.bits - 1)).to(torch.int8)
        elif bool(nonfinite_codes(codes, scheme).any()):
            raise SourceError(f"{scheme}: {int(nonfinite_codes(codes, scheme).sum())} stored codes mean no finite number")
        scales, zeros = parts["weight_scale"], parts.get("weight_zero_point")
        if scheme.scale == "e8m0":
            scales = scales.view(torch.uint8)
        if scheme.zero == "zp" and zeros is not None:
            zeros = unpack_octets(zeros.reshape(1, -1), scheme.bits, math.prod(grid)).reshape(grid)
        return QTensor(scheme, codes, scales, zeros, parts.get("weight_global_scale"))

    def config_group(self, scheme: Scheme, targets: list[str]) -> dict[str, Any]:
        return {"targets": targets, "format": self.name, "scheme": str(scheme)}

    def scheme_of_group(self, group: Mapping[str, Any], scale_dtype: str) -> Scheme:
        scheme = Scheme.parse(group["scheme"])
        if scale_dtype != _SCALE_DTYPE[scheme.scale]:
            raise SchemeError(f"{scheme} is stored with {scale_dtype} scales, expected {_SCALE_DTYPE[scheme.scale]}")
        return scheme


CODEC = Dense()
