"""Quantise a checkpoint by its plan into a writer: data-free tensor by tensor, or calibrated block by block.

Both drivers put every planned tensor exactly once, in the planned order, and return one ``TensorRecord`` each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

import torch
from torch import Tensor

from calib.awq import AwqBlock, ScaledBlock, naming
from calib.capture import BlockInputs, BlockRunner
from calib.graph import FeedGroup, trace_groups
from formats.checkpoint import TORCH_DTYPES, Checkpoint
from formats.codec import get_codec
from formats.engine_config import kept_linears
from formats.fates import Alias, Keep, Quantise, TensorPlan
from formats.records import PartRecord, Role, TensorRecord, stored_bits_per_weight
from formats.skeleton import Skeleton
from formats.writer import ShardedWriter
from quant.errors import SourceError
from quant.qtensor import QTensor
from quant.quantizer import Note, get_quantizer
from quant.quantizers.rtn import round_to_nearest
from quant.scheme import Scheme

Report = Callable[[int, int], None]
FateName = Literal["quantised", "kept", "folded", "alias"]


@dataclass
class Quantised:
    """What a driver produced: a record per source tensor, and the notes of the run (where, kind, text)."""

    records: list[TensorRecord] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)


class TensorSink:
    """Packs and writes planned tensors in order, and keeps their records."""

    def __init__(self, writer: ShardedWriter, result: Quantised, plans: Sequence[TensorPlan]) -> None:
        self._writer = writer
        self._result = result
        self._kept_linears = frozenset(kept_linears(plans))
        self._file_of = {tensor.name: shard.name for shard in writer.plans for tensor in shard.tensors}

    def quantised(self, plan: TensorPlan, qtensor: QTensor, reference: Tensor, notes: Sequence[Note] = ()) -> None:
        """Write a quantised matrix. ``reference`` is the float matrix that the codes stand for."""
        assert isinstance(plan.fate, Quantise)
        parts = get_codec(plan.fate.codec).pack(qtensor)
        for spec in plan.stored:
            self._writer.put(spec.name, parts[spec.name.rpartition(".")[2]])
        # Summed in float64: the squares of finite weights need not be finite in float32.
        change = _norm(qtensor.dequantise() - reference) / max(_norm(reference), 1e-300)
        self._add(plan, "quantised", relative_error=change, notes=[note.text for note in notes])

    def kept(self, plan: TensorPlan, value: Tensor, folded: bool = False) -> None:
        reason = plan.fate.reason if isinstance(plan.fate, Keep) else ""
        if folded:
            dtype: torch.dtype = getattr(torch, TORCH_DTYPES[plan.info.dtype])
            value, reason = value.to(dtype), "takes the scaling factors of the matrices that read its output"
        self._writer.put(plan.name, value.contiguous())
        self._add(plan, "folded" if folded else "kept", reason=reason)

    def alias(self, plan: TensorPlan) -> None:
        self._add(plan, "alias", reason="tied: the same bytes are stored once")

    def _add(
        self, plan: TensorPlan, fate: FateName, reason: str = "", relative_error: float | None = None, notes: Sequence[str] = ()
    ) -> None:
        parts = [
            PartRecord(
                name=spec.name,
                file=self._file_of[spec.name],
                dtype=spec.dtype,
                shape=list(spec.shape),
                nbytes=spec.nbytes,
                role=cast(Role, spec.role),
            )
            for spec in plan.stored
        ]
        quantise = plan.fate if isinstance(plan.fate, Quantise) else None
        elements = plan.info.elements
        self._result.records.append(
            TensorRecord(
                name=plan.name,
                dtype=plan.info.dtype,
                shape=list(plan.info.shape),
                fate=fate,
                module_class="Linear" if quantise or plan.module in self._kept_linears else None,
                scheme=str(quantise.scheme) if quantise else None,
                codec=quantise.codec if quantise else None,
                alias_of=plan.fate.of if isinstance(plan.fate, Alias) else None,
                reason=reason,
                parts=parts,
                nbytes=sum(part.nbytes for part in parts),
                bits_per_weight=stored_bits_per_weight(parts, elements) if quantise else None,
                relative_error=relative_error,
                notes=list(notes),
            )
        )


def _norm(matrix: Tensor) -> float:
    return float(torch.linalg.vector_norm(matrix, dtype=torch.float64))


@torch.no_grad()
def quantise_without_data(
    checkpoint: Checkpoint, plans: Sequence[TensorPlan], writer: ShardedWriter, report: Report
) -> Quantised:
    """Stream every tensor through its fate; one tensor is in memory at a time."""
    result = Quantised()
    sink = TensorSink(writer, result, plans)
    for done, plan in enumerate(plans, start=1):
        _put_alone(checkpoint, plan, sink)
        report(done, len(plans))
    return result


def _put_alone(checkpoint: Checkpoint, plan: TensorPlan, sink: TensorSink) -> None:
    if isinstance(plan.fate, Alias):
        sink.alias(plan)
    elif isinstance(plan.fate, Keep):
        sink.kept(plan, checkpoint.tensor(plan.name))
    else:
        matrix = checkpoint.tensor(plan.name).float()
        with naming(plan.name):
            outcome = get_quantizer(plan.fate.quantizer)(matrix, plan.fate.scheme, None)
        sink.quantised(plan, outcome.qtensor, matrix, outcome.notes)


def check_architecture(skeleton: Skeleton, plans: Sequence[TensorPlan]) -> None:
    """Raise SourceError unless every planned matrix is the weight of a Linear module and every parameter is stored or tied."""
    wrong = []
    for plan in plans:
        if isinstance(plan.fate, Quantise):
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
    stored = {plan.name for plan in plans}
    missing = [name for name in skeleton.parameter_names() if name not in stored]
    head = skeleton.model.get_output_embeddings()
    tied = bool(skeleton.model.config.tie_word_embeddings)
    absent = [name for name in missing if not (tied and head is not None and skeleton.get(name) is head.weight)]
    if absent:
        raise SourceError(
            f"the checkpoint lacks {len(absent)} parameters of {type(skeleton.model).__name__}, the first is {absent[0]}"
        )


class BlockwiseDriver:
    """Calibrates and quantises block by block; what lies before and after the blocks is streamed.

    Args:
        ids: calibration windows, int64 ``[n, length]``.
        batch: windows per forward pass.
        clip: search the clipping of the grids.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        plans: Sequence[TensorPlan],
        writer: ShardedWriter,
        skeleton: Skeleton,
        *,
        device: str,
        clip: bool,
    ) -> None:
        self.checkpoint = checkpoint
        self.plans = plans
        self.result = Quantised()
        self.sink = TensorSink(writer, self.result, plans)
        self.runner = BlockRunner(skeleton, checkpoint.tensor, device)
        self.awq = AwqBlock(self.runner, clip=clip)
        self._groups: dict[tuple[tuple[str, ...], ...], tuple[FeedGroup, ...]] = {}

    @torch.no_grad()
    def run(self, ids: Tensor, batch: int, report: Report) -> Quantised:
        """Calibrate on ``ids`` and put every planned tensor."""
        count = len(self.runner.skeleton.blocks)
        inputs = self.runner.start(ids, batch)
        pending = list(self.plans)
        for index in range(count):
            prefix = f"{self.runner.skeleton.blocks_name}.{index}."
            while pending and not pending[0].name.startswith(prefix):
                _put_alone(self.checkpoint, pending.pop(0), self.sink)
            mine = [plan for plan in pending if plan.name.startswith(prefix)]
            pending = pending[len(mine) :]
            inputs = self._block(index, prefix, mine, inputs, last=index == count - 1)
            report(index + 1, count)
        for plan in pending:
            _put_alone(self.checkpoint, plan, self.sink)
        return self.result

    def _block(self, index: int, prefix: str, plans: Sequence[TensorPlan], inputs: BlockInputs, *, last: bool) -> BlockInputs:
        runner = self.runner
        names = runner.block_parameters(index)
        runner.load(names)
        schemes = {plan.name.removeprefix(prefix): plan.fate.scheme for plan in plans if isinstance(plan.fate, Quantise)}
        dtypes: dict[str, torch.dtype] = {
            plan.name.removeprefix(prefix): getattr(torch, TORCH_DTYPES[plan.info.dtype]) for plan in plans
        }
        scaled = self.awq.scale(index, inputs, self._graph(index, inputs), schemes, dtypes)
        self.result.notes += scaled.notes
        for plan in plans:
            self._put(plan, plan.name.removeprefix(prefix), scaled, schemes)
        after = inputs if last else runner.advance(index, inputs)
        runner.skeleton.clear(names)
        return after

    def _put(self, plan: TensorPlan, name: str, scaled: ScaledBlock, schemes: Mapping[str, Scheme]) -> None:
        if name in schemes:
            value = scaled.weights[name]
            with naming(plan.name):
                qtensor = round_to_nearest(value, schemes[name], scaled.shrink.get(name))
            self.sink.quantised(plan, qtensor, value)
            self.runner.skeleton.set(plan.name, qtensor.dequantise())
        elif name in scaled.folded:
            self.sink.kept(plan, scaled.weights[name], folded=True)
        else:
            self.sink.kept(plan, self.checkpoint.tensor(plan.name))

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
