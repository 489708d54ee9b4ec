"""The ``pack-quantized`` layout of compressed-tensors: integer weights of 2 to 8 bits in 32-bit words.

====================  =====  ==============================  =====================================================
part                  dtype  shape                           content
====================  =====  ==============================  =====================================================
weight_packed         I32    [out, ceil(in*b/32)]            codes offset to unsigned, dense bit rows
weight_scale          float  [out, G], [out, 1] or [1]       stored scales (group, channel, tensor)
weight_shape          I64    [2]                             [out, in]
weight_zero_point     I32    [ceil(out*b/32), G]             only with a zero point: packed along *out*
weight_zero_point     I8     [1]                             the same for one scale per tensor: signed, not packed
====================  =====  ==============================  =====================================================

Symmetric codes q are stored as q + 2^(b-1); readers multiply with a scale whatever its sign, so that ``full`` schemes need
nothing more. Our codes with a zero point are unsigned already; the reference reader calls
them q + 2^(b-1) with q and z signed, which are the same bits. Which parts exist depends on the scheme, never on values.
Source: compressed-tensors 0.20.1 (its reader) and vLLM 0.32 (its kernels).
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
_FULL_RANGE = "full_range"  # among what describes how scales were found: readers of weights pass over it
_SCALE_TYPE = {dtype: name for name, dtype in _SCALE_DTYPE.items()}


def _words(columns: int, bits: int) -> int:
    return -(-columns * bits // 32)


class PackQuantized:
    """Codec of ``pack-quantized``; stateless."""

    name = "pack-quantized"
    quant_method = "compressed-tensors"

    def refusal(self, scheme: Scheme, shape: tuple[int, int]) -> str | None:
        if not scheme.integer:
            return f"pack-quantized holds integers, and {scheme.element} is a float format"
        if scheme.zero == "fz":
            return "a floating zero point is not stored by pack-quantized; use an integer zero point"
        if isinstance(scheme.blocks, int) and shape[1] % scheme.blocks:
            return f"its {shape[1]} input columns are no multiple of the group size {scheme.blocks}"
        return None

    def input_refusal(self, activations: ActivationScheme | None) -> str | None:
        return None if activations is None else "pack-quantized is for matrices whose inputs stay in float"

    def advice(self, scheme: Scheme) -> tuple[str, ...]:
        found = []
        if not scheme.symmetric and scheme.blocks != "tensor":
            found.append(
                "compressed-tensors 0.18.0 to 0.20.1 cannot load packed zero points as they are: in transformers pass "
                "quantization_config=CompressedTensorsConfig(dequantize=True)"
            )
        if scheme.bits not in (2, 4, 8):
            found.append(f"{scheme.bits}-bit codes are packed densely: readers need compressed-tensors 0.18 or later")
        if scheme.blocks == "tensor":
            found.append("one scale for a whole matrix: vLLM has no weight-only kernel for it, transformers loads it")
        elif scheme.bits != 4:
            found.append(f"vLLM's CPU kernels are for 4 bits: serve {scheme.bits} bits on a card that has a kernel for them")
        return tuple(found)

    def layout(self, scheme: Scheme, shape: tuple[int, int]) -> tuple[Part, ...]:
        out, width = shape
        grid: tuple[int, ...] = scheme.block_grid(shape)
        tensor = scheme.blocks == "tensor"
        parts = [
            Part("weight_packed", "I32", (out, _words(width, scheme.bits)), "codes"),
            Part("weight_scale", _SCALE_DTYPE[scheme.scale], (1,) if tensor else grid, "scales"),
            Part("weight_shape", "I64", (2,), "shape"),
        ]
        if not scheme.symmetric:
            zeros = ("I8", (1,)) if tensor else ("I32", (_words(out, scheme.bits), grid[1]))
            parts.append(Part("weight_zero_point", zeros[0], zeros[1], "zeros"))
        return tuple(parts)

    def pack(self, qtensor: QTensor) -> dict[str, Tensor]:
        import torch

        from formats.bits import pack_rows

        scheme, offset = qtensor.scheme, 2 ** (qtensor.scheme.bits - 1)
        reason = self.refusal(scheme, qtensor.shape)
        if reason:
            raise SchemeError(f"{scheme} on a {list(qtensor.shape)} matrix: {reason}")
        fields = qtensor.codes.to(torch.int16) + offset if scheme.symmetric else qtensor.codes
        tensor = scheme.blocks == "tensor"
        parts = {
            "weight_packed": pack_rows(fields.to(torch.uint8), scheme.bits),
            "weight_scale": qtensor.scales.reshape(1) if tensor else qtensor.scales.contiguous(),
            "weight_shape": torch.tensor(qtensor.shape, dtype=torch.int64),
        }
        if qtensor.zeros is not None:
            if tensor:
                parts["weight_zero_point"] = (qtensor.zeros.to(torch.int16) - offset).to(torch.int8).reshape(1)
            else:
                parts["weight_zero_point"] = pack_rows(qtensor.zeros.T.contiguous(), scheme.bits).T.contiguous()
        return parts

    def unpack(self, parts: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int]) -> QTensor:
        import torch

        from formats.bits import unpack_rows
        from quant.qtensor import QTensor

        offset = 2 ** (scheme.bits - 1)
        codes = unpack_rows(parts["weight_packed"], scheme.bits, shape[1])
        if scheme.symmetric:
            codes = (codes.to(torch.int16) - offset).to(torch.int8)
        zeros: Tensor | None = None
        if not scheme.symmetric:
            stored = parts["weight_zero_point"]
            if scheme.blocks == "tensor":
                zeros = (stored.to(torch.int16) + offset).to(torch.uint8).reshape(1, 1)
            else:
                zeros = unpack_rows(stored.T.contiguous(), scheme.bits, shape[0]).T.contiguous()
        return QTensor(scheme, codes, parts["weight_scale"].reshape(scheme.block_grid(shape)), zeros)

    def config_group(self, scheme: Scheme, targets: list[str]) -> dict[str, Any]:
        weights: dict[str, Any] = {"num_bits": scheme.bits, "type": "int", "symmetric": scheme.symmetric}
        if isinstance(scheme.blocks, int):
            weights |= {"strategy": "group", "group_size": scheme.blocks}
        else:
            weights |= {"strategy": scheme.blocks}
        weights["dynamic"] = False
        if scheme.zero == "full":
            weights["observer_kwargs"] = {_FULL_RANGE: True}
        return {
            "targets": targets,
            "format": self.name,
            "weights": weights,
            "input_activations": None,
            "output_activations": None,
        }

    def scheme_of_group(self, group: Mapping[str, Any], scale_dtype: str) -> Scheme:
        weights = group["weights"]
        strategy = weights["strategy"]
        blocks = weights["group_size"] if strategy == "group" else strategy
        if weights.get("type") != "int" or scale_dtype not in _SCALE_TYPE:
            raise SchemeError(
                f"pack-quantized holds integer weights with float scales, not {weights.get('type')} with {scale_dtype}"
            )
        full = bool((weights.get("observer_kwargs") or {}).get(_FULL_RANGE))
        zero = ("full" if full else "sym") if weights["symmetric"] else "zp"
        return Scheme(weights["num_bits"], cast(Any, zero), cast(Blocks, blocks), cast(ScaleType, _SCALE_TYPE[scale_dtype]))


CODEC = PackQuantized()
