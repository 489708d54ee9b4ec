"""Measurement: a number that knows its unit, error, n, and the digests of what it was made from.

A measurement binds a value to bytes: ``subject`` are the weight files that were evaluated (name to SHA-256), ``inputs`` the
digests of windows, corpus and tokenizer, ``settings`` the conventions without which the number means nothing. The manifest
stores ``record()``; reports print from it and type no number by hand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from eval.perplexity import WindowLosses
from eval.stats import Estimate, Interval, Paired

if TYPE_CHECKING:
    from calib.windows import Windows


@dataclass(frozen=True, slots=True)
class Measurement:
    """One value with its unit and error.

    Attributes:
        name: what was measured, for example ``perplexity``.
        value: finite, or infinite with ``flag`` saying why; a value that does not exist is NaN here and null in the record.
        unit: for example ``nats/token``; ``1`` for a pure number.
        n: how many independent clusters (windows, items) the error is over.
        standard_error: in ``unit``; None when n is 1.
        interval: in ``unit``; None when n is 1.
        inputs: what it was measured on, name to digest.
        subject: weight file to SHA-256 of what was measured.
        settings: conventions, as text.
        flag: why the value needs care, or None.
        part: the part of an evaluation that it belongs to; empty for a run's own.
    """

    name: str
    value: float
    unit: str
    n: int
    interval: Interval | None = None
    inputs: Mapping[str, str] = field(default_factory=dict)
    subject: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    standard_error: float | None = None
    flag: str | None = None
    part: str = ""

    def __post_init__(self) -> None:
        if not math.isfinite(self.value) and not self.flag:
            raise ValueError(f"{self.name} is {self.value}: a value that is not finite needs a flag that says why")

    def record(self) -> dict[str, Any]:
        """The manifest's form: JSON types, keys in fixed order. A value that is not finite is null and leads the flag."""
        finite = math.isfinite(self.value)
        flag = self.flag if finite else f"{self.value}: {self.flag}"
        interval = self.interval
        return {
            "name": self.name,
            "part": self.part,
            "value": self.value if finite else None,
            "unit": self.unit,
            "n": self.n,
            "standard_error": self.standard_error,
            "interval": None
            if interval is None
            else {"low": interval.low, "high": interval.high, "level": interval.level, "method": interval.method},
            "flag": flag,
            "inputs": dict(sorted(self.inputs.items())),
            "subject": dict(sorted(self.subject.items())),
            "settings": dict(sorted(self.settings.items())),
        }


def perplexity_measurement(
    losses: WindowLosses, estimate: Estimate, *, windows: Windows, subject: Mapping[str, str], name: str = "perplexity"
) -> Measurement:
    """Perplexity of one model: interval and error are those of the mean loss, taken through exp (the error to first order)."""
    value = losses.perplexity
    error, interval = estimate.standard_error, estimate.interval
    usable = math.isfinite(value)
    return Measurement(
        name=name,
        value=value,
        unit="1",
        n=estimate.windows,
        interval=_exponential(interval) if usable and interval else None,
        inputs=window_inputs(windows),
        subject=subject,
        settings={**window_settings(windows, losses.scored_tokens), "mean_nats_per_token": f"{estimate.mean_nats:.10g}"},
        standard_error=value * error if usable and error is not None else None,
        flag=losses.flag,
    )


def ln_ratio_measurement(
    paired: Paired,
    *,
    windows: Windows,
    subject: Mapping[str, str],
    baseline: Mapping[str, str],
    name: str = "ln_perplexity_ratio",
) -> Measurement:
    """Paired difference to the baseline whose weight files (name to SHA-256) are ``baseline``."""
    return Measurement(
        name=name,
        value=math.nan if paired.ln_ratio is None else paired.ln_ratio,
        unit="nats/token",
        n=paired.windows,
        interval=paired.interval,
        inputs={**window_inputs(windows), **{f"baseline {file}": digest for file, digest in baseline.items()}},
        subject=subject,
        settings={**window_settings(windows, paired.scored_tokens), "pairing": "same windows, clustered by window"},
        standard_error=paired.standard_error,
        flag=paired.flag,
    )


def window_inputs(windows: Windows) -> dict[str, str]:
    """Digests of what the windows are made of."""
    return {"corpus": windows.corpus_sha256, "tokenizer": windows.tokenizer_digest, "windows": windows.digest}


def window_settings(windows: Windows, scored_tokens: int) -> dict[str, str]:
    """The convention of a perplexity: figures made with two different ones must never be compared."""
    start, stop = windows.span
    return {
        "window_tokens": str(windows.length),
        "stride_tokens": str(windows.stride),
        "span_tokens": f"{start}:{stop}",
        "bos": windows.bos,
        "first_scored": str(windows.first_scored),
        "scored_tokens": str(scored_tokens),
        "average": "token weighted over all windows",
        "text": f"{windows.corpus_name}, {windows.join}",
    }


def windows_record(windows: Windows) -> dict[str, Any]:
    """The manifest's ``digests.calibration`` and ``digests.evaluation``."""
    return {
        "digest": windows.digest,
        "span_tokens": [int(windows.span[0]), int(windows.span[1])],
        "length_tokens": windows.length,
        "stride_tokens": windows.stride,
        "count": len(windows.ids) + (windows.tail is not None),
        "bos": windows.bos,
        "first_scored": windows.first_scored,
        "corpus_sha256": windows.corpus_sha256,
        "tokenizer_digest": windows.tokenizer_digest,
        "corpus": windows.corpus_name,
        "join": windows.join,
    }


def _exponential(interval: Interval) -> Interval | None:
    try:
        return Interval(math.exp(interval.low), math.exp(interval.high), interval.level, interval.method)
    except OverflowError:
        return None
