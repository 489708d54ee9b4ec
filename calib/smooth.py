"""SmoothQuant on one decoder block: smooth the input of every feed group, with a fixed alpha or the best one for the group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from calib.awq import clip_groups
from calib.capture import BlockRunner
from calib.evidence import Evidence, InputRange, RangeGatherer
from calib.graph import FeedGroup, gather_groups
from calib.methods import Smoothing
from calib.scaling import BlockPlace, BlockTransform, ScaledBlock, Sharing
from quant.quantizer import Note
from quant.transforms.smoothquant import ALPHAS, SmoothConsumer, SmoothInputs, search_alpha

SAMPLED_TOKENS = 512
_FROM_EACH_WINDOW = 4


class SmoothBlock(BlockTransform[InputRange]):
    """Smooths one block after another of a ``BlockRunner``.

    Args:
        smoothing: the alpha, or that it is searched, and the statistic.
        clip: search the clipping of every block of the grid afterwards.
    """

    def __init__(self, runner: BlockRunner, smoothing: Smoothing, *, clip: bool) -> None:
        super().__init__(runner)
        self.smoothing = smoothing
        self.clip = clip

    def gather(self, place: BlockPlace, groups: Sequence[FeedGroup]) -> dict[str, InputRange]:
        tokens = sum(hidden.shape[0] * hidden.shape[1] for hidden in place.inputs.hidden)
        length = place.inputs.hidden[0].shape[1]
        every = max(1, min(tokens // SAMPLED_TOKENS, length // _FROM_EACH_WINDOW))
        kind = RangeGatherer.exact_for(self.smoothing.percentile, tokens, every)
        return gather_groups(self.runner, place.index, groups, place.inputs, kind)

    def factors(
        self, place: BlockPlace, block: ScaledBlock, group: FeedGroup, found: InputRange, sharing: Sharing
    ) -> Tensor | None:
        fates = [place.fates[f"{consumer}.weight"] for consumer in group.consumers]
        consumers = [
            SmoothConsumer(block.weights[f"{consumer}.weight"], fate.scheme, fate.activations)
            for consumer, fate in zip(group.consumers, fates, strict=True)
        ]
        inputs = SmoothInputs(found.rows, found.weights, found.largest, found.percentile(self.smoothing.percentile))
        alphas = (None, *ALPHAS) if self.smoothing.alpha is None else (self.smoothing.alpha,)
        choice = search_alpha(consumers, inputs, alphas, sharing.share, sharing.free)
        how = "not smoothed" if choice.alpha is None else f"alpha {choice.alpha:g}"
        text = f"{place.name}.{group.consumers[0]}: {how}, {choice.relative_error:.3g} of the output error without"
        block.notes.append(Note("smoothing", text))
        return None if choice.alpha is None else choice.factors

    def finish(self, place: BlockPlace, block: ScaledBlock, groups: Sequence[FeedGroup], found: Mapping[str, InputRange]) -> None:
        if self.clip:
            clip_groups(place, block, groups, gather_groups(self.runner, place.index, groups, place.inputs, Evidence))
