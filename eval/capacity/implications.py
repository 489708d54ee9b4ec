"""Implications: what the exact bytes of one artefact mean on one card, as one record that says why where it says nothing.

**Which rate bounds the products.** The rate of the *operand* format, not of the storage format. A weight-only artefact (W4A16,
W8A16) is unpacked to bf16 before each product: fewer stored bits cut the traffic and never the arithmetic, so the rate is the
card's bf16 rate, dense, with fp32 accumulate. Another operand format is right only where activations are quantised too.
"""

from __future__ import annotations

import datetime
import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from eval.capacity.bounds import (
    Bound,
    StepTime,
    busy_seconds_per_request,
    cost_per_million_output_tokens,
    decode_flops,
    decode_step,
    full_batch,
    prefill_seconds,
)
from eval.capacity.cards import MEMORY_BASES, OPERAND_FORMATS, Card, MemoryBasis, OperandFormat, Price
from eval.capacity.model_shape import ModelShape
from quant.errors import UsageError


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What is taken for granted on every card; the defaults are the source text's. Checked here, before any work.

    Requests have ``prompt_tokens`` in and ``output_tokens`` out: the batch is planned at full length, decode steps are timed at
    the mean context, prompt + output / 2. Overhead is what engine context, workspace and graphs take: measure yours.
    ``mfu_prefill`` is the share of the dense peak that prefill reaches; decode is held to the full peak, as in lab 1.
    ``price_per_hour`` overrides the cards' own prices and belongs to a date; with neither there is no cost.

    Raises:
        UsageError: a number out of its range (named), an unknown memory basis or operand format.
    """

    prompt_tokens: int = 4000
    output_tokens: int = 2000
    overhead_bytes: int = 2_500_000_000
    kv_bytes_per_value: float = 2
    kv_scale_bytes_per_vector: float = 0
    mfu_prefill: float = 0.5
    memory_basis: MemoryBasis = "label-decimal"
    operand_format: OperandFormat = "bf16"
    price_per_hour: float | None = None
    price_currency: str = "USD"
    price_date: datetime.date | None = None

    def __post_init__(self) -> None:
        if self.memory_basis not in MEMORY_BASES:
            raise UsageError(f"no memory basis {self.memory_basis!r}: choose one of {', '.join(MEMORY_BASES)}")
        if self.operand_format not in OPERAND_FORMATS:
            raise UsageError(f"no operand format {self.operand_format!r}: choose one of {', '.join(OPERAND_FORMATS)}")
        for name in ("prompt_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be 1 or more, got {getattr(self, name)}")
        for name in ("overhead_bytes", "kv_scale_bytes_per_vector", "price_per_hour"):
            number = getattr(self, name)
            if number is not None and not (math.isfinite(number) and number >= 0):
                raise UsageError(f"{name} must be 0 or more, got {number}")
        if not (math.isfinite(self.kv_bytes_per_value) and self.kv_bytes_per_value > 0):
            raise UsageError(f"kv_bytes_per_value must be above 0, got {self.kv_bytes_per_value}")
        if not 0 < self.mfu_prefill <= 1:
            raise UsageError(f"mfu_prefill must be above 0 and at most 1, got {self.mfu_prefill}")

    @property
    def mean_context_tokens(self) -> float:
        return self.prompt_tokens + self.output_tokens / 2

    def price_on(self, card: Card) -> Price | None:
        """The price given here, else the card's own, else None."""
        if self.price_per_hour is None:
            return card.price
        return Price(self.price_per_hour, self.price_currency, ("given",), self.price_date)


@dataclass(frozen=True, slots=True)
class Implication:
    """What one artefact means on one card. ``reason`` says in words why anything is None; notes say what was assumed.

    ``fits``: whether the weights, the overhead and the cache of at least one request of full length fit. False:
    ``short_by_bytes`` says by how much they do not, the batch is 0 and there are no times. None: the card does not state its
    memory, so there is no batch either, but the times of a request alone hold if it fits.
    """

    card: str
    card_name: str
    assumptions: Assumptions
    figures: dict[str, dict[str, Any]]  # the card's figures that the formulas used, each with sources and date
    memory_bytes: int | None
    weight_file_bytes: int
    weight_resident_bytes: int
    weight_traffic_bytes_per_step: int
    kv_bytes_per_token: int
    kv_bytes_per_request: int
    decode_flops_per_sequence: float  # of one step, at the mean context
    dense_flops_per_s: float | None
    bandwidth_bytes_per_s: float
    fits: bool | None = None
    short_by_bytes: int = 0
    free_bytes: int | None = None  # left for the cache; negative where the weights and the overhead alone do not fit
    batch: int | None = None
    prefill_s: float | None = None
    step_alone_s: float | None = None
    step_alone_bound: Bound | None = None
    step_full_batch_s: float | None = None
    step_full_batch_bound: Bound | None = None
    output_tokens_per_s_alone: float | None = None
    output_tokens_per_s_full_batch: float | None = None  # decode only; the busy figures charge the prefill as well
    busy_s_per_request: float | None = None
    requests_per_busy_hour: float | None = None
    output_tokens_per_busy_hour: float | None = None
    price: Price | None = None
    cost_per_million_output_tokens: float | None = None  # of a busy hour, in the currency of the price
    reason: str | None = None
    notes: tuple[str, ...] = ()

    def record(self) -> dict[str, Any]:
        """A JSON-ready dict: units in the keys, dates in ISO form, never NaN or infinity."""
        fields = asdict(self)
        date = self.assumptions.price_date
        fields["assumptions"]["price_date"] = None if date is None else date.isoformat()
        fields["price"] = None if self.price is None else self.price.record()
        fields["notes"] = list(self.notes)
        return fields


def implications(
    shape: ModelShape,
    card: Card,
    *,
    weight_bytes: int,
    traffic_bytes: int | None = None,
    resident_bytes: int | None = None,
    kv_bytes: int | None = None,
    assumptions: Assumptions = Assumptions(),
) -> Implication:
    """Capacity, step times, prefill and cost of one artefact on one card.

    Args:
        weight_bytes: exact bytes of the weight files.
        traffic_bytes: weight bytes read per decode step (a head is read whole, an untied input table is not); None: the file.
        resident_bytes: bytes of weights in memory, where an engine adds a copy of a tied head; None: the file.
        kv_bytes: exact cache bytes per token with the scales that come with it; None: those of the assumptions.

    Raises:
        UsageError: a byte count below 1.
    """
    resident = weight_bytes if resident_bytes is None else resident_bytes
    traffic = weight_bytes if traffic_bytes is None else traffic_bytes
    for name, value in (("weight_bytes", weight_bytes), ("traffic_bytes", traffic), ("resident_bytes", resident)):
        if value < 1:
            raise UsageError(f"{name} must be 1 or more, got {value}")
    if kv_bytes is not None and kv_bytes < 1:
        raise UsageError(f"kv_bytes must be 1 or more, got {kv_bytes}")
    assumed = shape.kv_bytes_per_token(
        assumptions.kv_bytes_per_value, scale_bytes_per_vector=assumptions.kv_scale_bytes_per_vector
    )
    kv_token = assumed if kv_bytes is None else kv_bytes
    given = () if kv_bytes is None else (f"cache of {kv_bytes:,} bytes per token, as the artefact's own scheme stores it",)
    start = Implication(
        card=card.slug,
        card_name=card.name,
        assumptions=assumptions,
        figures=_figures(card, assumptions),
        memory_bytes=card.memory_bytes(assumptions.memory_basis),
        weight_file_bytes=weight_bytes,
        weight_resident_bytes=resident,
        weight_traffic_bytes_per_step=traffic,
        kv_bytes_per_token=kv_token,
        kv_bytes_per_request=kv_token * (assumptions.prompt_tokens + assumptions.output_tokens),
        decode_flops_per_sequence=decode_flops(shape, batch=1, context_tokens=assumptions.mean_context_tokens),
        dense_flops_per_s=card.dense_flops_per_s[assumptions.operand_format],
        bandwidth_bytes_per_s=card.bandwidth_bytes_per_s,
        price=assumptions.price_on(card),
        notes=(*shape.notes, *given, _rate_note(assumptions.operand_format)),
    )
    return _with_cost(_with_times(_with_fit(start), shape))


def _figures(card: Card, assumptions: Assumptions) -> dict[str, dict[str, Any]]:
    """The figures that the formulas use, as records."""
    reported = assumptions.memory_basis == "reported"
    used = {
        "memory_reported_bytes" if reported else "memory_label_gb": card.memory_reported if reported else card.memory_label,
        "bandwidth_bytes_per_s": card.bandwidth,
        f"dense_tflops.{assumptions.operand_format}": card.dense_tflops.get(assumptions.operand_format),
    }
    return {name: figure.record() for name, figure in used.items() if figure is not None}


def _rate_note(operand_format: OperandFormat) -> str:
    """Which dense rate bounds the products, in words for a reader of the record."""
    if operand_format == "bf16":
        return "products at the dense bf16 rate: stored codes are unpacked to bf16, so fewer bits cut traffic and not arithmetic"
    return f"products at the dense {operand_format} rate: right only where activations are {operand_format} as well"


def _and(item: Implication, reason: str) -> str:
    """One more reason behind those that the item has."""
    return reason if item.reason is None else f"{item.reason}; {reason}"


def _with_fit(item: Implication) -> Implication:
    """Free memory and the full batch, or why there is none and by how many bytes."""
    assumed = item.assumptions
    if item.memory_bytes is None:
        stated = "no memory reported by a driver" if assumed.memory_basis == "reported" else "no memory"
        return replace(item, reason=f"{item.card_name} states {stated}: whether it fits, and the batch, are unknown")
    free = item.memory_bytes - item.weight_resident_bytes - assumed.overhead_bytes
    batch = full_batch(free, item.kv_bytes_per_request)
    if batch >= 1:
        return replace(item, fits=True, free_bytes=free, batch=batch)
    short = item.kv_bytes_per_request - free
    reason = (
        f"weights {item.weight_resident_bytes / 1e9:.2f} GB + overhead {assumed.overhead_bytes / 1e9:.2f} GB + cache of one "
        f"request of {assumed.prompt_tokens + assumed.output_tokens:,} tokens {item.kv_bytes_per_request / 1e9:.2f} GB exceed "
        f"{item.memory_bytes / 1e9:.2f} GB ({assumed.memory_basis}) by {short:,} bytes"
    )
    return replace(item, fits=False, free_bytes=free, short_by_bytes=short, batch=0, reason=reason)


def _with_times(item: Implication, shape: ModelShape) -> Implication:
    """Prefill and step times: none where it does not fit, those of a request alone where the memory is unknown."""
    if item.fits is False:
        return item
    assumed = item.assumptions

    def step(batch: int) -> StepTime:
        return decode_step(
            shape,
            batch=batch,
            context_tokens=assumed.mean_context_tokens,
            traffic_bytes=item.weight_traffic_bytes_per_step,
            kv_bytes_per_token=item.kv_bytes_per_token,
            bandwidth_bytes_per_s=item.bandwidth_bytes_per_s,
            dense_flops_per_s=item.dense_flops_per_s,
        )

    one = step(1)
    timed = replace(item, step_alone_s=one.seconds, step_alone_bound=one.bound, output_tokens_per_s_alone=1 / one.seconds)
    if item.batch:
        full = step(item.batch)
        timed = replace(timed, step_full_batch_s=full.seconds, step_full_batch_bound=full.bound)
        timed = replace(timed, output_tokens_per_s_full_batch=item.batch / full.seconds)
    if item.dense_flops_per_s is None:
        reason = f"{item.card_name} states no dense {assumed.operand_format} rate: no prefill time, so no cost"
        return replace(timed, reason=_and(item, reason))
    prefill_s = prefill_seconds(shape, assumed.prompt_tokens, dense_flops_per_s=item.dense_flops_per_s, mfu=assumed.mfu_prefill)
    return replace(timed, prefill_s=prefill_s)


def _with_cost(item: Implication) -> Implication:
    """Requests, tokens and cost of a busy hour, where a full batch and its prefill are known."""
    output_tokens = item.assumptions.output_tokens
    if not item.batch or item.prefill_s is None or item.step_full_batch_s is None:
        return item
    busy_s = busy_seconds_per_request(item.prefill_s, item.step_full_batch_s, batch=item.batch, output_tokens=output_tokens)
    item = replace(
        item,
        busy_s_per_request=busy_s,
        requests_per_busy_hour=3600 / busy_s,
        output_tokens_per_busy_hour=output_tokens * 3600 / busy_s,
    )
    if item.price is None:
        return replace(item, reason=_and(item, "no price per hour is known, so there is no cost"))
    cost = cost_per_million_output_tokens(item.price.per_hour, busy_s, output_tokens=output_tokens)
    return replace(item, cost_per_million_output_tokens=cost)
