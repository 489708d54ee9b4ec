"""The ``int-quantized`` layout of compressed-tensors: 8-bit weights for inputs that are rounded to 8 bits too (W8A8).

====================  =====  ===========  =============================================
part                  dtype  shape        content
====================  =====  ===========  =============================================
weight                I8     [out, in]    codes as they are
weight_scale          float  [out, 1]     one scale per output row; [1] for the whole matrix
====================  =====  ===========  =============================================

Inputs get one scale per token, found when the token arrives (``a8-token-dynamic``): nothing is stored for them.
Source: compressed-tensors 0.20.1 (its reader) and vLLM 0.32 (its kernels); engines refuse the layout without rounded inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from formats.codec import Part
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
    activations = ActivationScheme("token", dynamic=True)

    def refusal(self, scheme: Scheme, shape: tuple[int, int]) -> str | None:
        if not scheme.integer or scheme.bits != 8 or not scheme.symmetric or isinstance(scheme.blocks, int):
            return "int-quantized holds 8-bit symmetric weights with a scale per channel or per tensor (int8-sym-channel-f32)"
        return None

    def advice(self, scheme: Scheme) -> tuple[str, ...]:
        return (f"inputs of these matrices are rounded while running ({self.activations}): measured so here, and so in engines",)

    def layout(self, scheme: Scheme, shape: tuple[int, int]) -> tuple[Part, ...]:
        grid: tuple[int, ...] = (1,) if scheme.blocks == "tensor" else scheme.block_grid(shape)
        return (Part("weight", "I8", shape, "codes"), Part("weight_scale", _SCALE_DTYPE[scheme.scale], grid, "scales"))

    def pack(self, qtensor: QTensor) -> dict[str, Tensor]:
        reason = self.refusal(qtensor.scheme, qtensor.shape)
        if reason:
            raise SchemeError(f"{qtensor.scheme} on a {list(qtensor.shape)} matrix: {reason}")
        scales = qtensor.scales.reshape(1) if qtensor.scheme.blocks == "tensor" else qtensor.scales.contiguous()
        return {"weight": qtensor.codes.contiguous(), "weight_scale": scales}

    def unpack(self, parts: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int]) -> QTensor:
        from quant.qtensor import QTensor

        return QTensor(scheme, parts["weight"], parts["weight_scale"].reshape(scheme.block_grid(shape)), None)

    def config_group(self, scheme: Scheme, targets: list[str]) -> dict[str, Any]:
        integer = {"num_bits": 8, "type": "int", "symmetric": True}
        return {
            "targets": targets,
            "format": self.name,
            "weights": {**integer, "strategy": scheme.blocks, "dynamic": False},
            "input_activations": {**integer, "strategy": self.activations.sharing, "dynamic": self.activations.dynamic},
            "output_activations": None,
        }

    def scheme_of_group(self, group: Mapping[str, Any], scale_dtype: str) -> Scheme:
        weights, inputs = group["weights"], group["input_activations"]
        if weights["num_bits"] != 8 or not weights["symmetric"] or scale_dtype not in _SCALE_TYPE:
            raise SchemeError(f"int-quantized holds 8-bit symmetric weights with float scales, not {dict(weights)}")
        if not inputs or (inputs["strategy"], inputs["dynamic"], inputs["num_bits"]) != ("token", True, 8):
            raise SchemeError(f"int-quantized is read with inputs of {self.activations}, not {inputs}")
        return Scheme(8, "sym", cast(Blocks, weights["strategy"]), cast(ScaleType, _SCALE_TYPE[scale_dtype]))


CODEC = IntQuantized()
