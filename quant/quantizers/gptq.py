"""GPTQ (Frantar et al. 2022): round column by column and let the columns to come make up for the error.

With H = X^T X over the calibration tokens, rounding column q of W costs (w_q - round(w_q))^2 / [H^-1]_qq in output error, and
the best answer of the remaining columns is a step along row q of H^-1. The upper Cholesky factor U of H^-1 (H^-1 = U^T U)
holds all these rows for the shrinking inverse at once. The factor is float64.

=============  ======================================================================================================
option         values
=============  ======================================================================================================
order          ``energy``: columns by falling diagonal of H ("act-order"); ``none``: as they stand
scale_policy   ``static``: grids of the original weights, so that groups stay contiguous in memory whatever the order;
               ``updated``: a group's grid comes from its half-updated weights when its first column is due (only with
               order ``none``)
damping        share of the mean diagonal that is added to it
asymmetric     0 to 1: also make up for what earlier layers did to the inputs, see below
=============  ======================================================================================================

Asymmetric calibration (Li et al. 2025, GPTAQ) aims at W X_float, not at W X, with X the inputs in the quantised model and X_float
those in the float model. With C = (X_float - X) X^T, column q adds w_q P_q to the columns after it, P_q = C_q,>q H_>q^-1, where
w_q is its value before rounding; all rows at once are P = triu(C U^T, 1) U. Its share is ``asymmetric``: 1 is the formula as
derived, the authors' program uses 0.25.

Dead channels (no activation) get diagonal 1 and are rounded plainly. Damping has an absolute floor, and grows tenfold a bounded
number of times; where even that fails, the matrix is rounded to nearest. Each departure is a note.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quant.errors import UsageError
from quant.grid import snap, to_codes
from quant.quantizer import InputStatistics, Need, Note, Outcome
from quant.quantizers.rtn import round_to_nearest
from quant.scales import BlockGrid, block_range, scales_from_range
from quant.scheme import Scheme

DAMPING = 0.01
DAMPING_FLOOR = 1e-12
DAMPING_TRIES = 5
COLUMNS_AT_ONCE = 128
_LARGEST_EXPONENT = 64


@dataclass(frozen=True, slots=True)
class Gptq:
    """The quantiser; for its options see the module. Raises UsageError for options that contradict each other."""

    order: Literal["energy", "none"] = "energy"
    scale_policy: Literal["static", "updated"] = "static"
    damping: float = DAMPING
    asymmetric: float = 0.0

    def __post_init__(self) -> None:
        if self.scale_policy == "updated" and self.order != "none":
            raise UsageError("gptq: the scale policy updated takes groups as they stand: it needs order none")

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({Need.GRAM, Need.CROSS} if self.asymmetric else {Need.GRAM})

    def __call__(
        self,
        matrix: Tensor,
        scheme: Scheme,
        evidence: InputStatistics | None,
        shrink: Tensor | None = None,
        largest: float | None = None,
    ) -> Outcome:
        """Quantise ``[out, in]`` against the inputs that ``evidence`` saw.

        Args:
            shrink: optional factors in (0, 1] of shape ``scheme.block_grid`` for the range of each block's grid.
            largest: largest magnitude of all matrices that share the tensor-level scale; by default of this one.

        Raises:
            UsageError: evidence that it needs and does not get, a defect of the caller. Zero tokens are noted and rounded to
                nearest.
        """
        if evidence is None or (self.asymmetric and evidence.tokens and evidence.cross is None):
            raise UsageError("gptq needs calibration evidence; use rtn where there is none")
        matrix = matrix.float()
        if evidence.tokens == 0:
            note = Note("no-evidence", "no token reached it: rounded to nearest")
            return Outcome(round_to_nearest(matrix, scheme, shrink, largest), (note,))
        factor, notes = inverse_factor(evidence.gram, self.order == "energy", self.damping)
        if evidence.tokens < matrix.shape[1]:
            text = (
                f"{evidence.tokens} tokens give evidence of rank {evidence.tokens} at most for {matrix.shape[1]} input channels"
            )
            notes = (Note("rank-deficient", text), *notes)
        if factor is None:
            return Outcome(round_to_nearest(matrix, scheme, shrink, largest), notes)
        pull = None if evidence.cross is None or not self.asymmetric else _pull(evidence.cross, factor, self.asymmetric)
        grids = _Grids(BlockGrid.of(matrix, scheme, shrink, largest), matrix.shape[1], shrink, self.scale_policy == "updated")
        snapped, values = _compensate(matrix, grids, factor, pull)
        return Outcome(grids.grid.qtensor(to_codes(snapped, scheme)), notes, values)


@dataclass(frozen=True, slots=True)
class Factor:
    """Upper Cholesky factor of the inverse of H, float64 ``[in, in]``, for columns in the order ``order`` (int64 ``[in]``)."""

    upper: Tensor
    order: Tensor


def inverse_factor(gram: Tensor, by_energy: bool, damping: float) -> tuple[Factor | None, tuple[Note, ...]]:
    """The factor of the damped H, and what had to be done for it; None where no damping made H positive definite."""
    h = gram.double()
    diagonal = torch.diagonal(h)
    notes: list[Note] = []
    dead = diagonal <= 0
    count = int(dead.sum())
    if count:
        notes.append(Note("dead-channels", f"{count} of {len(h)} input channels never carried a value: rounded plainly"))
    h = torch.where(dead.unsqueeze(0) | dead.unsqueeze(1), torch.zeros_like(h), h) + torch.diag(dead.double())
    diagonal = torch.diagonal(h)
    order = torch.argsort(diagonal, descending=True, stable=True) if by_energy else torch.arange(len(h), device=h.device)
    h = h[order][:, order]
    mean = float(diagonal[~dead].mean()) if count < len(h) else 1.0
    for attempt in range(DAMPING_TRIES):
        step = max(damping * 10**attempt * mean, DAMPING_FLOOR)
        lower, failed = torch.linalg.cholesky_ex(h + step * torch.eye(len(h), dtype=h.dtype, device=h.device))
        if int(failed) == 0:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if int(failed) == 0 and bool(torch.isfinite(upper).all()):
                if attempt:
                    notes.append(Note("damping-grown", f"damping {damping * 10**attempt:g} of the mean diagonal was needed"))
                return Factor(upper, order), tuple(notes)
    notes.append(
        Note(
            "not-factored",
            f"H could not be factored with damping up to {damping * 10 ** (DAMPING_TRIES - 1):g}: rounded to nearest",
        )
    )
    return None, tuple(notes)


def _pull(cross: Tensor, factor: Factor, share: float) -> Tensor:
    """Rows P_q for columns in working order, strictly upper triangular, float32 ``[in, in]``."""
    ordered = cross.double()[factor.order][:, factor.order]
    return (share * torch.triu(ordered @ factor.upper.T, 1) @ factor.upper).float()


class _Grids:
    """Stored scales and zero points of a matrix: all from the original weights, or group by group from the weights of now."""

    def __init__(self, grid: BlockGrid, width: int, shrink: Tensor | None, updated: bool) -> None:
        scheme = grid.scheme
        self.grid, self.scheme, self.shrink = grid, scheme, shrink
        self.updated = updated and isinstance(scheme.blocks, int)
        self.size = scheme.blocks if isinstance(scheme.blocks, int) else width

    def starts(self, width: int) -> list[int]:
        """Where a run of columns begins whose columns are updated one by one: at every group too, if groups are looked at."""
        edges = set(range(0, width, COLUMNS_AT_ONCE)) | (set(range(0, width, self.size)) if self.updated else set())
        return sorted(edges)

    def look(self, work: Tensor, unit: float, start: int) -> None:
        """Take the grid of the group that begins at column ``start`` from the weights of now, ``work`` times ``unit``."""
        if not self.updated or start % self.size:
            return
        group = start // self.size
        shrink = None if self.shrink is None else self.shrink[:, group : group + 1]
        low, high = block_range(work[:, start : start + self.size] * unit, self.scheme)
        if shrink is not None:
            low, high = low * shrink, high * shrink
        scales, zeros = scales_from_range(low, high, self.scheme, self.grid.divisor)
        self.grid.scales[:, group : group + 1] = scales
        if zeros is not None and self.grid.zeros is not None:
            self.grid.zeros[:, group : group + 1] = zeros

    def columns(self, order: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Scale and zero point ``[out or 1, stop - start]``, float32, of the columns ``order[start:stop]``."""
        group = order[start:stop] // self.size
        scale = self.grid.steps()[:, group]
        return scale, torch.zeros_like(scale) if self.grid.zeros is None else self.grid.zeros.float()[:, group]


def _compensate(matrix: Tensor, grids: _Grids, factor: Factor, pull: Tensor | None) -> tuple[Tensor, Tensor]:
    """Snapped values (``quant.grid``) and what they were rounded from, ``[out, in]`` each, in the original order of columns."""
    order, upper, scheme = factor.order, factor.upper.float(), grids.scheme
    # Sums of errors of weights near the end of float32's range would overflow: those are worked on in a larger unit, exactly.
    unit = 2.0 ** max(math.frexp(float(matrix.abs().max()))[1] - _LARGEST_EXPONENT, 0)
    work = matrix[:, order] / unit
    snapped, values = torch.empty_like(work), torch.empty_like(work)
    starts = grids.starts(work.shape[1])
    for start, stop in zip(starts, [*starts[1:], work.shape[1]], strict=True):
        grids.look(work, unit, start)
        scale, zero = grids.columns(order, start, stop)
        scale = scale / unit
        errors = torch.empty(work.shape[0], stop - start, device=work.device)
        for j in range(start, stop):
            s, z = scale[:, j - start], zero[:, j - start]
            snapped[:, j] = snap(work[:, j] / s, z, scheme)
            values[:, j] = work[:, j]
            errors[:, j - start] = (work[:, j] - (snapped[:, j] - z) * s) / upper[j, j]
            work[:, j + 1 : stop] -= errors[:, j - start].unsqueeze(1) * upper[j, j + 1 : stop]
            if pull is not None:
                work[:, j + 1 : stop] += values[:, j].unsqueeze(1) * pull[j, j + 1 : stop]
        work[:, stop:] -= errors @ upper[start:stop, stop:]
        if pull is not None:
            work[:, stop:] += values[:, start:stop] @ pull[start:stop, stop:]
    back = torch.argsort(order)
    return snapped[:, back], values[:, back] * unit


QUANTIZER = Gptq()
