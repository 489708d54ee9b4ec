"""Perplexity of a causal language model on fixed windows: nats per window, token weighted.

The convention is that of the windows (by default the source text's lab 4: no overlap, ``length - 1`` predictions in each), and
perplexity is ``exp(total nats / total predictions)``, never a mean over windows. Logits are taken to float32 before the loss; the
sums are float64. A broken model is measured, not hidden: positions without a finite loss are counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quant.errors import CorpusError, UsageError

if TYPE_CHECKING:
    import torch

    from calib.windows import Windows

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class WindowLosses:
    """Losses of one model on a set of windows.

    Attributes:
        nats: ``[n]`` float64, summed negative log-likelihood of the positions with a finite loss, per window.
        scored: ``[n]`` int64, predictions per window, those without a finite loss included.
        nonfinite: predictions over all windows whose loss is NaN or infinite.
        windows_digest: digest of the windows, so that losses on different texts are not subtracted; empty when unknown.
        nonfinite_by_window: ``[n]`` int64, ``nonfinite`` window by window; None when only the sum is known.
    """

    nats: NDArray[np.float64]
    scored: NDArray[np.int64]
    nonfinite: int = 0
    windows_digest: str = ""
    nonfinite_by_window: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        if self.nats.ndim != 1 or self.nats.shape != self.scored.shape:
            raise ValueError(f"nats and scored must be [n] each, got {self.nats.shape} and {self.scored.shape}")
        if not np.isfinite(self.nats).all():
            raise ValueError("nats must be finite: positions without a finite loss are counted in nonfinite, not summed")
        if not len(self.scored) or self.scored.min() < 1:
            raise CorpusError("a window without a prediction cannot be scored: windows need 2 tokens or more")
        if not 0 <= self.nonfinite <= self.scored_tokens:
            raise ValueError(f"nonfinite is {self.nonfinite} of {self.scored_tokens} predictions")
        counts = self.nonfinite_by_window
        if counts is not None and (counts.shape != self.nats.shape or int(counts.sum()) != self.nonfinite):
            raise ValueError(f"nonfinite_by_window must be [n] with the sum {self.nonfinite}, got {counts}")

    @property
    def scored_tokens(self) -> int:
        """Predictions over all windows."""
        return int(self.scored.sum())

    @property
    def mean_nats(self) -> float:
        """Nats per prediction over the positions with a finite loss; infinite when there is none."""
        finite = self.scored_tokens - self.nonfinite
        return float(self.nats.sum()) / finite if finite else math.inf

    @property
    def perplexity(self) -> float:
        """exp(mean nats); infinite when a position has no finite loss or when exp overflows (then ``flag`` says why)."""
        if self.nonfinite:
            return math.inf
        try:
            return math.exp(self.mean_nats)
        except OverflowError:
            return math.inf

    @property
    def flag(self) -> str | None:
        """Why the perplexity is infinite, or None."""
        if self.nonfinite:
            shown = "no finite loss at all" if math.isinf(self.mean_nats) else f"the others lose {self.mean_nats:.6g} nats each"
            return f"{self.nonfinite} of {self.scored_tokens} predictions have no finite loss ({shown})"
        if math.isinf(self.perplexity):
            return f"a loss of {self.mean_nats:.6g} nats per prediction overflows exp"
        return None


def window_losses(model: torch.nn.Module, windows: Windows, *, batch: int = 4, progress: Progress | None = None) -> WindowLosses:
    """Score every window (and the short tail, when there is one) with ``model``, ``batch`` windows at a time.

    Args:
        model: called as ``model(ids [b, t], use_cache=False).logits [b, t, vocabulary]``; scored in evaluation mode, then left
            in the mode it came in.
        windows: ids ``[n, length]``; each window predicts its tokens ``first_scored`` .. length-1 from all before them.
        progress: called with (windows done, windows in all) after each batch.

    Raises:
        CorpusError: no window, or windows of a single token.
        UsageError: a window longer than the model's positions, or token ids outside its vocabulary.
    """
    import torch

    pieces = [windows.ids[start : start + batch] for start in range(0, len(windows.ids), batch)]
    if windows.tail is not None:
        pieces.append(windows.tail[None, :])
    if not pieces:
        raise CorpusError("there is no window to score: the text is empty")
    _check_fits(model, max(piece.shape[1] for piece in pieces), max(int(piece.max()) for piece in pieces))

    total = sum(len(piece) for piece in pieces)
    nats: list[float] = []
    scored: list[int] = []
    nonfinite: list[int] = []
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            for piece in pieces:
                for losses in _position_losses(model, piece, windows.first_scored):
                    finite = torch.isfinite(losses)
                    nats.append(float(losses[finite].sum(dtype=torch.float64)))
                    scored.append(losses.numel())
                    nonfinite.append(losses.numel() - int(finite.sum()))
                if progress is not None:
                    progress(len(nats), total)
    finally:
        model.train(was_training)
    counts = np.array(nonfinite, dtype=np.int64)
    return WindowLosses(
        np.array(nats, dtype=np.float64), np.array(scored, dtype=np.int64), int(counts.sum()), windows.digest, counts
    )


def _position_losses(model: torch.nn.Module, ids: NDArray[np.int64], first: int) -> list[torch.Tensor]:
    """Loss of every prediction that counts, one float32 vector ``[length - first]`` for each window of ``ids [b, length]``.

    The loss is taken window by window: log-softmax of a whole batch would hold a second copy of all its logits.
    """
    import torch
    from torch.nn import functional

    device = next(iter(model.parameters()), torch.empty(0)).device
    batch = torch.tensor(ids, dtype=torch.int64, device=device)
    logits = model(batch, use_cache=False).logits
    return [
        functional.cross_entropy(row[first - 1 : -1].float(), window[first:], reduction="none")
        for row, window in zip(logits, batch, strict=True)
    ]


def check_positions(length: int, positions: object) -> None:
    """Raise UsageError where windows of ``length`` tokens are longer than the model's ``positions`` (no number: unlimited)."""
    if isinstance(positions, int) and length > positions:
        raise UsageError(f"windows of {length} tokens exceed the model's {positions} positions: lower --window to {positions}")


def _check_fits(model: torch.nn.Module, length: int, largest_id: int) -> None:
    """A window past the last learned position crashes or extrapolates in silence; an unknown id reads out of bounds."""
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "get_text_config"):
        config = config.get_text_config()
    check_positions(length, getattr(config, "max_position_embeddings", None))
    vocabulary = getattr(config, "vocab_size", None)
    if isinstance(vocabulary, int) and largest_id >= vocabulary:
        raise UsageError(f"token id {largest_id} is outside the vocabulary of {vocabulary}: the tokenizer is not this model's")
