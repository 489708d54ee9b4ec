"""A quantised model that can be trained: codes are fixed, every block's scale carries a factor that starts at 1.

The forward pass multiplies with ``levels * scale``, where the levels (codes less zero points, decoded) are exact in bfloat16 for
every grid of up to 8 bits. The backward pass gives the gradient of the factors without ever keeping a float matrix per layer:
the matrix is made again from its levels.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from quant.qtensor import QTensor, block_sums
from quant.scales import store_scales
from quant.scheme import Scheme

TRAINABLE_SCALES = ("f16", "bf16", "f32")


def compute_type(device: str) -> torch.dtype:
    """bfloat16 where the processor multiplies it natively, else float32: the type of the matrix products while training."""
    native = device != "cpu" or bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return torch.bfloat16 if native else torch.float32


class ScaledLinear(nn.Module):
    """Stands in for a Linear whose matrix is ``levels * scales``, block by block.

    Args:
        qtensor: the matrix; its stored scales are where the training starts.
        bias: as in the Linear, kept as it is.
        dtype: floating type of the matrix products.
    """

    def __init__(self, qtensor: QTensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.qtensor = qtensor
        self.levels: Tensor
        self.start: Tensor
        self.bias: Tensor | None
        self.register_buffer("levels", qtensor.levels().to(dtype))
        self.register_buffer("start", qtensor.steps())
        self.register_buffer("bias", bias)
        # A scale that fused matrices have in common stays what it is: trained alone, theirs would drift apart.
        trainable = qtensor.scheme.scale in TRAINABLE_SCALES and not qtensor.scheme.shares_range
        self.factor = nn.Parameter(torch.zeros_like(self.start), requires_grad=trainable)

    def scales(self) -> Tensor:
        """Scales ``[rows, columns]`` of the block grid, float32."""
        return self.start * self.factor.exp()

    def trained(self) -> QTensor:
        """The same codes with the scales of now, rounded to their stored type."""
        if not self.factor.requires_grad:
            return self.qtensor
        return dataclasses.replace(
            self.qtensor, scales=store_scales(self.scales().detach().to(self.qtensor.codes.device), self.qtensor.scheme)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        product: Any = _Product.apply
        output: Tensor = product(inputs.to(self.levels.dtype), self.levels, self.scales(), self.qtensor.scheme).to(inputs.dtype)
        return output if self.bias is None else output + self.bias


class FrozenLinear(nn.Module):
    """A Linear that stays as it is and multiplies in another type (the output head, matrices kept in float)."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().to(dtype), requires_grad=False)
        self.bias = linear.bias

    def forward(self, inputs: Tensor) -> Tensor:
        output = functional.linear(inputs.to(self.weight.dtype), self.weight).to(inputs.dtype)
        return output if self.bias is None else output + self.bias


class _Product(torch.autograd.Function):
    """inputs ``[..., in]`` times the transposed matrix; gradients for inputs and scales."""

    @staticmethod
    def forward(context: Any, inputs: Tensor, levels: Tensor, scales: Tensor, scheme: Scheme) -> Tensor:
        context.save_for_backward(inputs, levels, scales)
        context.scheme = scheme
        return inputs @ _matrix(levels, scales, scheme).T

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        (gradient,) = gradients
        inputs, levels, scales = context.saved_tensors
        to_inputs = to_scales = None
        if context.needs_input_grad[0]:
            to_inputs = gradient @ _matrix(levels, scales, context.scheme)
        if context.needs_input_grad[2]:
            to_matrix = gradient.reshape(-1, gradient.shape[-1]).T @ inputs.reshape(-1, inputs.shape[-1])
            to_scales = block_sums(to_matrix.float() * levels, context.scheme)
        return to_inputs, None, to_scales, None


def _matrix(levels: Tensor, scales: Tensor, scheme: Scheme) -> Tensor:
    out, width = levels.shape
    if scheme.blocks == "tensor":
        return levels * scales.to(levels.dtype)
    size = scheme.blocks if isinstance(scheme.blocks, int) else width
    spread = scales.to(levels.dtype)
    if width % size:
        return levels * spread.repeat_interleave(size, dim=1)[:, :width]
    return (levels.reshape(out, -1, size) * spread.unsqueeze(-1)).reshape(out, width)
