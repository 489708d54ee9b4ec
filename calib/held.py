"""What a driver made, held back so that a refinement can change it before anything is written.

Codes and scales are kept (a byte and a few bits a weight), not the float matrices: three sums per block are enough to know the
error of the same codes with other scales.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from calib.quantise import TensorSink, stored_values
from formats.checkpoint import Checkpoint
from formats.fates import TensorPlan
from quant.qtensor import QTensor, block_sums
from quant.quantizer import Note


@dataclass(frozen=True, slots=True)
class BlockFit:
    """Sums over each block (float64, ``scheme.block_grid``) of level x weight and level squared, and the squared norm of W."""

    products: Tensor
    squares: Tensor
    energy: float

    @classmethod
    def of(cls, qtensor: QTensor, reference: Tensor) -> BlockFit:
        levels, weights = qtensor.levels().double(), reference.double()
        return cls(
            block_sums(levels * weights, qtensor.scheme),
            block_sums(levels * levels, qtensor.scheme),
            float((weights * weights).sum()),
        )

    def to(self, device: str) -> BlockFit:
        return BlockFit(self.products.to(device), self.squares.to(device), self.energy)

    def relative_error(self, scales: Tensor) -> float:
        """||W - Q|| / ||W|| of the same codes with ``scales``."""
        s = scales.double()
        left = self.energy - 2 * float((s * self.products).sum()) + float((s * s * self.squares).sum())
        return math.sqrt(max(left, 0.0) / max(self.energy, 1e-300))


@dataclass
class HeldMatrix:
    """A quantised matrix; a refinement replaces ``qtensor`` by one with the same codes."""

    qtensor: QTensor
    fit: BlockFit
    notes: tuple[Note, ...]
    input_scale: Tensor | None = None


@dataclass
class Held:
    """A ``Sink`` that keeps everything, by tensor name.

    Attributes:
        matrices: quantised matrices.
        values: tensors that stay in float with values other than the checkpoint's.
        reasons: why those values changed, for the record.
        order: the plans as they came.
    """

    matrices: dict[str, HeldMatrix] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    order: list[TensorPlan] = field(default_factory=list)

    def quantised(
        self,
        plan: TensorPlan,
        qtensor: QTensor,
        reference: Tensor,
        notes: Sequence[Note] = (),
        input_scale: Tensor | None = None,
    ) -> None:
        self.order.append(plan)
        fit = BlockFit.of(qtensor, reference).to("cpu")
        self.matrices[plan.name] = HeldMatrix(qtensor.to("cpu"), fit, tuple(notes), input_scale)

    def kept(self, plan: TensorPlan, value: Tensor, folded: bool = False) -> None:
        self.order.append(plan)
        if folded:
            self.values[plan.name] = value.detach().cpu().clone()

    def alias(self, plan: TensorPlan) -> None:
        self.order.append(plan)

    @torch.no_grad()
    def write(self, sink: TensorSink, checkpoint: Checkpoint) -> None:
        """Put everything into ``sink`` in the order in which it came; what did not change is read from ``checkpoint``."""
        for plan in self.order:
            held = self.matrices.get(plan.name)
            if held is not None:
                error = held.fit.relative_error(held.qtensor.steps())
                sink.packed(plan, held.qtensor, error, held.notes, held.input_scale)
            elif plan.name in self.values:
                sink.kept(plan, self.values[plan.name], folded=True, **self._why(plan.name))
            elif plan.stored:
                sink.kept(plan, stored_values(checkpoint, plan))
            else:
                sink.alias(plan)

    def _why(self, name: str) -> dict[str, str]:
        return {"why": self.reasons[name]} if name in self.reasons else {}
