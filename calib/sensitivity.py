"""Sensitivity: how much the output of a decoder block changes when one unit of its matrices is stored in fewer bits.

Blocks are run one at a time in float. A unit is what engines fuse into one matrix (q, k, v; gate, up) or a matrix alone. Its
matrices are rounded to nearest in every candidate width, all others stay float, and the error is the mean over tokens of the
squared change of the block's output relative to the squared size of the float output.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from calib.capture import BlockInputs, BlockRunner
from calib.rounding import Target
from formats.fates import Quantise, TensorPlan
from formats.sizing import WIDTHS, matrix_bytes, units_of
from quant.allocation import Choice, Unit
from quant.quantizers.rtn import round_to_nearest
from quant.scheme import Scheme


@torch.no_grad()
def measure_units(
    runner: BlockRunner, plans: Sequence[TensorPlan], ids: Tensor, batch: int, report: Callable[[int, int], None]
) -> list[Unit]:
    """Units with the bytes and the error of every width, measured on the windows ``ids`` (int64 ``[n, length]``)."""
    inputs = runner.start(ids, batch)
    found: list[Unit] = []
    count = len(runner.skeleton.blocks)
    for index in range(count):
        prefix = f"{runner.skeleton.blocks_name}.{index}."
        names = runner.block_parameters(index)
        runner.load(names)
        after = runner.advance(index, inputs)
        target = Target.of(after.hidden)
        found += [
            Unit(tuple(plan.module for plan in unit), _choices(runner, index, inputs, target, unit))
            for unit in units_of([plan for plan in plans if plan.name.startswith(prefix)])
        ]
        runner.skeleton.clear(names)
        inputs = after
        report(index + 1, count)
    return found


def _choices(
    runner: BlockRunner, index: int, inputs: BlockInputs, target: Target, unit: Sequence[TensorPlan]
) -> tuple[Choice, ...]:
    matrices = {plan.name: runner.skeleton.get(plan.name).data for plan in unit}
    tokens = sum(weight.numel() for weight in target.weights)
    found = []
    for bits in WIDTHS:
        schemes = {plan.name: dataclasses.replace(_scheme(plan), bits=bits) for plan in unit}
        for name, matrix in matrices.items():
            runner.skeleton.set(name, round_to_nearest(matrix, schemes[name]).dequantise())
        error = sum(float(target.error(b, runner.forward(index, h, inputs))) for b, h in enumerate(inputs.hidden))
        size = sum(matrix_bytes(plan, schemes[plan.name]) for plan in unit)
        found.append(Choice(schemes[unit[0].name], size, error / tokens))
    for name, matrix in matrices.items():
        runner.skeleton.set(name, matrix)
    return tuple(found)


def _scheme(plan: TensorPlan) -> Scheme:
    assert isinstance(plan.fate, Quantise)
    return plan.fate.scheme
