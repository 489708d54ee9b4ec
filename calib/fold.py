"""Folding: move input-channel factors from the matrices that read an input into what produces it, and prove that nothing changed.

Weights are a plain dictionary of float32 tensors by parameter name (inside the block). Every fold is tried, the block is run on a
sample, and a fold after which the float output differs by more than the tolerance is undone and noted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from calib.graph import FeedGroup, FromLinear, FromNorm
from quant.quantizer import Note

TOLERANCE = 1e-4
Weights = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Folded:
    """What a fold did: the factors that hold exactly, and the parameters that now have other values."""

    factors: Tensor
    changed: Weights


def fold_candidates(
    weights: Mapping[str, Tensor], group: FeedGroup, factors: Tensor, dtypes: Mapping[str, torch.dtype]
) -> list[Folded]:
    """The ways in which ``factors`` ``[in]`` could move into the group's producer, most common first.

    A normalisation may multiply by its weight or by one plus its weight. Kept parameters are rounded to the type they are
    stored in and the factors recomputed from the rounded values, so that rounding costs no accuracy at all.
    """
    if isinstance(group.producer, FromNorm):
        both = [_into_norm(weights, group, group.producer, factors, dtypes, offset) for offset in (0.0, 1.0)]
        # A weight of 0 takes no factor: a candidate that scales nothing would hold trivially and hide the other one.
        return [candidate for candidate in both if bool((candidate.factors != 1).any())]
    if isinstance(group.producer, FromLinear):
        return [_into_linear(weights, group, group.producer, factors, dtypes)]
    return []


def _into_norm(
    weights: Mapping[str, Tensor],
    group: FeedGroup,
    producer: FromNorm,
    factors: Tensor,
    dtypes: Mapping[str, torch.dtype],
    offset: float,
) -> Folded:
    name = f"{producer.module}.weight"
    gain = weights[name] + offset
    stored = (gain / factors - offset).to(dtypes[name]).float()
    exact = torch.where((stored + offset != 0) & (gain != 0), gain / (stored + offset), torch.ones_like(gain))
    stored = torch.where(exact == 1, weights[name], stored)
    changed: Weights = {name: stored}
    bias = f"{producer.module}.bias"
    if bias in weights:
        changed[bias] = (weights[bias] / exact).to(dtypes[bias]).float()
    return Folded(exact, changed | _scaled_consumers(weights, group, exact))


def _into_linear(
    weights: Mapping[str, Tensor], group: FeedGroup, producer: FromLinear, factors: Tensor, dtypes: Mapping[str, torch.dtype]
) -> Folded:
    name = f"{producer.module}.weight"
    mapped = producer.channel >= 0
    divisor = torch.ones(weights[name].shape[0], device=factors.device)
    divisor[producer.channel[mapped]] = factors[mapped]
    changed: Weights = {}
    bias = f"{producer.module}.bias"
    if bias in weights:
        changed[bias] = (weights[bias] / divisor).to(dtypes[bias]).float()
        divisor = torch.where((changed[bias] != 0) & (weights[bias] != 0), weights[bias] / changed[bias], divisor)
    exact = torch.where(mapped, divisor[producer.channel.clamp_min(0)], torch.ones_like(factors))
    changed[name] = weights[name] / divisor.unsqueeze(1)
    return Folded(exact, changed | _scaled_consumers(weights, group, exact))


def _scaled_consumers(weights: Mapping[str, Tensor], group: FeedGroup, factors: Tensor) -> Weights:
    return {f"{name}.weight": weights[f"{name}.weight"] * factors for name in group.consumers}


class Observer:
    """One vector of all that a fold must not change, each part scaled to size 1 by its size when it was first seen.

    ``look`` gives (part, slack): what a part is compared with is its own norm plus the slack. The outputs of the matrices that
    read the input show a wrong fold however large the residual stream is; the block's update shows other readers of the
    producer.
    """

    def __init__(self, look: Callable[[], Sequence[tuple[Tensor, float]]]) -> None:
        self._look = look
        self._sizes: list[float] = []

    def __call__(self) -> Tensor:
        parts = [(part.double().flatten(), slack) for part, slack in self._look()]
        if not self._sizes:
            self._sizes = [max(float(part.norm()) + slack, 1e-30) for part, slack in parts]
        return torch.cat([part / size for (part, _), size in zip(parts, self._sizes, strict=True)])


def fold_verified(
    weights: Weights,
    group: FeedGroup,
    factors: Tensor,
    dtypes: Mapping[str, torch.dtype],
    apply: Callable[[Mapping[str, Tensor]], None],
    output: Callable[[], Tensor],
    place: str,
) -> tuple[Tensor | None, list[Note]]:
    """Fold ``factors`` into the producer of ``group`` if what the block computes in float stays what it was.

    All ways of folding are tried and the closest is kept, so that no way passes because a better one was not looked at.

    Args:
        weights: the block's parameters; updated in place when the fold holds.
        apply: puts parameters into the running block.
        output: runs the block on the sample; an ``Observer``, or the block itself.
        place: name for the note.

    Returns:
        The factors that were folded, or None when no way of folding holds (all is as before, and a note says so).
    """
    before = output()
    size = float(before.double().norm())
    closest: tuple[float, Folded] | None = None
    for candidate in fold_candidates(weights, group, factors, dtypes):
        apply(candidate.changed)
        difference = float((output() - before).double().norm()) / max(size, 1e-30)
        apply({name: weights[name] for name in candidate.changed})
        if closest is None or difference < closest[0]:
            closest = (difference, candidate)
    if closest is not None and closest[0] <= TOLERANCE:
        weights.update(closest[1].changed)
        apply(closest[1].changed)
        return closest[1].factors, []
    found = "cannot be done" if closest is None else f"changes the block's float values by {closest[0]:.1e} of their norm"
    return None, [Note("fold-undone", f"{place}: folding the factors {found} (allowed {TOLERANCE:.0e}); undone")]
