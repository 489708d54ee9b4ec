"""AWQ on one decoder block: gather evidence, search and fold the scaling of every feed group, choose the clipping.

The order follows the data: all evidence is gathered in one pass through the float block (its inputs come from the quantised
blocks before it), then the groups are scaled from the last to the first, so that a producer which is itself a consumer of an
earlier group (v_proj, up_proj) has its final rows when its own input channels are searched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from calib.capture import BlockInputs, BlockRunner, watching_outputs
from calib.evidence import Evidence
from calib.fold import Observer, Weights, fold_verified
from calib.graph import FeedGroup, FromLinear, gather_groups
from calib.naming import naming
from quant.quantizer import Note
from quant.scheme import Scheme
from quant.transforms.awq import Consumer, ScaleChoice, search_clipping, search_factors

# Share of the block's output norm that its update is compared with on top of its own: the sum's float32 noise stays below it.
_UPDATE_SLACK = 1e-2


@dataclass
class ScaledBlock:
    """A block whose matrices are ready to be rounded.

    Attributes:
        weights: float32 parameters by name inside the block, after folding.
        shrink: range factors per matrix (``scheme.block_grid``), where clipping was searched.
        folded: names of kept parameters whose values changed.
        choices: what the search found, by the first consumer of each feed group.
        unreached: matrices that no token reached, where evidence was gathered: neither scaled nor clipped.
    """

    weights: Weights
    shrink: dict[str, Tensor] = field(default_factory=dict)
    folded: set[str] = field(default_factory=set)
    choices: dict[str, ScaleChoice] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    unreached: set[str] = field(default_factory=set)


class AwqBlock:
    """Scales one block after another of a ``BlockRunner``.

    Args:
        scale: search and fold the factors of every feed group.
        clip: search the clipping of every block of the grid.
    """

    def __init__(self, runner: BlockRunner, *, scale: bool = True, clip: bool) -> None:
        self.runner = runner
        self.scaling = scale
        self.clip = clip

    @torch.no_grad()
    def scale(
        self,
        index: int,
        inputs: BlockInputs,
        groups: Sequence[FeedGroup],
        schemes: Mapping[str, Scheme],
        dtypes: Mapping[str, torch.dtype],
    ) -> ScaledBlock:
        """Scale block ``index``, whose parameters are loaded; on return the runner holds the folded float parameters.

        Args:
            schemes: scheme of each matrix that is quantised, by parameter name inside the block.
            dtypes: stored type of every parameter, by name inside the block.
        """
        runner, place = self.runner, f"{self.runner.skeleton.blocks_name}.{index}"
        prefix = f"{place}."
        block = ScaledBlock(
            {name.removeprefix(prefix): runner.skeleton.get(name).data for name in runner.block_parameters(index)}
        )
        if not (self.scaling or self.clip):
            return block
        wanted = [group for group in groups if any(f"{name}.weight" in schemes for name in group.consumers)]
        evidence = gather_groups(runner, index, wanted, inputs)
        block.unreached = {name for group in wanted if not evidence[group.consumers[0]].tokens for name in group.consumers}
        wanted = [group for group in wanted if group.consumers[0] not in block.unreached]
        sample = inputs.sample(runner.SAMPLE)
        before = {name: value for name, value in block.weights.items() if name not in schemes}
        for group in reversed(wanted) if self.scaling else ():
            found = evidence[group.consumers[0]]
            factors = self._factors(block, group, found, schemes, (index, inputs))
            if factors is None:
                continue
            exact, notes = fold_verified(
                block.weights,
                group,
                factors,
                dtypes,
                partial(self._apply, prefix),
                Observer(partial(self._look, index, sample, inputs, group)),
                f"{place}.{group.consumers[0]}",
            )
            block.notes += notes
            if exact is not None:
                evidence[group.consumers[0]] = found.divided(exact)
        block.folded = {name for name, value in before.items() if not torch.equal(value, block.weights[name])}
        if self.clip:
            for group in wanted:
                self._clip(block, group, evidence[group.consumers[0]], schemes, prefix)
        return block

    def _apply(self, prefix: str, changed: Mapping[str, Tensor]) -> None:
        for name, value in changed.items():
            self.runner.skeleton.set(prefix + name, value)

    def _look(self, index: int, sample: Tensor, inputs: BlockInputs, group: FeedGroup) -> list[tuple[Tensor, float]]:
        """What the group's matrices compute, and what the block adds to its input (with a slack for the float noise of a sum)."""
        seen: dict[str, Tensor] = {}
        with watching_outputs(self.runner.block(index), group.consumers, seen.__setitem__):
            output = self.runner.forward(index, sample, inputs)
        noise = _UPDATE_SLACK * float(output.double().norm())
        # Of routed matrices the sample may reach none; what the block adds is compared in any case.
        return [*((seen[name], 0.0) for name in group.consumers if name in seen), (output - sample, noise)]

    def _factors(
        self, block: ScaledBlock, group: FeedGroup, found: Evidence, schemes: Mapping[str, Scheme], where: tuple[int, BlockInputs]
    ) -> Tensor | None:
        """Factors worth folding, or None; every reason but 'plain rounding is best' is noted."""
        name, place = group.consumers[0], f"{self.runner.skeleton.blocks_name}.{where[0]}"
        if group.producer is None:
            block.notes.append(Note("not-scaled", f"{place}.{name}: nothing that produces its input can take factors"))
            return None
        if not all(f"{consumer}.weight" in schemes for consumer in group.consumers):
            block.notes.append(Note("not-scaled", f"{place}.{name}: a matrix that reads the same input stays in float"))
            return None
        share = free = None
        if isinstance(group.producer, FromLinear):
            if f"{group.producer.module}.weight" not in schemes:
                block.notes.append(Note("not-scaled", f"{place}.{name}: {group.producer.module}, which feeds it, stays in float"))
                return None
            free = group.producer.channel >= 0
            share = group.producer.channel.clamp_min(0)
        consumers = [Consumer(block.weights[f"{consumer}.weight"], schemes[f"{consumer}.weight"]) for consumer in group.consumers]
        choice = self._choose(where, group, found, consumers, (share, free))
        block.choices[name] = choice
        return None if choice.exponents == (0.0, 0.0) else choice.factors

    def _choose(
        self,
        where: tuple[int, BlockInputs],
        group: FeedGroup,
        found: Evidence,
        consumers: Sequence[Consumer],
        limits: tuple[Tensor | None, Tensor | None],
    ) -> ScaleChoice:
        """Factors for a group whose input can take them; ``limits``: which channels share a factor, and which are free."""
        return search_factors(consumers, found.gram, *limits)

    def _clip(self, block: ScaledBlock, group: FeedGroup, found: Evidence, schemes: Mapping[str, Scheme], prefix: str) -> None:
        for consumer in group.consumers:
            name = f"{consumer}.weight"
            if name in schemes:
                with naming(prefix + name):
                    block.shrink[name] = search_clipping(block.weights[name], schemes[name], found.gram)
