"""Graph: who feeds whom inside one decoder block, found by running it.

Matrices that read the same input are those whose input is the *same tensor object* in one traced batch. What produces that
input is a normalisation whose output is that very tensor, or an earlier matrix whose output channels reach the input channels
one to one: this is probed by multiplying each output channel by a number of its own and looking for these numbers in the
input. No table of module names is consulted, and grouped queries and gates need no special case.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from calib.capture import BlockInputs, BlockRunner, T, hooked, watching_inputs, watching_outputs
from calib.evidence import Gatherer
from formats.experts import Expert, expert_names

RunBlock = Callable[[], Tensor]
_CONSTANT = 1e-3  # relative deviation from one factor per channel that is still called constant


@dataclass(frozen=True, slots=True)
class FromNorm:
    """The input is the output of this module, which has a one-dimensional ``weight`` as long as the input is wide."""

    module: str


@dataclass(frozen=True, slots=True)
class FromLinear:
    """Input channel i is, up to a factor that does not depend on it, output channel ``channel[i]`` of this matrix; -1: none."""

    module: str
    channel: Tensor


@dataclass(frozen=True, slots=True)
class FeedGroup:
    """Matrices that read the same input, in order of execution, and what produces that input (None: nothing foldable).

    ``routed``: they run only on the tokens that a router sends them, perhaps on none.
    """

    consumers: tuple[str, ...]
    producer: FromNorm | FromLinear | None
    routed: bool = False


def linear_names(block: nn.Module) -> tuple[str, ...]:
    return tuple(name for name, module in block.named_modules() if isinstance(module, nn.Linear))


def gather_groups(
    runner: BlockRunner, index: int, groups: Sequence[FeedGroup], inputs: BlockInputs, kind: Gatherer[T]
) -> dict[str, T]:
    """A statistic of the inputs of all groups in one pass, by the first consumer of each."""
    routed = frozenset(group.consumers[0] for group in groups if group.routed)
    return runner.gather_as(kind, index, [group.consumers[0] for group in groups], inputs, routed)


def stages(groups: Sequence[FeedGroup]) -> list[list[FeedGroup]]:
    """Groups whose evidence is gathered in one pass: each alone, but the routed ones of one kind together."""
    found: list[list[FeedGroup]] = []
    for group in groups:
        if found and group.routed and found[-1][0].routed and (group.producer is None) == (found[-1][0].producer is None):
            found[-1].append(group)
        else:
            found.append([group])
    return found


@torch.no_grad()
def trace_groups(block: nn.Module, run: RunBlock) -> tuple[FeedGroup, ...]:
    """Feed groups of ``block`` in order of execution; ``run`` runs it on a small sample (weights loaded).

    Experts come last and are known by their structure: the sample may reach none of them.
    """
    experts = expert_names(block)
    linears = [name for name in linear_names(block) if name.rpartition(".")[0] not in experts]
    inputs: dict[str, Tensor] = {}
    produced: list[tuple[str, Tensor]] = []

    def note_output(name: str, output: Any) -> None:
        if isinstance(output, Tensor):
            produced.append((name, output))

    weighted = [
        name
        for name, module in block.named_modules()
        if name and not isinstance(module, nn.Linear) and isinstance(getattr(module, "weight", None), Tensor)
    ]
    with watching_outputs(block, weighted, note_output), watching_inputs(block, linears, inputs.__setitem__):
        run()
    shared: list[list[str]] = []
    for name in inputs:
        for group in shared:
            if inputs[group[0]] is inputs[name]:
                group.append(name)
                break
        else:
            shared.append([name])
    groups: list[FeedGroup] = []
    for position, members in enumerate(shared):
        earlier = [name for group in shared[:position] for name in group]
        value = inputs[members[0]]
        producer: FromNorm | FromLinear | None = _norm_of(block, value, produced)
        if producer is None:
            producer = _linear_of(block, members[0], earlier, value, run)
        groups.append(FeedGroup(tuple(members), producer))
    return (*groups, *_expert_groups(experts))


def _expert_groups(experts: Mapping[str, Expert]) -> list[FeedGroup]:
    """Gate and up of every expert read the rows routed to it; channel i of down's input is a multiple of up's output i."""
    first, second = [], []
    for name, expert in experts.items():
        gate, up, down = (f"{name}.{leaf}" for leaf in expert.leaves)
        last: Any = expert.get_submodule(expert.leaves[2])
        first.append(FeedGroup((gate, up), None, routed=True))
        second.append(FeedGroup((down,), FromLinear(up, torch.arange(last.in_features)), routed=True))
    return [*first, *second]


def _norm_of(block: nn.Module, value: Tensor, produced: list[tuple[str, Tensor]]) -> FromNorm | None:
    for name, output in produced:
        weight = block.get_submodule(name).weight
        if output is value and isinstance(weight, Tensor) and weight.shape == value.shape[-1:]:
            return FromNorm(name)
    return None


def _linear_of(block: nn.Module, consumer: str, earlier: list[str], value: Tensor, run: RunBlock) -> FromLinear | None:
    """The latest earlier matrix with a one-to-one channel map onto the consumer's input, if any."""
    before = value.reshape(-1, value.shape[-1]).double()
    for name in reversed(earlier):
        module = block.get_submodule(name)
        assert isinstance(module, nn.Linear)
        channel = _probe(block, module, consumer, before, run)
        if channel is not None:
            return FromLinear(name, channel)
    return None


def _probe(block: nn.Module, producer: nn.Linear, consumer: str, before: Tensor, run: RunBlock) -> Tensor | None:
    """Channel map ``[in]`` from the producer's outputs to the consumer's inputs, or None where there is no such map."""
    width = producer.out_features
    generator = torch.Generator().manual_seed(width)
    # All well above 1, so that an input which does not depend on the producer (ratio 1) matches none of them.
    ordered = torch.linspace(math.log(2), math.log(20), width, dtype=torch.float64)
    spacing = math.log(10) / max(width - 1, 1)
    order = torch.randperm(width, generator=generator)
    factors = torch.empty_like(ordered).index_copy_(0, order, ordered.exp())
    seen: dict[str, Tensor] = {}
    times = producer.register_forward_hook(lambda module, args, output: output * factors.to(output.device, output.dtype))
    with hooked([times]), watching_inputs(block, [consumer], seen.__setitem__):
        run()
    after = seen[consumer].reshape(-1, before.shape[-1]).double()
    energy = (before * before).sum(0)
    ratio = (after * before).sum(0) / energy.clamp_min(1e-300)
    residual = (after - ratio * before).norm(dim=0) / (ratio * before).norm(dim=0).clamp_min(1e-300)
    logs = ratio.clamp_min(1e-300).log()
    right = torch.searchsorted(ordered, logs).clamp(0, width - 1)
    left = (right - 1).clamp_min(0)
    nearer = torch.where((logs - ordered[left]).abs() <= (logs - ordered[right]).abs(), left, right)
    alive = energy > 0
    matched = alive & (residual < _CONSTANT) & ((logs - ordered[nearer]).abs() < spacing / 4)
    if not bool(matched.any()) or bool((alive & ~matched).any()):
        return None
    return torch.where(matched, order[nearer], torch.full_like(nearer, -1))
