"""Bounds: the formulas of the source text's lab 1 and section 11, from a model's counts and a card's peaks to times and cost.

    free      = memory - weights - overhead                      bytes
    batch     = floor(free / (kv (prompt + output)))             requests of full length
    prefill   = (2 Nm t + 2 L w t^2) / (MFU P)                   s, causal attention
    step(B,c) = max((W + B kv c) / BW, (2 Nm B + 4 L w B c) / P) s, at the mean context c = prompt + output / 2
    busy      = prefill + (output - 1) step(batch) / batch       s of the device per request
    cost      = price 10^6 busy / (3600 output)                  per million output tokens of a busy hour, prefill included

with Nm = n_matmul, L layers, w = heads x head_dim (the text's d, equal there), kv = cache bytes per token, W = weight bytes read
per step, BW = peak bandwidth and P = dense peak. The step is optimistic on purpose: full peaks, no kernel overhead.

All functions are pure, in decimal units, and know neither cards, files nor the clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from eval.capacity.model_shape import ModelShape

Bound = Literal["memory", "compute", "memory, compute rate unknown"]


def prefill_flops(shape: ModelShape, prompt_tokens: int) -> int:
    """FLOPs of one cold prompt: projections and the causal half of attention."""
    projections = 2 * shape.n_matmul() * prompt_tokens
    return projections + 2 * shape.layers * shape.attention_width * prompt_tokens**2


def prefill_seconds(shape: ModelShape, prompt_tokens: int, *, dense_flops_per_s: float, mfu: float) -> float:
    """Seconds to the first token of one cold prompt when ``mfu`` (0 to 1) of the dense peak is reached."""
    return prefill_flops(shape, prompt_tokens) / (mfu * dense_flops_per_s)


def decode_flops(shape: ModelShape, *, batch: int, context_tokens: float) -> float:
    """FLOPs of one decode step of ``batch`` sequences, each with ``context_tokens`` cached tokens."""
    return 2 * shape.n_matmul() * batch + 4 * shape.layers * shape.attention_width * batch * context_tokens


@dataclass(frozen=True, slots=True)
class StepTime:
    """Lower bounds of one decode step in seconds; ``compute_s`` is None where the card's rate is unknown."""

    memory_s: float
    compute_s: float | None

    @property
    def seconds(self) -> float:
        return self.memory_s if self.compute_s is None else max(self.memory_s, self.compute_s)

    @property
    def bound(self) -> Bound:
        if self.compute_s is None:
            return "memory, compute rate unknown"
        return "memory" if self.memory_s >= self.compute_s else "compute"


def decode_step(
    shape: ModelShape,
    *,
    batch: int,
    context_tokens: float,
    traffic_bytes: int,
    kv_bytes_per_token: int,
    bandwidth_bytes_per_s: float,
    dense_flops_per_s: float | None,
) -> StepTime:
    """Time of one decode step: ``traffic_bytes`` of weights once, the cache of every sequence, against the products."""
    return step_time(
        batch=batch,
        traffic_bytes=traffic_bytes,
        kv_bytes_per_sequence=kv_bytes_per_token * context_tokens,
        flops_per_sequence=decode_flops(shape, batch=1, context_tokens=context_tokens),
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        dense_flops_per_s=dense_flops_per_s,
    )


def step_time(
    *,
    batch: int,
    traffic_bytes: int,
    kv_bytes_per_sequence: float,
    flops_per_sequence: float,
    bandwidth_bytes_per_s: float,
    dense_flops_per_s: float | None,
) -> StepTime:
    """``decode_step`` from what one sequence costs at its context: all that a stored record needs to say of the model."""
    moved_bytes = traffic_bytes + batch * kv_bytes_per_sequence
    flops = batch * flops_per_sequence
    return StepTime(moved_bytes / bandwidth_bytes_per_s, None if dense_flops_per_s is None else flops / dense_flops_per_s)


def full_batch(free_bytes: int, kv_bytes_per_request: int) -> int:
    """Requests of full length whose cache fits; 0 where not one does, also when ``free_bytes`` is negative."""
    return max(0, free_bytes // kv_bytes_per_request)


def busy_seconds_per_request(prefill_s: float, step_s: float, *, batch: int, output_tokens: int) -> float:
    """Device seconds per request at a full batch; the first output token comes out of the prefill."""
    return prefill_s + (output_tokens - 1) * step_s / batch


def cost_per_million_output_tokens(price_per_hour: float, busy_s_per_request: float, *, output_tokens: int) -> float:
    """Cost of 10^6 output tokens when every paid hour is busy, in the currency of the price; prefill included."""
    return price_per_hour * 1e6 * busy_s_per_request / (3600 * output_tokens)
