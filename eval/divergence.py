"""Divergence of a quantised model from its float model on fixed windows: KL(float || quantised) and agreement of the best token.

Every position of a window counts, the last one too: no label is needed. Logits of one window at a time are in memory. Sums are
float64; a position without a finite divergence is counted and left out of the sums, never hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from calib.windows import Windows

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Divergence:
    """Per window ``[n]``: summed KL in nats, positions with the same best token, positions; and how many were not finite."""

    nats: NDArray[np.float64]
    agreeing: NDArray[np.int64]
    positions: NDArray[np.int64]
    nonfinite: int = 0

    @property
    def mean_nats(self) -> float:
        """Mean KL per position over the positions with a finite one; infinite when there is none."""
        count = int(self.positions.sum()) - self.nonfinite
        return float(self.nats.sum()) / count if count else float("inf")

    @property
    def top1(self) -> float:
        """Share of positions at which both models have the same best token."""
        return float(self.agreeing.sum()) / float(self.positions.sum())


def window_divergence(reference: Any, model: Any, windows: Windows, progress: Progress | None = None) -> Divergence:
    """KL(reference || model) on every window (a short tail is left out).

    Args:
        reference: the float model, called as ``model(ids, use_cache=False).logits``; both models are in evaluation mode.
        model: the quantised model, with the same vocabulary.
    """
    import torch

    nats, agreeing, positions, nonfinite = [], [], [], 0
    ids = torch.from_numpy(windows.ids.copy())
    with torch.inference_mode():
        for done, row in enumerate(torch.split(ids, 1), start=1):
            wanted, found = (m(row, use_cache=False).logits[0].float().log_softmax(-1) for m in (reference, model))
            each = (wanted.exp() * (wanted - found)).sum(-1, dtype=torch.float64)
            finite = torch.isfinite(each)
            nats.append(float(each[finite].sum()))
            agreeing.append(int((wanted.argmax(-1) == found.argmax(-1)).sum()))
            positions.append(len(each))
            nonfinite += int((~finite).sum())
            if progress is not None:
                progress(done, len(ids))
    return Divergence(np.array(nats), np.array(agreeing), np.array(positions), nonfinite)
