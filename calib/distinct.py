"""How many different rows calibration can give a matrix, known from the token ids alone: what bounds the rank of its evidence.

A causal model computes equal hidden states for equal prefixes, so that a window that is repeated, or a beginning that several
windows share, adds no direction to X^T X. No torch is imported here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from formats.fates import Quantise, TensorPlan
from formats.tables import is_head, is_table


@dataclass(frozen=True, slots=True)
class Distinct:
    """Windows and token positions in all, and how many of each differ (a position by everything up to it)."""

    windows: int
    distinct_windows: int
    rows: int
    distinct_rows: int

    @classmethod
    def of(cls, ids: NDArray[np.int64]) -> Distinct:
        """Count the windows ``[n, length]`` and their prefixes."""
        prefixes: set[bytes] = set()
        whole: set[bytes] = set()
        for window in ids:
            digest = hashlib.blake2b(digest_size=16)
            for token in window.tolist():
                digest.update(token.to_bytes(8, "little"))
                prefixes.add(digest.digest())
            whole.add(digest.digest())
        return cls(len(ids), len(whole), int(ids.size), len(prefixes))


def calibration_notes(ids: NDArray[np.int64], plans: Sequence[TensorPlan], more_windows: int = 0) -> list[tuple[str, str]]:
    """(kind, sentence) of repeated windows, and of matrices that are wider than the calibration text can have directions.

    ``more_windows`` of the same length are still to be written by the model itself.
    """
    found = Distinct.of(ids)
    notes = []
    if found.distinct_windows < found.windows:
        notes.append(("calibration", f"only {found.distinct_windows} of {found.windows} calibration windows are distinct"))
    wide = [
        plan
        for plan in plans
        if isinstance(plan.fate, Quantise)
        and not (is_table(plan.module) or is_head(plan.module))
        and plan.matrix_shape[1] > found.distinct_rows + more_windows * ids.shape[1]
    ]
    if wide:
        widest = max(plan.matrix_shape[1] for plan in wide)
        text = (
            f"{found.distinct_rows:,} distinct rows ({found.rows:,} tokens) are fewer than the input channels of {len(wide)} "
            f"matrices (up to {widest:,}): their evidence is rank-deficient; more --calibration-windows give more"
        )
        notes.append(("rank-deficient", text))
    return notes
