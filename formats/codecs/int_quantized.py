"""The ``int-quantized`` layout of compressed-tensors: 8-bit weights as plain int8, for matrices whose inputs are rounded too.

====================  =====  ====================  ===========================================================================
part                  dtype  shape                 content
====================  =====  ====================  ===========================================================================
weight                I8     [out, in]             signed codes
weight_scale          float  [out, 1] or [1]       stored scales (channel, tensor)
input_scale           F32    [1]                   only with static inputs: their calibrated scale (``formats.inputs``)
====================  =====  ====================  ===========================================================================

Engines have W8A8 kernels for it and nothing else: without ``input_activations`` in its group they refuse it, so int8 weights
with float inputs are ``pack-quantized``. Source: compressed-tensors 0.20.1 (its reader) and vLLM 0.32 (its kernels).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from formats.codec import Part
from formats.inputs import INPUTS_KEY
from quant.activations import ActivationScheme
from quant.errors import SchemeError
from quant.scheme import Blocks, ScaleType, Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from quant.qtensor import QTensor

_SCALE_DTYPE = {"f16": "F16", "bf16": "BF16", "f32": "F32"}
_SCALE_TYPE = {dtype: name for name, dtype in _SCALE_DTYPE.items()}


class IntQuantized:
    """Codec of ``int-quantized``; stateless."""

    name = "int-quantized"
    quant_method = "compressed-tensors"

    def refusal(self, scheme: Scheme, shape: tuple[int, int]) -> str | None:
        if not scheme.integer or scheme.bits != 8 or scheme.zero != "sym" or isinstance(scheme.blocks, int):
            return "int-quantized holds symmetric 8-bit integers with one scale per output channel or per tensor"
        return None

    def input_refusal(self, activations: ActivationScheme | None) -> str | None:
        return "int-quantized is for matrices whose inputs are rounded too" if activations is None else None

    def advice(self, scheme: Scheme) -> tuple[str, ...]:
        return ()

    def layout(self, scheme: Scheme, shape: tuple[int, int]) -> tuple[Part, ...]:
        scales: tuple[int, ...] = (1,) if scheme.blocks == "tensor" else (shape[0], 1)
        return Part("weight", "I8", shape, "codes"), Part("weight_scale", _SCALE_DTYPE[scheme.scale], scales, "scales")

    def pack(self, qtensor: QTensor) -> dict[str, Tensor]:
        reason = self.refusal(qtensor.scheme, qtensor.shape)
        if reason:
            raise SchemeError(f"{qtensor.scheme} on a {list(qtensor.shape)} matrix: {reason}")
        shape = self.layout(qtensor.scheme, qtensor.shape)[1].shape
        return {"weight": qtensor.codes.contiguous(), "weight_scale": qtensor.scales.reshape(shape).contiguous()}

    def unpack(self, parts: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int]) -> QTensor:
        from quant.qtensor import QTensor

        return QTensor(scheme, parts["weight"], parts["weight_scale"].reshape(scheme.block_grid(shape)), None)

    def config_group(self, scheme: Scheme, targets: list[str]) -> dict[str, Any]:
        weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": scheme.blocks, "dynamic": False}
        return {"targets": targets, "format": self.name, "weights": weights, INPUTS_KEY: None, "output_activations": None}

    def scheme_of_group(self, group: Mapping[str, Any], scale_dtype: str) -> Scheme:
        weights = group["weights"]
        said = (weights.get("num_bits"), weights.get("type"), weights.get("symmetric"))
        if said != (8, "int", True) or scale_dtype not in _SCALE_TYPE:
            raise SchemeError(f"int-quantized holds symmetric 8-bit integers with float scales, not {weights} with {scale_dtype}")
        return Scheme(8, "sym", cast(Blocks, weights["strategy"]), cast(ScaleType, _SCALE_TYPE[scale_dtype]))


CODEC = IntQuantized()
