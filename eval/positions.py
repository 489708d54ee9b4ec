"""Two models' next-token distributions side by side, position by position: losses, both divergences, agreement, overlap.

Work is done in chunks of positions, so that memory is bounded by the chunk and the vocabulary. A term whose first probability is
0 counts as 0, also where both logits are minus infinity (a masked vocabulary): the divergence of a model from itself is then
exactly 0 and not NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 128


@dataclass(frozen=True, slots=True)
class PositionFigures:
    """Figures of one window, float32 on the processor, NaN or infinite where a model's logits are.

    Attributes:
        reference_nats, artefact_nats: loss of every scored prediction, ``[scored]``.
        kl, reverse_kl: KL(reference || artefact) and KL(artefact || reference) in nats at every position, ``[positions]``.
        overlap: sum over the vocabulary of the smaller of both probabilities.
        confidence: the reference's largest probability.
        same: whether both have the same best token, bool.
    """

    reference_nats: Tensor
    artefact_nats: Tensor
    kl: Tensor
    reverse_kl: Tensor
    overlap: Tensor
    confidence: Tensor
    same: Tensor

    @property
    def finite(self) -> Tensor:
        """Positions at which every figure is a number, bool ``[positions]``."""
        return torch.isfinite(self.kl) & torch.isfinite(self.reverse_kl) & torch.isfinite(self.overlap)


def position_figures(reference: Tensor, artefact: Tensor, ids: Tensor, first_scored: int = 1) -> PositionFigures:
    """Compare logits ``[length, vocabulary]`` of two models on the same window ``ids [length]``.

    Where one vocabulary is padded beyond the other's, the entries that both have are compared, each renormalised.

    Args:
        first_scored: position of the first token whose prediction counts in the losses; divergences take every position.
    """
    shared = min(reference.shape[-1], artefact.shape[-1])
    columns: list[list[Tensor]] = []
    losses: list[tuple[Tensor, Tensor]] = []
    for start in range(0, len(ids), CHUNK):
        rows = slice(start, start + CHUNK)
        p, q = (logits[rows, :shared].float().log_softmax(-1) for logits in (reference, artefact))
        columns.append(_compared(p, q))
        targets = ids[start + 1 : start + 1 + len(p)]
        picked = [side[: len(targets)].gather(1, targets[:, None])[:, 0].neg() for side in (p, q)]
        losses.append((picked[0], picked[1]))
    kl, reverse, overlap, confidence, same = (torch.cat(column).cpu() for column in zip(*columns, strict=True))
    nats = [torch.cat(side)[first_scored - 1 :].cpu() for side in zip(*losses, strict=True)]
    return PositionFigures(nats[0], nats[1], kl, reverse, overlap, confidence, same.bool())


def _compared(p: Tensor, q: Tensor) -> list[Tensor]:
    """KL both ways, overlap, confidence and agreement of log-probabilities ``[positions, vocabulary]``."""
    same = p.argmax(-1) == q.argmax(-1)
    likely, found = p.exp(), q.exp()
    overlap = torch.minimum(likely, found).sum(-1)
    difference = p - q
    kl = _weighted(likely, difference)
    reverse = -_weighted(found, difference)
    return [kl, reverse, overlap, likely.amax(-1), same]


def _weighted(probability: Tensor, difference: Tensor) -> Tensor:
    """Sum of probability x difference over the vocabulary, 0 where the probability is 0."""
    total = (probability * difference).sum(-1)
    bad = ~torch.isfinite(total)
    if bool(bad.any()):
        rows = probability[bad]
        total[bad] = torch.where(rows == 0, 0.0, rows * difference[bad]).sum(-1)
    return total
