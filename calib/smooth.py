"""SmoothQuant on one decoder block: factors for every feed group by a fixed or a searched alpha, folded as AWQ's are.

The search measures what will run: the group's matrices rounded, their inputs rounded as the layout's engines round them, on a
sample of the calibration tokens. Where nothing can take the factors the group keeps its ranges, and a note says so.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from calib.awq import AwqBlock
from calib.capture import BlockInputs, BlockRunner, watching_inputs
from calib.evidence import Evidence
from calib.graph import FeedGroup
from quant.activations import ActivationScheme
from quant.quantizers.rtn import round_to_nearest
from quant.transforms.awq import Consumer, ScaleChoice
from quant.transforms.smoothquant import largest_columns, smooth_factors

ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
SAMPLED_TOKENS = 1024


class SmoothBlock(AwqBlock):
    """Smooths one block after another.

    Args:
        alpha: share of the inputs' range that moves into the weights, 0 to 1; None searches it per group.
        inputs_as: how the inputs will be rounded.
    """

    def __init__(self, runner: BlockRunner, alpha: float | None, inputs_as: ActivationScheme) -> None:
        super().__init__(runner, scale=True, clip=False)
        self.alpha, self.inputs_as = alpha, inputs_as

    def _choose(
        self,
        where: tuple[int, BlockInputs],
        group: FeedGroup,
        found: Evidence,
        consumers: Sequence[Consumer],
        limits: tuple[Tensor | None, Tensor | None],
    ) -> ScaleChoice:
        share, free = limits
        ranges = [found.abs_max, largest_columns([consumer.matrix for consumer in consumers])]
        alive = (ranges[0] > 0) & (ranges[1] > 0)
        if free is not None:
            alive &= free
        if share is not None:  # channels that must get equal factors share the larger of their ranges
            dead = ~alive
            ranges = [_largest_of_shared(values, share) for values in ranges]
            alive = _largest_of_shared(dead.float(), share) == 0
        ones = torch.ones_like(ranges[0])

        def factors(alpha: float) -> Tensor:
            return torch.where(alive, smooth_factors(ranges[0], ranges[1], alpha), ones)

        if self.alpha is not None:
            return ScaleChoice(factors(self.alpha), (self.alpha, 1 - self.alpha), float("nan"))
        sample = self._inputs(where, group)
        plain = self._error(sample, consumers, ones)
        errors = {alpha: self._error(sample, consumers, factors(alpha)) for alpha in ALPHAS}
        best = min(errors, key=lambda alpha: (errors[alpha], alpha))
        if not errors[best] < plain:
            return ScaleChoice(ones, (0.0, 0.0), 1.0)
        return ScaleChoice(factors(best), (best, 1 - best), errors[best] / plain)

    def _inputs(self, where: tuple[int, BlockInputs], group: FeedGroup) -> Tensor:
        """Rows ``[tokens, in]`` of the group's input, spread over the first batch."""
        index, inputs = where
        seen: dict[str, Tensor] = {}
        with watching_inputs(self.runner.block(index), group.consumers[:1], seen.__setitem__):
            self.runner.forward(index, inputs.hidden[0], inputs)
        rows = seen[group.consumers[0]].reshape(-1, seen[group.consumers[0]].shape[-1])
        return rows[:: max(1, len(rows) // SAMPLED_TOKENS)]

    def _error(self, rows: Tensor, consumers: Sequence[Consumer], factors: Tensor) -> float:
        """Squared output error of all consumers with rounded inputs and weights."""
        rounded = self.inputs_as.rounded(rows / factors)
        total = 0.0
        for consumer in consumers:
            weights = round_to_nearest(consumer.matrix * factors, consumer.scheme).dequantise()
            total += float((rounded @ weights.T - rows @ consumer.matrix.T).double().square().sum())
        return total


def _largest_of_shared(values: Tensor, share: Tensor) -> Tensor:
    """The largest of ``values`` over channels with equal ``share``, at each of them."""
    largest = torch.zeros(int(share.max()) + 1, dtype=values.dtype, device=values.device)
    return largest.scatter_reduce(0, share, values, "amax")[share]
