"""Quantise a checkpoint by its plan into a writer, tensor by tensor and without data; ``calib.blockwise`` does it with data.

Both drivers put every planned tensor exactly once, in the planned order, and keep one ``TensorRecord`` each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, cast

import torch
from torch import Tensor

from calib.naming import naming
from formats.checkpoint import TORCH_DTYPES, Checkpoint
from formats.codec import get_codec
from formats.engine_config import kept_linears
from formats.fates import Alias, Keep, Quantise, TensorPlan
from formats.records import PartRecord, Role, TensorRecord, stored_bits_per_weight
from formats.tables import is_table
from formats.writer import ShardedWriter
from quant.errors import SchemeError
from quant.qtensor import QTensor
from quant.quantizer import Note, Outcome, get_quantizer
from quant.shrink import search_shrink

Report = Callable[[int, int], None]
FateName = Literal["quantised", "kept", "folded", "alias"]


@dataclass
class Quantised:
    """What a driver produced: a record per source tensor, and the notes of the run (where, kind, text)."""

    records: list[TensorRecord] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)


class Sink(Protocol):
    """Where a driver puts what became of every planned tensor, in the planned order."""

    def quantised(self, plan: TensorPlan, qtensor: QTensor, reference: Tensor, notes: Sequence[Note] = ()) -> None: ...
    def kept(self, plan: TensorPlan, value: Tensor, folded: bool = False) -> None: ...
    def alias(self, plan: TensorPlan) -> None: ...


class TensorSink:
    """Packs and writes planned tensors in order, and keeps their records."""

    def __init__(self, writer: ShardedWriter, result: Quantised, plans: Sequence[TensorPlan]) -> None:
        self._writer = writer
        self._result = result
        self._kept_linears = frozenset(kept_linears(plans))
        self._file_of = {tensor.name: shard.name for shard in writer.plans for tensor in shard.tensors}

    def quantised(self, plan: TensorPlan, qtensor: QTensor, reference: Tensor, notes: Sequence[Note] = ()) -> None:
        """Write a quantised matrix. ``reference`` is the float matrix that the codes stand for."""
        # Summed in float64: the squares of finite weights need not be finite in float32.
        change = _norm(qtensor.dequantise() - reference) / max(_norm(reference), 1e-300)
        self.packed(plan, qtensor, change, notes)

    def packed(self, plan: TensorPlan, qtensor: QTensor, relative_error: float, notes: Sequence[Note] = ()) -> None:
        """Write a quantised matrix whose error against its float matrix is known."""
        assert isinstance(plan.fate, Quantise)
        parts = get_codec(plan.fate.codec).pack(qtensor.to("cpu"))
        for spec in plan.stored:
            self._writer.put(spec.name, parts[spec.name.rpartition(".")[2]])
        self._add(plan, "quantised", relative_error=relative_error, notes=[note.text for note in notes])

    def kept(
        self,
        plan: TensorPlan,
        value: Tensor,
        folded: bool = False,
        why: str = "takes the scaling factors of what reads its output",
    ) -> None:
        """Write a tensor that stays in float; ``folded`` says that its values changed, and ``why``."""
        reason = plan.fate.reason if isinstance(plan.fate, Keep) else ""
        if folded:
            dtype: torch.dtype = getattr(torch, TORCH_DTYPES[plan.stored_dtype])
            value, reason = value.to(dtype), why
        self._writer.put(plan.name, value.cpu().contiguous())
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
                module_class=self._module_class(plan),
                scheme=str(quantise.scheme) if quantise else None,
                quantizer=quantise.quantizer if quantise else None,
                codec=quantise.codec if quantise else None,
                activations=_activations(quantise),
                alias_of=plan.fate.of if isinstance(plan.fate, Alias) else None,
                copy_of=plan.copy_of,
                reason=reason,
                parts=parts,
                nbytes=sum(part.nbytes for part in parts),
                bits_per_weight=stored_bits_per_weight(parts, elements) if quantise else None,
                relative_error=relative_error,
                notes=[*(text for _, text in plan.notes), *notes],
            )
        )

    def _module_class(self, plan: TensorPlan) -> str | None:
        if isinstance(plan.fate, Quantise):
            return "Embedding" if is_table(plan.module) else "Linear"
        return "Linear" if plan.module in self._kept_linears else None


def stored_values(checkpoint: Checkpoint, plan: TensorPlan) -> Tensor:
    """The source's values of a tensor, in the type in which it is stored if it is kept.

    Raises:
        SchemeError: a finite value that the storage type cannot hold.
    """
    value = checkpoint.tensor(plan.source_name)
    if not isinstance(plan.fate, Keep) or plan.fate.dtype is None:
        return value
    dtype: torch.dtype = getattr(torch, TORCH_DTYPES[plan.stored_dtype])
    largest = float(value.abs().max()) if value.numel() else 0.0
    if largest > torch.finfo(dtype).max:
        raise SchemeError(
            f"{plan.name}: a value of {largest:g} overflows {plan.stored_dtype}; keep it in its own type, or as bf16"
        )
    return value.to(dtype)


def _activations(fate: Quantise | None) -> str | None:
    found = None if fate is None else get_codec(fate.codec).activations
    return None if found is None else str(found)


def _norm(matrix: Tensor) -> float:
    return float(torch.linalg.vector_norm(matrix, dtype=torch.float64))


@torch.no_grad()
def quantise_without_data(checkpoint: Checkpoint, plans: Sequence[TensorPlan], sink: Sink, report: Report) -> None:
    """Stream every tensor through its fate; one tensor is in memory at a time."""
    ranges = FamilyRanges(lambda name: checkpoint.tensor(name).float())
    for done, plan in enumerate(plans, start=1):
        put_alone(checkpoint, plan, sink, ranges)
        report(done, len(plans))


class FamilyRanges:
    """Largest magnitudes of families of tensors that share one tensor-level scale, each looked for once.

    Args:
        fetch: the float matrix of a name, as it will be quantised.
    """

    def __init__(self, fetch: Callable[[str], Tensor]) -> None:
        self._fetch = fetch
        self._known: dict[tuple[str, ...], float] = {}

    def largest(self, plan: TensorPlan) -> float | None:
        """Of the plan's family, or None where it has none."""
        if plan.family and plan.family not in self._known:
            self._known[plan.family] = max(float(self._fetch(name).abs().max()) for name in plan.family)
        return self._known.get(plan.family)


def put_alone(checkpoint: Checkpoint, plan: TensorPlan, sink: Sink, ranges: FamilyRanges | None = None) -> None:
    if isinstance(plan.fate, Alias):
        sink.alias(plan)
    elif isinstance(plan.fate, Keep):
        sink.kept(plan, stored_values(checkpoint, plan))
    else:
        matrix, outcome = round_alone(checkpoint, plan, None if ranges is None else ranges.largest(plan))
        sink.quantised(plan, outcome.qtensor, matrix, outcome.notes)


def round_alone(checkpoint: Checkpoint, plan: TensorPlan, largest: float | None = None) -> tuple[Tensor, Outcome]:
    """The float32 matrix of a plan that is quantised without data, and what became of it."""
    assert isinstance(plan.fate, Quantise)
    matrix = checkpoint.tensor(plan.source_name).float()
    with naming(plan.name):
        shrink = search_shrink(matrix, plan.fate.scheme, largest) if plan.fate.mse else None
        return matrix, get_quantizer(plan.fate.quantizer, plan.fate.options)(matrix, plan.fate.scheme, None, shrink, largest)
