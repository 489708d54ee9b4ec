"""Quantise a checkpoint block by block on calibration windows: transforms first, then codes, then the next block's inputs.

A quantiser that needs evidence gets it group by group in the order of execution, each time from a pass through the block whose
earlier groups are quantised already; quantisers that need none are asked once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from calib.awq import AwqBlock, ScaledBlock
from calib.capture import BlockInputs, BlockRunner
from calib.evidence import Evidence
from calib.graph import FeedGroup, gather_groups, stages, trace_groups
from calib.methods import Method
from calib.naming import naming
from calib.quantise import FamilyRanges, Quantised, Report, Sink, put_alone, round_alone, stored_values
from calib.rounding import ITERATIONS, LearnedRounding, Target
from calib.smooth import SmoothBlock
from formats.checkpoint import TORCH_DTYPES, Checkpoint
from formats.codec import get_codec
from formats.fates import Keep, Quantise, TensorPlan
from formats.skeleton import Skeleton
from formats.tables import is_head, is_table
from quant.errors import SourceError
from quant.quantizer import Need, Note, Outcome, get_quantizer
from quant.shrink import search_shrink


def check_linears(skeleton: Skeleton, plans: Sequence[TensorPlan]) -> None:
    """Raise SourceError unless every planned matrix is the weight of a Linear module, as running the blocks needs."""
    wrong = []
    for plan in plans:
        if isinstance(plan.fate, Quantise) and not is_table(plan.module) and not is_head(plan.module):
            try:
                module = skeleton.model.get_submodule(plan.module)
            except AttributeError:
                module = None
            if not isinstance(module, torch.nn.Linear):
                wrong.append(f"{plan.module} ({type(module).__name__ if module is not None else 'no such module'})")
    if wrong:
        raise SourceError(
            f"{type(skeleton.model).__name__}: a calibrated method runs the blocks and needs plain Linear modules, but "
            f"{len(wrong)} planned matrices are none, the first is {wrong[0]}; use rtn, or keep them in float with a recipe"
        )


def block_scaler(
    method: Method, runner: BlockRunner, plans: Sequence[TensorPlan], *, clip: bool, alpha: float | None
) -> AwqBlock:
    """What scales every block before its codes are made, by the method's transform."""
    if method.transform != "smoothquant":
        return AwqBlock(runner, scale=method.transform == "awq", clip=clip)
    layouts = {plan.fate.codec for plan in plans if isinstance(plan.fate, Quantise)}
    rounded = {get_codec(name).activations for name in layouts} - {None}
    if not rounded:
        raise SourceError(f"{method.name} smooths inputs that are rounded, and no matrix is stored with rounded inputs: use awq")
    return SmoothBlock(runner, alpha, next(scheme for scheme in rounded if scheme is not None))


class BlockwiseDriver:
    """Calibrates and quantises block by block; what lies before and after the blocks is streamed.

    Args:
        method: its transform scales every block first, if it has one; the plans say which quantiser makes the codes.
        clip: search the clipping of the grids.
        learn_iterations: steps per block of learned rounding, where the method has it.
        alpha: of smoothing, where the method has it; None searches it.
        result: takes the notes of the run.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        plans: Sequence[TensorPlan],
        sink: Sink,
        result: Quantised,
        skeleton: Skeleton,
        *,
        method: Method,
        device: str,
        clip: bool,
        learn_iterations: int = ITERATIONS,
        alpha: float | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.plans = plans
        self.result = result
        self.sink = sink
        self._plan_of = {plan.name: plan for plan in plans}
        self.runner = BlockRunner(skeleton, self._fetch, device)
        self.scaler = block_scaler(method, self.runner, plans, clip=clip, alpha=alpha)
        self.learned = LearnedRounding(self.runner, learn_iterations) if method.learned else None
        self.float_inputs: BlockInputs | None = None
        self._groups: dict[tuple[tuple[str, ...], ...], tuple[FeedGroup, ...]] = {}

    @torch.no_grad()
    def run(self, ids: Tensor, batch: int, report: Report) -> None:
        """Calibrate on the windows ``ids``, int64 ``[n, length]``, ``batch`` at a time, and put every planned tensor."""
        count = len(self.runner.skeleton.blocks)
        inputs = self.runner.start(ids, batch)
        if self.learned or self._asymmetric(self.plans):
            self.float_inputs = self._float_start(ids, batch, inputs)
        pending = list(self.plans)
        for index in range(count):
            prefix = f"{self.runner.skeleton.blocks_name}.{index}."
            while pending and not pending[0].name.startswith(prefix):
                put_alone(self.checkpoint, pending.pop(0), self.sink)
            mine = [plan for plan in pending if plan.name.startswith(prefix)]
            pending = pending[len(mine) :]
            inputs = self._block(index, prefix, mine, inputs, last=index == count - 1)
            report(index + 1, count)
        for plan in pending:
            put_alone(self.checkpoint, plan, self.sink)

    def _float_start(self, ids: Tensor, batch: int, inputs: BlockInputs) -> BlockInputs:
        """The hidden states that the float model starts from: ``inputs``, unless what makes them is stored with other values."""
        inner = f"{self.runner.skeleton.blocks_name}."
        outer = [plan for plan in self.plans if not plan.name.startswith(inner)]
        if all(isinstance(plan.fate, Keep) and plan.fate.dtype is None for plan in outer if not is_head(plan.module)):
            return inputs
        return BlockRunner(self.runner.skeleton, self.checkpoint.tensor, self.runner.device).start(ids, batch)

    def _fetch(self, name: str) -> Tensor:
        """What the running model computes with: kept tensors as they are stored, a quantised table as it will be read back."""
        plan = self._plan_of.get(name)
        if plan is None:
            return self.checkpoint.tensor(name)
        if isinstance(plan.fate, Quantise) and is_table(plan.module):
            return round_alone(self.checkpoint, plan)[1].qtensor.dequantise()
        return stored_values(self.checkpoint, plan)

    def _block(self, index: int, prefix: str, plans: Sequence[TensorPlan], inputs: BlockInputs, *, last: bool) -> BlockInputs:
        runner = self.runner
        names = runner.block_parameters(index)
        runner.load(names)
        fates = {plan.name.removeprefix(prefix): plan.fate for plan in plans if isinstance(plan.fate, Quantise)}
        dtypes: dict[str, torch.dtype] = {
            plan.name.removeprefix(prefix): getattr(torch, TORCH_DTYPES[plan.stored_dtype]) for plan in plans
        }
        groups = self._graph(index, inputs)
        scaled = self.scaler.scale(index, inputs, groups, {name: fate.scheme for name, fate in fates.items()}, dtypes)
        self.result.notes += scaled.notes
        floats = self.float_inputs
        target = self._advance_floats(index, last=last)
        outcomes = self._codes(index, prefix, (inputs, floats), groups, scaled, fates)
        if self.learned is not None and target is not None and outcomes:
            outcomes, note = self.learned.refine(index, inputs, target, outcomes, scaled.weights)
            self.result.notes.append(note)
        for plan in plans:
            name = plan.name.removeprefix(prefix)
            if name in outcomes:
                self.sink.quantised(plan, outcomes[name].qtensor, scaled.weights[name], outcomes[name].notes)
            elif name in scaled.folded:
                self.sink.kept(plan, scaled.weights[name], folded=True)
            else:
                self.sink.kept(plan, stored_values(self.checkpoint, plan))
        after = inputs if last else runner.advance(index, inputs)
        runner.skeleton.clear(names)
        return after

    def _asymmetric(self, plans: Sequence[TensorPlan]) -> bool:
        fates = {plan.fate for plan in plans if isinstance(plan.fate, Quantise)}
        return any(Need.CROSS in get_quantizer(fate.quantizer, fate.options).needs for fate in fates)

    def _advance_floats(self, index: int, *, last: bool) -> Target | None:
        """Let the float stream go on through block ``index``, loaded in float; returns the target of learned rounding."""
        if self.float_inputs is None or (last and self.learned is None):
            return None
        self.float_inputs = self.runner.advance(index, self.float_inputs)
        return Target.of(self.float_inputs.hidden) if self.learned is not None else None

    def _codes(
        self,
        index: int,
        prefix: str,
        streams: tuple[BlockInputs, BlockInputs | None],
        groups: Sequence[FeedGroup],
        scaled: ScaledBlock,
        fates: Mapping[str, Quantise],
    ) -> dict[str, Outcome]:
        """Codes of every quantised matrix of the block; on return the runner holds what the codes mean.

        ``streams`` are the hidden states before the block in the quantised model and, where it is needed, in the float model.
        """
        outcomes: dict[str, Outcome] = {}
        ranges = FamilyRanges(lambda name: scaled.weights[name.removeprefix(prefix)])
        now = dict(scaled.weights)
        for stage in stages(groups):
            quantised = {group: [f"{name}.weight" for name in group.consumers if f"{name}.weight" in fates] for group in stage}
            evidence = self._evidence(
                index, [group for group in stage if quantised[group]], streams, (now, scaled.weights), fates
            )
            for group, names in quantised.items():
                found = evidence.get(group.consumers[0])
                for name in names:
                    plan = self._plan_of[prefix + name]
                    outcomes[name] = self._code(plan, scaled.weights[name], found, scaled.shrink.get(name), ranges.largest(plan))
                    if name.removesuffix(".weight") in scaled.unreached and found is None:
                        self.result.notes.append(Note("no-evidence", f"{prefix}{name}: no token reached it: rounded to nearest"))
                    now[name] = outcomes[name].qtensor.dequantise()
                    self.runner.skeleton.set(prefix + name, now[name])
        missed = sorted(set(fates) - set(outcomes))
        if missed:
            raise SourceError(
                f"{prefix}{missed[0]} and {len(missed) - 1} more matrices never ran on the calibration windows: keep them in "
                "float with a recipe rule, or use rtn"
            )
        return outcomes

    def _evidence(
        self,
        index: int,
        groups: Sequence[FeedGroup],
        streams: tuple[BlockInputs, BlockInputs | None],
        weights: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
        fates: Mapping[str, Quantise],
    ) -> dict[str, Evidence]:
        """What the quantisers of these groups need to know of their inputs, by first consumer."""
        matrices = [f"{name}.weight" for group in groups for name in group.consumers if f"{name}.weight" in fates]
        needs = {need for name in matrices for need in get_quantizer(fates[name].quantizer, fates[name].options).needs}
        if Need.CROSS in needs and streams[1] is not None:
            pair, first = (streams[0], streams[1]), groups[0].consumers[0]
            return {first: self.runner.gather_pair(index, first, pair, weights)}
        return gather_groups(self.runner, index, groups, streams[0]) if needs else {}

    def _code(
        self, plan: TensorPlan, matrix: Tensor, evidence: Evidence | None, shrink: Tensor | None, largest: float | None
    ) -> Outcome:
        fate = plan.fate
        assert isinstance(fate, Quantise)
        with naming(plan.name):
            if fate.mse:
                shrink = search_shrink(matrix, fate.scheme, largest)
            outcome = get_quantizer(fate.quantizer, fate.options)(matrix, fate.scheme, evidence, shrink, largest)
        self.result.notes += [Note(note.kind, f"{plan.name}: {note.text}") for note in outcome.notes]
        return outcome

    def _graph(self, index: int, inputs: BlockInputs) -> tuple[FeedGroup, ...]:
        """Who feeds whom, traced once for every kind of block (blocks with the same parameters are of one kind)."""
        prefix = f"{self.runner.skeleton.blocks_name}.{index}."
        kind = tuple(
            (name.removeprefix(prefix), *map(str, self.runner.skeleton.get(name).shape))
            for name in self.runner.block_parameters(index)
        )
        if kind not in self._groups:
            sample = inputs.sample(self.runner.SAMPLE)
            self._groups[kind] = trace_groups(self.runner.block(index), lambda: self.runner.forward(index, sample, inputs))
        return self._groups[kind]
