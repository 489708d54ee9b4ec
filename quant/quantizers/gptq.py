"""GPTQ (Frantar et al. 2022): round column by column and let the columns to come make up for the error.

With H = X^T X over the calibration tokens, rounding column q of W costs (w_q - round(w_q))^2 / [H^-1]_qq in output error, and
the best answer of the remaining columns is a step along row q of H^-1. The upper Cholesky factor U of H^-1 (H^-1 = U^T U)
holds all these rows for the shrinking inverse at once. Columns are taken in the order of falling diagonal of H; the grid is
that of the original weights ("static"), so that groups stay contiguous whatever the order. The factor is float64.

Dead channels (no activation) get diagonal 1 and are rounded plainly. Damping starts at 1 % of the mean diagonal, with an
absolute floor, and grows tenfold a bounded number of times; where even that fails, the matrix is rounded to nearest. Each
departure is a note.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quant.errors import UsageError
from quant.qtensor import QTensor
from quant.quantizer import InputStatistics, Need, Note, Outcome
from quant.quantizers.rtn import round_to_nearest
from quant.scales import block_range, scales_from_range
from quant.scheme import Scheme

DAMPING = 0.01
DAMPING_FLOOR = 1e-12
DAMPING_TRIES = 5
COLUMNS_AT_ONCE = 128


@dataclass(frozen=True, slots=True)
class Gptq:
    """The quantiser. ``order``: take columns by falling activation energy; ``damping`` is a share of the mean diagonal of H."""

    order: bool = True
    damping: float = DAMPING
    needs: frozenset[Need] = frozenset({Need.GRAM})

    def __call__(self, matrix: Tensor, scheme: Scheme, evidence: InputStatistics | None, shrink: Tensor | None = None) -> Outcome:
        """Quantise ``[out, in]`` against the inputs that ``evidence`` saw.

        Args:
            shrink: optional factors in (0, 1] of shape ``scheme.block_grid`` for the range of each block's grid.

        Raises:
            UsageError: no evidence at all, which is a defect of the caller. Zero tokens are noted and rounded to nearest.
        """
        if evidence is None:
            raise UsageError("gptq needs calibration evidence; use rtn where there is none")
        matrix = matrix.float()
        if evidence.tokens == 0:
            return Outcome(
                round_to_nearest(matrix, scheme, shrink), (Note("no-evidence", "no token reached it: rounded to nearest"),)
            )
        low, high = block_range(matrix, scheme)
        if shrink is not None:
            low, high = low * shrink, high * shrink
        scales, zeros = scales_from_range(low, high, scheme)
        factor, notes = inverse_factor(evidence.gram, self.order, self.damping)
        if factor is None:
            return Outcome(round_to_nearest(matrix, scheme, shrink), notes)
        codes, values = _compensate(matrix, scheme, scales, zeros, factor)
        codes = codes.to(torch.int8 if scheme.symmetric else torch.uint8)
        return Outcome(QTensor(scheme, codes, scales, zeros), notes, values)


@dataclass(frozen=True, slots=True)
class Factor:
    """Upper Cholesky factor of the inverse of H, float32 ``[in, in]``, for columns in the order ``order`` (int64 ``[in]``)."""

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
                return Factor(upper.float(), order), tuple(notes)
    notes.append(
        Note(
            "not-factored",
            f"H could not be factored with damping up to {damping * 10 ** (DAMPING_TRIES - 1):g}: rounded to nearest",
        )
    )
    return None, tuple(notes)


def _compensate(matrix: Tensor, scheme: Scheme, scales: Tensor, zeros: Tensor | None, factor: Factor) -> tuple[Tensor, Tensor]:
    """Codes (float32 integers) and the values they were rounded from, both ``[out, in]`` in the original order of columns."""
    order, upper = factor.order, factor.upper
    size = scheme.blocks if isinstance(scheme.blocks, int) else matrix.shape[1]
    column = order // size  # the grid that each column belongs to, in working order
    scale = scales.float()[:, column].expand(matrix.shape[0], -1)
    zero = torch.zeros_like(scale) if zeros is None else zeros.float()[:, column].expand(matrix.shape[0], -1)
    work = matrix[:, order].clone()
    codes, values = torch.empty_like(work), torch.empty_like(work)
    for start in range(0, work.shape[1], COLUMNS_AT_ONCE):
        stop = min(start + COLUMNS_AT_ONCE, work.shape[1])
        errors = torch.empty(work.shape[0], stop - start, device=work.device)
        for j in range(start, stop):
            code = (torch.round(work[:, j] / scale[:, j]) + zero[:, j]).clamp_(scheme.code_min, scheme.code_max)
            codes[:, j], values[:, j] = code, work[:, j]
            error = (work[:, j] - (code - zero[:, j]) * scale[:, j]) / upper[j, j]
            work[:, j + 1 : stop] -= error.unsqueeze(1) * upper[j, j + 1 : stop].unsqueeze(0)
            errors[:, j - start] = error
        work[:, stop:] -= errors @ upper[start:stop, stop:]
    back = torch.argsort(order)
    return codes[:, back], values[:, back]


QUANTIZER = Gptq()
