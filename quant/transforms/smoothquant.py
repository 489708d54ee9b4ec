"""SmoothQuant (Xiao et al. 2023): move the range of activations into the weights before both are rounded.

Dividing input channel i by s_i and multiplying column i of every matrix that reads it by s_i changes nothing in exact arithmetic.
With s_i = max|X_i|^alpha / max|W_i|^(1 - alpha), outlier channels of the input shrink and the weights take their range. One
factor that all channels have in common changes no rounded value (both scales take it up), so folded factors are centred at 1.

Everything here is a function of tensors. Who feeds whom, and the folding itself, are the business of ``calib``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quant.activations import ActivationScheme, static_scale
from quant.errors import SchemeError
from quant.quantizers.rtn import round_to_nearest
from quant.scheme import Scheme

SEARCH_ROWS = 512
ALPHAS = tuple(step / 10 for step in range(1, 11))
_SMALLEST = 1e-8
_LARGEST_LOG = 16


@dataclass(frozen=True, slots=True)
class SmoothConsumer:
    """A matrix ``[out, in]`` (float32) that reads the smoothed input, and how both will be rounded."""

    matrix: Tensor
    scheme: Scheme
    activations: ActivationScheme | None


@dataclass(frozen=True, slots=True)
class SmoothChoice:
    """Factors ``[in]``, the alpha that made them (None: no smoothing is best), and the output error relative to no smoothing."""

    factors: Tensor
    alpha: float | None
    relative_error: float


@dataclass(frozen=True, slots=True)
class SmoothInputs:
    """What is known of the input that the consumers share.

    Attributes:
        rows: some of it, float32 ``[tokens, in]``.
        weights: how many tokens each of these stands for, float32 ``[tokens]``.
        largest: largest magnitude per channel over all tokens: what a scale of the whole tensor must reach.
        smoothed: the statistic that the factors are made of, ``[in]``: the same, or a percentile.
    """

    rows: Tensor
    weights: Tensor
    largest: Tensor
    smoothed: Tensor


def smooth_factors(largest_input: Tensor, largest_weight: Tensor, alpha: float) -> Tensor:
    """Factors ``[in]``, above zero: inputs are divided by them, weight columns multiplied.

    Args:
        largest_input, largest_weight: largest magnitude per input channel, over the calibration tokens and over all output rows.
        alpha: 0 leaves the inputs to the weights' range, 1 the other way round.
    """
    wide = largest_input.float().clamp_min(_SMALLEST) ** alpha
    return wide / largest_weight.float().clamp_min(_SMALLEST) ** (1 - alpha)


def largest_columns(matrices: Sequence[Tensor]) -> Tensor:
    """Largest magnitude per input channel ``[in]`` over all rows of all matrices."""
    return torch.stack([matrix.abs().amax(0) for matrix in matrices]).amax(0)


def search_alpha(
    consumers: Sequence[SmoothConsumer],
    inputs: SmoothInputs,
    alphas: Sequence[float | None] = (None, *ALPHAS),
    share: Tensor | None = None,
    free: Tensor | None = None,
) -> SmoothChoice:
    """The alpha whose factors minimise the output error of all consumers with rounded weights and rounded inputs.

    It is the squared error over all tokens that the sampled ones stand for, measured on about ``SEARCH_ROWS`` evenly spaced rows
    of the outputs. A model's few huge tokens have the share in it that is theirs, neither more nor less: docs/log.md.

    Args:
        alphas: what is tried; None stands for no smoothing. With one alpha nothing is chosen.
        share: optional int64 ``[in]``: channels with equal entries must get equal factors (grouped queries share one value
            channel).
        free: optional bool ``[in]``: channels that may be scaled at all; the others keep factor 1.
    """
    weight = largest_columns([consumer.matrix for consumer in consumers])
    smoothed = inputs.smoothed.float()
    alive = (smoothed > 0) & (weight > 0) & torch.isfinite(smoothed)
    if free is not None:
        alive &= free
    if share is not None:
        smoothed, weight = _largest_of_shared(smoothed, share), _largest_of_shared(weight, share)
        alive = _largest_of_shared((~alive).float(), share) == 0
    sample = _sampled(consumers)
    outputs = [inputs.rows @ consumer.matrix.T for consumer in sample]
    ones = torch.ones_like(weight)
    plain = _output_error(sample, inputs, outputs, ones)
    best: SmoothChoice | None = None
    for alpha in alphas:
        factors = ones if alpha is None else _centred(smooth_factors(smoothed, weight, alpha), alive)
        error = plain if alpha is None else _output_error(sample, inputs, outputs, factors)
        relative = error / plain if plain > 0 else 1.0
        if best is None or relative < best.relative_error:
            best = SmoothChoice(factors, alpha, relative)
    assert best is not None
    return best


def _centred(factors: Tensor, alive: Tensor) -> Tensor:
    """Factors whose geometric mean over live channels is 1, and 1 on all others."""
    if not bool(alive.any()):
        return torch.ones_like(factors)
    logs = factors.log()
    logs = (logs - logs[alive].mean()).clamp(-_LARGEST_LOG, _LARGEST_LOG)
    return torch.where(alive, logs.exp(), torch.ones_like(factors))


def _largest_of_shared(values: Tensor, share: Tensor) -> Tensor:
    """The largest of ``values`` among channels with equal ``share``, spread back over them."""
    count = int(share.max()) + 1
    found = torch.zeros(count, dtype=values.dtype, device=values.device)
    return found.scatter_reduce_(0, share, values, "amax")[share]


def _sampled(consumers: Sequence[SmoothConsumer]) -> list[SmoothConsumer]:
    """Every n-th output row of each consumer; matrices with one scale for all rows stay whole."""
    stride = max(1, sum(consumer.matrix.shape[0] for consumer in consumers) // SEARCH_ROWS)
    return [
        c if c.scheme.blocks == "tensor" else SmoothConsumer(c.matrix[::stride].contiguous(), c.scheme, c.activations)
        for c in consumers
    ]


def _output_error(consumers: Sequence[SmoothConsumer], inputs: SmoothInputs, outputs: Sequence[Tensor], factors: Tensor) -> float:
    """Squared error of the rounded outputs; infinite where the weights' scales overflow."""
    total = 0.0
    divided = inputs.rows / factors
    whole = float((inputs.largest / factors).max())
    for consumer, output in zip(consumers, outputs, strict=True):
        try:
            weight = round_to_nearest(consumer.matrix * factors, consumer.scheme).dequantise()
        except SchemeError:
            return float("inf")
        apart = _rounded(divided, consumer.activations, whole) @ weight.T - output
        total += float((apart.square().sum(-1) * inputs.weights).sum(dtype=torch.float64))
    return total


def _rounded(rows: Tensor, activations: ActivationScheme | None, whole: float) -> Tensor:
    """``rows`` as they will be rounded; a scale of the whole tensor is that of all tokens, not of these."""
    if activations is None:
        return rows
    if activations.sharing == "token":
        return activations.rounded(rows)
    return ActivationScheme("tensor", dynamic=False).rounded(rows, static_scale(whole))
