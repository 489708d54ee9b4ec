"""Activation-aware scaling and clipping (Lin et al. 2024, AWQ), searched on Gram matrices.

Scaling a matrix's input channels up by ``s`` and the producer of that input down by ``s`` changes nothing in exact arithmetic
but spends the grid on the channels that matter. With G = X^T X over the calibration tokens, the squared output error of a weight
change D is tr(D G D^T): the search costs the same however many tokens were seen.

Everything here is a function of tensors. Who feeds whom, and the folding itself, are the business of ``calib``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quant.errors import SchemeError
from quant.qtensor import real_scales, to_blocks
from quant.quantizers.rtn import round_to_nearest
from quant.scales import block_range, encode, scales_from_range, tensor_divisor
from quant.scheme import Scheme

SEARCH_ROWS = 512
_UNITS = 20  # exponents are multiples of 1/20
_START = (6, 0)


@dataclass(frozen=True, slots=True)
class Consumer:
    """A matrix ``[out, in]`` (float32) that reads the shared input, and the scheme it will be stored in."""

    matrix: Tensor
    scheme: Scheme


@dataclass(frozen=True, slots=True)
class ScaleChoice:
    """Factors ``[in]`` for the input channels, the exponents (a, b) that won, and the output error relative to no scaling."""

    factors: Tensor
    exponents: tuple[float, float]
    relative_error: float


def output_error(change: Tensor, gram: Tensor) -> float:
    """tr(D G D^T): the squared error of the output, summed over the tokens that made the Gram matrix."""
    return float(((change @ gram) * change).sum())


def search_factors(
    consumers: Sequence[Consumer],
    gram: Tensor,
    share: Tensor | None = None,
    free: Tensor | None = None,
    rows: int = SEARCH_ROWS,
) -> ScaleChoice:
    """Find the input-channel factors that minimise the summed output error of all consumers after rounding.

    The factors are activation^a / weight^b with the root mean square of each channel's activation and its largest weight; a and b
    are found by a pattern search (the error has one valley in each), in steps of 0.1 and then 0.05.

    Args:
        consumers: matrices that read the same input, with their schemes.
        gram: X^T X of that input, float32 ``[in, in]``.
        share: optional int64 ``[in]``: channels with equal entries must get equal factors (grouped queries share one value
            channel).
        free: optional bool ``[in]``: channels that may be scaled at all; the others keep factor 1.
        rows: the error is measured on about this many evenly spaced output rows.

    Returns:
        The best factors; all 1 when nothing beats plain rounding. Always finite and above zero: a channel without
        activations or without weights keeps factor 1.
    """
    activation = torch.diagonal(gram).clamp_min(0).sqrt()
    weight = torch.stack([c.matrix.abs().amax(0) for c in consumers]).amax(0)
    alive = (activation > 0) & (weight > 0) & torch.isfinite(activation)
    if free is not None:
        alive &= free
    if share is not None:
        activation, weight, dead = (_pool(value, share) for value in (activation, weight, (~alive).float()))
        alive = dead == 0
    ones = torch.ones_like(activation)
    if not bool(alive.any()):
        return ScaleChoice(ones, (0.0, 0.0), 1.0)
    sample = _sampled(consumers, rows)
    plain = _rounding_error(sample, gram, ones)
    if not 0 < plain < float("inf"):
        return ScaleChoice(ones, (0.0, 0.0), 1.0)
    tried: dict[tuple[int, int], float] = {(0, 0): plain}

    def error(point: tuple[int, int]) -> float:
        if point not in tried:
            inside = all(0 <= value <= _UNITS for value in point)
            factors = _factors(activation, weight, alive, point)
            tried[point] = _rounding_error(sample, gram, factors) if inside else float("inf")
        return tried[point]

    _descend(error, _START)
    best = min(tried, key=lambda point: (tried[point], point))
    factors = ones if best == (0, 0) else _factors(activation, weight, alive, best)
    return ScaleChoice(factors, (best[0] / _UNITS, best[1] / _UNITS), tried[best] / plain)


def _descend(error: Callable[[tuple[int, int]], float], start: tuple[int, int]) -> None:
    """Pattern search over exponents in units of 1/20: go to a better neighbour while there is one, then halve the step."""
    here = start
    for step in (2, 1):
        moved = True
        while moved:
            around = [(here[0] + step, here[1]), (here[0] - step, here[1]), (here[0], here[1] + step), (here[0], here[1] - step)]
            best = min(around, key=lambda point: (error(point), point))
            moved = error(best) < error(here)
            here = best if moved else here


def _sampled(consumers: Sequence[Consumer], rows: int) -> list[Consumer]:
    """Every n-th output row of each consumer, about ``rows`` in all; matrices with one scale for all rows stay whole."""
    stride = max(1, sum(c.matrix.shape[0] for c in consumers) // rows)
    return [c if c.scheme.blocks == "tensor" else Consumer(c.matrix[::stride].contiguous(), c.scheme) for c in consumers]


def clip_steps(scheme: Scheme) -> tuple[float, ...]:
    """What is tried: down to half of the range, and to 0.3 of it where two bits want steps below that."""
    return tuple(1 - 0.05 * step for step in range(15 if scheme.bits == 2 else 11))


def search_clipping(matrix: Tensor, scheme: Scheme, gram: Tensor) -> Tensor:
    """Factors ``scheme.block_grid`` in (0, 1] for each block's range that minimise the block's own share of the output error.

    The share of one block is d G_bb d^T with the Gram matrix restricted to the block's input channels: cross terms between
    blocks are left out, as in the published method.
    """
    low, high = block_range(matrix, scheme)
    divisor = tensor_divisor(float(high.max()), scheme, high.device)
    best = torch.ones_like(high)
    if scheme.blocks == "tensor":
        return best
    lowest: Tensor | None = None
    grams = _block_grams(gram, scheme)
    original = to_blocks(matrix, scheme)
    for factor in clip_steps(scheme):
        scales, zeros = scales_from_range(low * factor, high * factor, scheme, divisor)
        levels = encode(matrix, scheme, scales, zeros, divisor)
        if zeros is not None:
            levels -= zeros.float().unsqueeze(-1)
        change = levels.mul_(real_scales(scales, scheme, divisor).unsqueeze(-1)).sub_(original)
        error = (
            torch.einsum("rbi,bij,rbj->rb", change, grams, change)
            if grams.shape[0] > 1
            else ((change[:, 0] @ grams[0]) * change[:, 0]).sum(-1, keepdim=True)
        )
        if lowest is None:
            lowest = error
            continue
        better = error < lowest
        best = torch.where(better, torch.full_like(best, factor), best)
        lowest = torch.where(better, error, lowest)
    return best


def _block_grams(gram: Tensor, scheme: Scheme) -> Tensor:
    """Diagonal blocks ``[columns, size, size]`` of the Gram matrix; a short last group is padded with zeros."""
    width = gram.shape[0]
    size = width if scheme.blocks == "channel" else int(scheme.blocks)
    padded = torch.nn.functional.pad(gram, (0, -width % size, 0, -width % size))
    count = padded.shape[0] // size
    return torch.stack([padded[i * size : (i + 1) * size, i * size : (i + 1) * size] for i in range(count)])


def _factors(activation: Tensor, weight: Tensor, alive: Tensor, point: tuple[int, int]) -> Tensor:
    """activation^a / weight^b on live channels, centred so that the largest times the smallest is 1; 1 elsewhere."""
    a, b = point[0] / _UNITS, point[1] / _UNITS
    raw = activation.clamp_min(1e-30).log() * a - weight.clamp_min(1e-30).log() * b
    live = raw[alive]
    raw = (raw - (live.max() + live.min()) / 2).clamp(-16, 16)
    return torch.where(alive, raw.exp(), torch.ones_like(raw))


def _rounding_error(consumers: Sequence[Consumer], gram: Tensor, factors: Tensor) -> float:
    """Summed output error of the rounded consumers; infinite where the stored scale type cannot hold the scaled matrix."""
    total = 0.0
    for consumer in consumers:
        try:
            rounded = round_to_nearest(consumer.matrix * factors, consumer.scheme).dequantise()
        except SchemeError:
            return float("inf")
        total += output_error(rounded / factors - consumer.matrix, gram)
    return total


def _pool(values: Tensor, share: Tensor) -> Tensor:
    """Mean of ``values`` over channels with equal ``share``, spread back over them."""
    count = int(share.max()) + 1
    total = torch.zeros(count, dtype=values.dtype, device=values.device).index_add_(0, share, values)
    number = torch.zeros(count, dtype=values.dtype, device=values.device).index_add_(0, share, torch.ones_like(values))
    return (total / number.clamp_min(1))[share]
