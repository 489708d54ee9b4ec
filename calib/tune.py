"""Tuning: train the scales and the norm weights of a quantised model end to end; codes stay as they are.

The loss is the mean KL(float || quantised) over the calibration windows, with Adam, a cosine schedule and clipped gradients. The
float model is a ``Teacher``, streamed once. A part of the windows is held back: what is kept in the end is the state that is best
on them, the untouched one included, so that tuning cannot make the held-back part worse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

from calib.held import Held
from calib.quantise import stored_values
from calib.student import FrozenLinear, ScaledLinear, compute_type
from calib.teacher import Teacher
from formats.checkpoint import TORCH_DTYPES, Checkpoint
from formats.fates import TensorPlan
from formats.skeleton import Skeleton
from quant.quantizer import Note

Report = Callable[[int, int], None]
LEARNING_RATE = 7e-4
BATCH = 4
WARM_UP = 4
HELD_BACK = 8  # every eighth window
LOOKS = 8
BETAS = (0.9, 0.99)
LARGEST_GRADIENT = 1.0
WHY = "trained end to end together with the scales"


@dataclass(frozen=True, slots=True)
class Tuned:
    """Mean KL on the held-back windows before and after, nats per token, and the step that was kept (0: nothing was)."""

    before: float
    after: float
    kept_step: int
    trained: int
    held_back: int

    @property
    def note(self) -> Note:
        text = (
            f"KL on {self.held_back} held-back calibration windows {self.before:.4f} -> {self.after:.4f} nats per token "
            f"(state after step {self.kept_step}, trained on {self.trained} windows)"
        )
        return Note("tuned", text if self.kept_step else f"{text}: no step was better, nothing was changed")


class Student:
    """The quantised model in memory, with a trainable factor per block and trainable norm weights.

    Args:
        skeleton: the model without weights; it belongs to the student from now on.
        dtype: floating type of the matrix products.
    """

    def __init__(self, skeleton: Skeleton, held: Held, source: Checkpoint, *, device: str, dtype: torch.dtype) -> None:
        self.skeleton, self.held, self.device = skeleton, held, device
        self.matrices: dict[str, ScaledLinear] = {}
        self.norms: dict[str, nn.Parameter] = {}
        self._plan_of = {plan.name: plan for plan in held.order}
        for plan in held.order:
            if plan.stored:
                self._place(plan, source, dtype)
        skeleton.tie()
        self._freeze_linears(dtype)
        for block in skeleton.blocks:
            _recomputed(block)

    def _place(self, plan: TensorPlan, source: Checkpoint, dtype: torch.dtype) -> None:
        matrix = self.held.matrices.get(plan.name)
        parent, _, leaf = plan.module.rpartition(".")
        owner = self.skeleton.model.get_submodule(parent)
        module = getattr(owner, leaf, None)
        if matrix is not None and isinstance(module, nn.Linear):
            bias = None if module.bias is None else self._value(f"{plan.module}.bias", source)
            self.matrices[plan.name] = ScaledLinear(matrix.qtensor, bias, dtype).to(self.device)
            setattr(owner, leaf, self.matrices[plan.name])
            return
        if plan.name.endswith(".bias") and plan.name.removesuffix(".bias") + ".weight" in self.held.matrices:
            return  # it went into the matrix
        value = self._value(plan.name, source) if matrix is None else matrix.qtensor.dequantise()
        self.skeleton.set(plan.name, value.to(self.device, torch.float32))
        if value.ndim == 1 and plan.name.endswith(".weight"):
            parameter = self.skeleton.model.get_parameter(plan.name)
            parameter.requires_grad_(True)
            self.norms[plan.name] = parameter

    def _value(self, name: str, source: Checkpoint) -> Tensor:
        return self.held.values[name] if name in self.held.values else stored_values(source, self._plan_of[name]).float()

    def _freeze_linears(self, dtype: torch.dtype) -> None:
        for name, module in list(self.skeleton.model.named_modules()):
            if isinstance(module, nn.Linear) and not module.weight.is_meta:
                parent, _, leaf = name.rpartition(".")
                setattr(self.skeleton.model.get_submodule(parent), leaf, FrozenLinear(module, dtype))

    def logits(self, ids: Tensor) -> Tensor:
        """``[1, length, vocabulary]`` of one window ``[1, length]``."""
        found: Tensor = self.skeleton.model(input_ids=ids.to(self.device), use_cache=False).logits
        return found

    def groups(self, learning_rate: float) -> list[dict[str, Any]]:
        """Parameter groups: factors are relative already; a norm weight's steps are relative to its mean magnitude."""
        factors = [matrix.factor for matrix in self.matrices.values() if matrix.factor.requires_grad]
        found: list[dict[str, Any]] = [{"params": factors, "lr": learning_rate}] if factors else []
        for parameter in self.norms.values():
            size = float(parameter.detach().abs().mean())
            found.append({"params": [parameter], "lr": learning_rate * (size or 1.0)})
        return found

    def parameters(self) -> list[nn.Parameter]:
        return [matrix.factor for matrix in self.matrices.values() if matrix.factor.requires_grad] + list(self.norms.values())

    def hand_back(self, dtypes: Mapping[str, torch.dtype]) -> None:
        """Put the scales and norm weights of now into what was held."""
        for name, matrix in self.matrices.items():
            self.held.matrices[name].qtensor = matrix.trained()
        for name, parameter in self.norms.items():
            self.held.values[name] = parameter.detach().cpu().to(dtypes[name]).float()
            self.held.reasons[name] = WHY


def _recomputed(block: nn.Module) -> None:
    """Keep only the block's input while gradients are taken; what is inside is computed again on the way back."""
    plain = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        return recompute(plain, *args, use_reentrant=False, **kwargs)

    block.forward = forward


def divergence(teacher: Tensor, student: Tensor, chunk: int = 256) -> tuple[float, Tensor]:
    """Summed KL(teacher || student) of logits ``[length, vocabulary]`` in nats, and its gradient for the student's logits.

    Worked in chunks of positions: softmax(student) - softmax(teacher) is written into one buffer.
    """
    total = 0.0
    gradient = torch.empty_like(student)
    for start in range(0, len(student), chunk):
        rows = slice(start, start + chunk)
        wanted, found = teacher[rows].log_softmax(-1), student[rows].float().log_softmax(-1)
        probability = wanted.exp()
        total += float((probability * (wanted - found)).sum())
        gradient[rows] = found.exp_().sub_(probability).to(gradient.dtype)
    return total, gradient


def split(ids: Tensor) -> tuple[Tensor, Tensor]:
    """(windows to train on, windows held back) of ``[n, length]``, n >= 2: every eighth is held back, at least one."""
    count = len(ids)
    held = [index for index in range(count) if index % HELD_BACK == HELD_BACK - 1] or [count - 1]
    return ids[[index for index in range(count) if index not in set(held)]], ids[held]


def tune(
    held: Held,
    source: Checkpoint,
    training: Tensor,
    held_back: Tensor,
    *,
    steps: int,
    seed: int,
    device: str,
    batch: int,
    learning_rate: float = LEARNING_RATE,
    report: Report,
) -> Tuned:
    """Train what ``held`` holds on ``training`` and put the state that is best on ``held_back`` into it.

    Args:
        training, held_back: windows, int64 ``[n, length]``. Whoever made the codes should not have seen the second.
    """
    ids = torch.cat([training, held_back])
    back = list(range(len(training), len(ids)))
    teacher = Teacher(Skeleton(source.folder), source.tensor, ids, batch=batch, device=device)
    student = Student(Skeleton(source.folder), held, source, device=device, dtype=compute_type(device))
    looks = sorted({round(steps * (look + 1) / LOOKS) for look in range(LOOKS)} - {0})
    before = best = _mean_divergence(teacher, student, back)
    kept_step, kept = 0, [parameter.detach().clone() for parameter in student.parameters()]
    optimiser = torch.optim.Adam(student.groups(learning_rate), betas=BETAS)
    peaks = [group["lr"] for group in optimiser.param_groups]
    for step, chosen in enumerate(_batches(list(range(len(training))), steps, seed)):
        share = min(1.0, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group, peak in zip(optimiser.param_groups, peaks, strict=True):
            group["lr"] = peak * share
        _step(teacher, student, optimiser, chosen)
        if step + 1 in looks:
            now = _mean_divergence(teacher, student, back)
            if now < best:
                best, kept_step = now, step + 1
                kept = [parameter.detach().clone() for parameter in student.parameters()]
        report(step + 1, steps)
    with torch.no_grad():
        for parameter, value in zip(student.parameters(), kept, strict=True):
            parameter.copy_(value)
    if kept_step:
        student.hand_back({plan.name: _dtype(plan) for plan in held.order})
    return Tuned(before, best, kept_step, len(training), len(held_back))


def _dtype(plan: TensorPlan) -> torch.dtype:
    found: torch.dtype = getattr(torch, TORCH_DTYPES[plan.stored_dtype])
    return found


def _batches(windows: Sequence[int], steps: int, seed: int) -> list[list[int]]:
    """Windows of every step: each is used once before any is used again."""
    generator = torch.Generator().manual_seed(seed)
    size = min(BATCH, len(windows))
    left: list[int] = []
    found = []
    for _ in range(steps):
        if len(left) < size:
            left += [windows[i] for i in torch.randperm(len(windows), generator=generator).tolist()]
        found.append(left[:size])
        left = left[size:]
    return found


def _step(teacher: Teacher, student: Student, optimiser: torch.optim.Optimizer, chosen: Sequence[int]) -> None:
    optimiser.zero_grad(set_to_none=True)
    for index in chosen:
        logits = student.logits(teacher.ids[index : index + 1])[0]
        _, gradient = divergence(teacher.logits(index), logits.detach())
        torch.autograd.backward(logits, gradient / (len(gradient) * len(chosen)))
    nn.utils.clip_grad_norm_(student.parameters(), LARGEST_GRADIENT)
    optimiser.step()


@torch.no_grad()
def _mean_divergence(teacher: Teacher, student: Student, windows: Sequence[int]) -> float:
    total = sum(divergence(teacher.logits(i), student.logits(teacher.ids[i : i + 1])[0])[0] for i in windows)
    return total / (len(windows) * teacher.ids.shape[1])
