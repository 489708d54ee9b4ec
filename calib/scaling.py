"""Scaling one decoder block: what every transform of ``quant.transforms`` has in common.

Evidence is gathered in one pass through the float block (its inputs come from the quantised blocks before it); then the groups
are scaled from the last to the first, so that a producer which is itself a consumer of an earlier group (v_proj, up_proj) has its
final rows when its own input channels are searched. Every fold is verified, or undone and noted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic

import torch
from torch import Tensor

from calib.capture import BlockInputs, BlockRunner, T, watching_outputs
from calib.fold import Observer, Weights, fold_verified
from calib.graph import FeedGroup, FromLinear
from formats.fates import Quantise
from quant.quantizer import Note
from quant.transforms.awq import ScaleChoice

# Share of the block's output norm that its update is compared with on top of its own: the sum's float32 noise stays below it.
_UPDATE_SLACK = 1e-2


@dataclass
class ScaledBlock:
    """A block whose matrices are ready to be rounded.

    Attributes:
        weights: float32 parameters by name inside the block, after folding.
        shrink: range factors per matrix (``scheme.block_grid``), where clipping was searched.
        folded: names of kept parameters whose values changed.
        choices: what the search of AWQ found, by the first consumer of each feed group.
        unreached: matrices that no token reached, where evidence was gathered: neither scaled nor clipped.
    """

    weights: Weights
    shrink: dict[str, Tensor] = field(default_factory=dict)
    folded: set[str] = field(default_factory=set)
    choices: dict[str, ScaleChoice] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    unreached: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """Which block is scaled: its number, its name, its hidden states, and what its parameters become.

    ``fates`` are those of the matrices that are quantised, ``dtypes`` the stored type of every parameter, by name inside.
    """

    index: int
    name: str
    inputs: BlockInputs
    fates: Mapping[str, Quantise]
    dtypes: Mapping[str, torch.dtype]


@dataclass(frozen=True, slots=True)
class Sharing:
    """Which channels must have one factor in common, int64 ``[in]``, and which may have one at all, bool ``[in]``; None: each."""

    share: Tensor | None = None
    free: Tensor | None = None


class BlockTransform(Generic[T], ABC):
    """Scales one block after another of a ``BlockRunner``."""

    def __init__(self, runner: BlockRunner) -> None:
        self.runner = runner

    @property
    def idle(self) -> bool:
        """Whether there is nothing to be done to any block."""
        return False

    @property
    def scales(self) -> bool:
        """Whether groups are scaled at all; where not, ``finish`` does everything."""
        return True

    @abstractmethod
    def gather(self, place: BlockPlace, groups: Sequence[FeedGroup]) -> dict[str, T]:
        """What is to be known of the inputs of the groups, by the first consumer of each."""

    @abstractmethod
    def factors(self, place: BlockPlace, block: ScaledBlock, group: FeedGroup, found: T, sharing: Sharing) -> Tensor | None:
        """Factors ``[in]`` worth folding, or None where the group is best left as it is."""

    def folded(self, group: FeedGroup, found: T, factors: Tensor) -> T:
        """What is known of the inputs after they were divided by ``factors``."""
        return found

    def finish(self, place: BlockPlace, block: ScaledBlock, groups: Sequence[FeedGroup], found: Mapping[str, T]) -> None:
        """What is left to do once all groups are scaled; ``found`` is what is known of the scaled block's inputs."""

    @torch.no_grad()
    def scale(
        self,
        index: int,
        inputs: BlockInputs,
        groups: Sequence[FeedGroup],
        fates: Mapping[str, Quantise],
        dtypes: Mapping[str, torch.dtype],
    ) -> ScaledBlock:
        """Scale block ``index``, whose parameters are loaded; on return the runner holds the folded float parameters.

        Args:
            fates: of each matrix that is quantised, by parameter name inside the block.
            dtypes: stored type of every parameter, by name inside the block.
        """
        runner = self.runner
        place = BlockPlace(index, f"{runner.skeleton.blocks_name}.{index}", inputs, fates, dtypes)
        prefix = f"{place.name}."
        block = ScaledBlock(
            {name.removeprefix(prefix): runner.skeleton.get(name).data for name in runner.block_parameters(index)}
        )
        if self.idle:
            return block
        wanted = [group for group in groups if any(f"{name}.weight" in fates for name in group.consumers)]
        evidence = self.gather(place, wanted)
        block.unreached = {name for group in wanted if not evidence[group.consumers[0]].tokens for name in group.consumers}
        wanted = [group for group in wanted if group.consumers[0] not in block.unreached]
        before = {name: value for name, value in block.weights.items() if name not in fates}
        for group in reversed(wanted) if self.scales else ():
            first = group.consumers[0]
            exact = self._fold(place, block, group, evidence[first])
            if exact is not None:
                evidence[first] = self.folded(group, evidence[first], exact)
        block.folded = {name for name, value in before.items() if not torch.equal(value, block.weights[name])}
        self.finish(place, block, wanted, evidence)
        return block

    def _fold(self, place: BlockPlace, block: ScaledBlock, group: FeedGroup, found: T) -> Tensor | None:
        """Scale one group if that can be done and is worth it; returns the factors that hold."""
        sharing = self._sharing(place, block, group)
        factors = None if sharing is None else self.factors(place, block, group, found, sharing)
        if factors is None:
            return None
        exact, notes = fold_verified(
            block.weights,
            group,
            factors,
            place.dtypes,
            partial(self._apply, f"{place.name}."),
            Observer(partial(self._look, place, group)),
            f"{place.name}.{group.consumers[0]}",
        )
        block.notes += notes
        return exact

    def _apply(self, prefix: str, changed: Mapping[str, Tensor]) -> None:
        for name, value in changed.items():
            self.runner.skeleton.set(prefix + name, value)

    def _look(self, place: BlockPlace, group: FeedGroup) -> list[tuple[Tensor, float]]:
        """What the group's matrices compute, and what the block adds to its input (with a slack for the float noise of a sum)."""
        seen: dict[str, Tensor] = {}
        sample = place.inputs.sample(self.runner.SAMPLE)
        with watching_outputs(self.runner.block(place.index), group.consumers, seen.__setitem__):
            output = self.runner.forward(place.index, sample, place.inputs)
        noise = _UPDATE_SLACK * float(output.double().norm())
        # Of routed matrices the sample may reach none; what the block adds is compared in any case.
        return [*((seen[name], 0.0) for name in group.consumers if name in seen), (output - sample, noise)]

    def _sharing(self, place: BlockPlace, block: ScaledBlock, group: FeedGroup) -> Sharing | None:
        """How the channels of the group's input hang together, or None, with a note, where they cannot be scaled."""
        name = f"{place.name}.{group.consumers[0]}"
        if group.producer is None:
            block.notes.append(Note("not-scaled", f"{name}: nothing that produces its input can take factors"))
            return None
        if not all(f"{consumer}.weight" in place.fates for consumer in group.consumers):
            block.notes.append(Note("not-scaled", f"{name}: a matrix that reads the same input stays in float"))
            return None
        if not isinstance(group.producer, FromLinear):
            return Sharing()
        if f"{group.producer.module}.weight" not in place.fates:
            block.notes.append(Note("not-scaled", f"{name}: {group.producer.module}, which feeds it, stays in float"))
            return None
        return Sharing(group.producer.channel.clamp_min(0), group.producer.channel >= 0)
