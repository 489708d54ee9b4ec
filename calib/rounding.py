"""Learned rounding: move codes by at most one step, and scales a little, so that a whole block gives its float output.

After AutoRound (Cheng et al. 2023, "Optimize weight rounding via signed gradient descent"): every weight has an offset in
[-1/2, 1/2] that is added before rounding, every block of the grid a factor on its scale, and both follow the sign of the
gradient of the block's output error. Three things differ. Codes start where any other quantiser left them. The error of every
token is taken relative to the size of its float output, because what reads the output normalises it, and one massive token
would outweigh all others. And a block whose error on the compared windows did not fall keeps the codes it came with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from calib.capture import BlockInputs, BlockRunner
from calib.student import compute_type
from quant.qtensor import QTensor, from_blocks, to_blocks
from quant.quantizer import Note, Outcome
from quant.scales import store_scales
from quant.scheme import Scheme

ITERATIONS = 60
SCALE_SHARE = 0.1  # steps of the scale factors, as a share of the offsets' steps
LARGEST_OFFSET = 0.5
LARGEST_FACTOR = 0.5
COMPARED = 2  # batches of windows on which a block's error is compared before and after


class OffsetLinear(nn.Module):
    """Stands in for a Linear while offsets and scale factors of its codes are learned.

    Autograd sees one leaf, the matrix of now in ``dtype``; what its gradient means for offsets and factors is worked out by
    hand in ``follow``, as if rounding were the identity.

    Args:
        qtensor: integer codes to start from.
        values: the float values ``[out, in]`` that were rounded to them: a code leans towards its value by up to half a step.
        dtype: floating type of the matrix product.
    """

    def __init__(self, qtensor: QTensor, values: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        scheme = qtensor.scheme
        self.qtensor, self.bias = qtensor, bias
        self.scales = qtensor.steps().unsqueeze(-1)
        self.zeros = torch.zeros_like(self.scales) if qtensor.zeros is None else qtensor.zeros.float().unsqueeze(-1)
        levels = to_blocks(qtensor.codes.float(), scheme) - self.zeros
        exact = to_blocks(values.float(), scheme) / self.scales
        # Just inside half a step, so that offset 0 rounds to the code itself.
        self.values = levels + (exact - levels).clamp(-0.499, 0.499)
        self.offset = torch.zeros_like(self.values)
        self.factor = torch.zeros_like(self.scales)
        self.matrix = nn.Parameter(self._matrix().to(dtype))

    def _levels(self) -> tuple[Tensor, Tensor]:
        """Codes less zero points in block view, and where the end of the grid holds them."""
        scheme = self.qtensor.scheme
        free = torch.round(self.values * (-self.factor).exp() + self.offset).add_(self.zeros)
        held = free.clamp(scheme.code_min, scheme.code_max)
        return held.sub(self.zeros), held != free

    def _matrix(self) -> Tensor:
        levels, _ = self._levels()
        return from_blocks(levels.mul_(self.scales * self.factor.exp()), self.qtensor.shape)

    def forward(self, inputs: Tensor) -> Tensor:
        output = functional.linear(inputs.to(self.matrix.dtype), self.matrix).to(inputs.dtype)
        return output if self.bias is None else output + self.bias

    @torch.no_grad()
    def slopes(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients for offsets and factors, both divided by s e^f, given that for the matrix ``[out, in]``.

        With w = c s e^f, c = v e^-f + o: dw/do = s e^f and dw/df = s e^f (c - v e^-f), where c is not held by the grid's end.
        """
        blocks = _zero_filled(gradient.float(), self.qtensor.scheme)
        levels, held = self._levels()
        to_factor = levels.sub(self.values * (-self.factor).exp() * ~held).mul_(blocks).sum(-1, keepdim=True)
        return blocks.masked_fill_(held, 0), to_factor

    @torch.no_grad()
    def follow(self, gradient: Tensor, rate: float) -> None:
        """One step of length ``rate`` against the sign of the gradient."""
        to_offset, to_factor = (slope.mul_(self.scales).sign_() for slope in self.slopes(gradient))
        self.offset.sub_(to_offset, alpha=rate).clamp_(-LARGEST_OFFSET, LARGEST_OFFSET)
        self.factor.sub_(to_factor, alpha=rate * SCALE_SHARE).clamp_(-LARGEST_FACTOR, LARGEST_FACTOR)
        self.matrix.copy_(self._matrix())

    @torch.no_grad()
    def learned(self) -> QTensor:
        """The codes of now, with scales rounded to their stored type."""
        old = self.qtensor
        levels, _ = self._levels()
        scales = store_scales((self.scales * self.factor.exp()).squeeze(-1), old.scheme)
        return QTensor(old.scheme, from_blocks(levels + self.zeros, old.shape).to(old.codes.dtype), scales, old.zeros)


def _zero_filled(values: Tensor, scheme: Scheme) -> Tensor:
    """``[out, in]`` in block view, with zeros where a short last group has no weights."""
    if not isinstance(scheme.blocks, int):
        return to_blocks(values, scheme)
    return functional.pad(values, (0, -values.shape[1] % scheme.blocks)).reshape(values.shape[0], -1, scheme.blocks)


@dataclass(frozen=True, slots=True)
class Target:
    """What a block gives in float, per batch ``[batch, length, hidden]``, with the weight of every token."""

    outputs: Sequence[Tensor]
    weights: Sequence[Tensor]

    @classmethod
    def of(cls, outputs: Sequence[Tensor]) -> Target:
        return cls(outputs, [1 / output.square().sum(-1).clamp_min(1e-12) for output in outputs])

    def error(self, batch: int, output: Tensor) -> Tensor:
        """Sum over tokens of the squared error relative to the token's squared size."""
        return ((output - self.outputs[batch]).square().sum(-1) * self.weights[batch]).sum()


class LearnedRounding:
    """Refines the codes of one block after another of a ``BlockRunner``.

    Args:
        iterations: steps per block; each sees one batch of windows.
    """

    def __init__(self, runner: BlockRunner, iterations: int = ITERATIONS) -> None:
        self.runner = runner
        self.iterations = iterations
        self.dtype = compute_type(runner.device)

    @torch.no_grad()
    def refine(
        self,
        index: int,
        inputs: BlockInputs,
        target: Target,
        outcomes: Mapping[str, Outcome],
        weights: Mapping[str, Tensor],
    ) -> tuple[dict[str, Outcome], Note]:
        """Better codes for block ``index``, whose quantised matrices are loaded, as they are again on return.

        Args:
            inputs: hidden states of the quantised stream.
            target: the block's float outputs on the float stream.
            outcomes: what was made of every matrix, by parameter name inside the block.
            weights: the float matrices that the codes stand for.
        """
        runner = self.runner
        prefix = f"{runner.skeleton.blocks_name}.{index}."
        before = self._error(index, inputs, target)
        learners = {name: self._learner(index, name, outcome, weights[name]) for name, outcome in outcomes.items()}
        originals = {name: runner.block(index).get_submodule(name.removesuffix(".weight")) for name in outcomes}
        self._put(index, learners)
        try:
            self._descend(index, inputs, target, list(learners.values()))
        finally:
            self._put(index, originals)
        found = {name: learner.learned() for name, learner in learners.items()}
        for name, qtensor in found.items():
            runner.skeleton.set(prefix + name, qtensor.dequantise())
        after = self._error(index, inputs, target)
        if not after < before:
            for name, outcome in outcomes.items():
                runner.skeleton.set(prefix + name, outcome.qtensor.dequantise())
            return dict(outcomes), Note("rounding-not-learned", f"{prefix[:-1]}: no better codes than the first ones were found")
        text = f"{prefix[:-1]}: relative output error {before**0.5:.4f} -> {after**0.5:.4f}"
        return {name: Outcome(found[name], outcomes[name].notes) for name in outcomes}, Note("rounding-learned", text)

    def _learner(self, index: int, name: str, outcome: Outcome, matrix: Tensor) -> OffsetLinear:
        values = matrix if outcome.values is None else outcome.values
        bias: Any = self.runner.block(index).get_submodule(name.removesuffix(".weight")).bias
        return OffsetLinear(outcome.qtensor, values, bias, self.dtype)

    def _put(self, index: int, modules: Mapping[str, nn.Module]) -> None:
        for name, module in modules.items():
            parent, _, leaf = name.removesuffix(".weight").rpartition(".")
            setattr(self.runner.block(index).get_submodule(parent), leaf, module)

    def _error(self, index: int, inputs: BlockInputs, target: Target) -> float:
        """Mean over tokens of the squared relative error on the compared batches."""
        batches = range(min(COMPARED, len(inputs.hidden)))
        total = sum(float(target.error(b, self.runner.forward(index, inputs.hidden[b], inputs))) for b in batches)
        return total / sum(target.weights[b].numel() for b in batches)

    def _descend(self, index: int, inputs: BlockInputs, target: Target, learners: Sequence[OffsetLinear]) -> None:
        generator = torch.Generator().manual_seed(index)
        for step in range(self.iterations):
            rate = (1 - step / self.iterations) / self.iterations
            batch = int(torch.randint(len(inputs.hidden), (1,), generator=generator))
            with torch.enable_grad():
                error = target.error(batch, self.runner.forward_with_gradient(index, inputs.hidden[batch], inputs))
                gradients = torch.autograd.grad(error, [learner.matrix for learner in learners])
            for learner, gradient in zip(learners, gradients, strict=True):
                learner.follow(gradient, rate)
