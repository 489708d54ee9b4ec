"""AWQ on one decoder block: search and fold the scaling of every feed group on Gram matrices, choose the clipping."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from calib.capture import BlockRunner
from calib.evidence import Evidence
from calib.graph import FeedGroup, gather_groups
from calib.naming import naming
from calib.scaling import BlockPlace, BlockTransform, ScaledBlock, Sharing
from quant.transforms.awq import Consumer, search_clipping, search_factors


class AwqBlock(BlockTransform[Evidence]):
    """Scales one block after another of a ``BlockRunner``.

    Args:
        scale: search and fold the factors of every feed group.
        clip: search the clipping of every block of the grid.
    """

    def __init__(self, runner: BlockRunner, *, scale: bool = True, clip: bool) -> None:
        super().__init__(runner)
        self.scaling = scale
        self.clip = clip

    @property
    def scales(self) -> bool:
        return self.scaling

    @property
    def idle(self) -> bool:
        return not (self.scaling or self.clip)

    def gather(self, place: BlockPlace, groups: Sequence[FeedGroup]) -> dict[str, Evidence]:
        return gather_groups(self.runner, place.index, groups, place.inputs, Evidence)

    def factors(
        self, place: BlockPlace, block: ScaledBlock, group: FeedGroup, found: Evidence, sharing: Sharing
    ) -> Tensor | None:
        names = [f"{consumer}.weight" for consumer in group.consumers]
        consumers = [Consumer(block.weights[name], place.fates[name].scheme) for name in names]
        choice = search_factors(consumers, found.gram, sharing.share, sharing.free)
        block.choices[group.consumers[0]] = choice
        return None if choice.exponents == (0.0, 0.0) else choice.factors

    def folded(self, group: FeedGroup, found: Evidence, factors: Tensor) -> Evidence:
        return found.divided(factors)

    def finish(self, place: BlockPlace, block: ScaledBlock, groups: Sequence[FeedGroup], found: Mapping[str, Evidence]) -> None:
        if self.clip:
            clip_groups(place, block, groups, found)


def clip_groups(place: BlockPlace, block: ScaledBlock, groups: Sequence[FeedGroup], found: Mapping[str, Evidence]) -> None:
    """Search how far every quantised matrix of the groups is clipped; ``found`` is evidence of the scaled block."""
    for group in groups:
        for name in (f"{consumer}.weight" for consumer in group.consumers):
            if name in place.fates:
                with naming(f"{place.name}.{name}"):
                    gram = found[group.consumers[0]].gram
                    block.shrink[name] = search_clipping(block.weights[name], place.fates[name].scheme, gram)
