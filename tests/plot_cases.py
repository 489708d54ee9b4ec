"""Manifests and rows of which pictures are drawn: the usual, and what could spoil a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from eval.capacity.cards import Card, load_cards
from eval.capacity.implications import Assumptions, implications
from formats.manifest import Manifest
from formats.records import IntervalRecord, MeasurementRecord
from tests.capacity_cases import CASE, CASE_BYTES, make_card


def measured(ln_ratio: float | None = 0.25, flag: str | None = None, n: int = 8) -> list[MeasurementRecord]:
    interval = IntervalRecord(low=0.125, high=0.375, level=0.95, method="bootstrap") if ln_ratio is not None and n > 1 else None
    after = None if ln_ratio is None else 30.5 * math.exp(min(ln_ratio, 600))
    return [
        MeasurementRecord(name="perplexity_float", value=30.5, unit="1", n=n),
        MeasurementRecord(name="perplexity", value=after, unit="1", n=n),
        MeasurementRecord(name="ln_perplexity_ratio", value=ln_ratio, unit="nats/token", n=n, interval=interval, flag=flag),
    ]


def records(cards: Sequence[Card], weight_bytes: int = CASE_BYTES, **assumed: Any) -> list[dict[str, Any]]:
    assumptions = Assumptions(**assumed)
    return [implications(CASE, card, weight_bytes=weight_bytes, assumptions=assumptions).record() for card in cards]


def rows(n: int = 8, worse: float = 0.25, nonfinite: dict[int, int | None] | None = None) -> pd.DataFrame:
    """Losses of 511 predictions a window; the artefact loses ``worse`` nats more on each."""
    mean = np.random.default_rng(0).uniform(3.0, 3.8, n)
    counts = [(nonfinite or {}).get(window, 0) for window in range(n)]
    return pd.DataFrame(
        {
            "window": np.arange(n),
            "first_token": np.arange(n) * 512,
            "scored_predictions": 511,
            "float_nats": mean * 511,
            "artefact_nats": (mean + worse) * 511,
            "float_nonfinite": pd.Series([0] * n, dtype="Int64"),
            "artefact_nonfinite": pd.Series(counts, dtype="Int64"),
        }
    )


LONG = "an-organisation-with-$a_long$-name/And-A-Model-Of-60-Letters"
FLAG = "quantised model: 1024 of 4088 predictions have no finite loss (the others lose 3.60012 nats each)"
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "a name of 60 letters": {"requested": LONG},
    "a path of 300 letters": {"requested": "/data/" + "folder/" * 42},
    "letters without a glyph, and a line break": {"requested": "模型/\n$x_{$"},
    "one window": {"rows": rows(1), "measurements": measured(n=1)},
    "600 windows": {"rows": rows(600)},
    "no cards": {"cards": []},
    "no cards, a large model": {"cards": [], "scale": 10**8},
    "one card": {"cards": records([make_card(80)])},
    "a card for one request only": {"cards": records([make_card(9)])},
    "no card that holds it": {"cards": records([make_card(6)])},
    "long requests": {"cards": records(load_cards("all"), prompt_tokens=120_000, output_tokens=8_000)},
    "no finite value in two windows": {"rows": rows(nonfinite={2: 1, 5: None}), "measurements": measured(None, FLAG)},
    "no finite value at all": {"rows": rows(nonfinite=dict.fromkeys(range(8), 511)), "measurements": measured(None, FLAG)},
    "a reason of 400 letters": {"measurements": measured(None, "one reason " * 36)},
    "much worse": {"rows": rows(worse=9), "measurements": measured(9.0)},
    "past what exp can hold": {"rows": rows(worse=720), "measurements": measured(720.0)},
    "no difference": {"rows": rows(worse=0), "measurements": measured(0.0)},
    "not measured": {"measurements": []},
}


def case(made: Manifest, name: str) -> tuple[Manifest, pd.DataFrame]:
    wanted = dict(CASES[name])
    frame = wanted.pop("rows", rows())
    if "requested" in wanted:
        wanted["source"] = made.source.model_copy(update={"requested": wanted.pop("requested")})
    if "scale" in wanted:
        scale = wanted.pop("scale")
        wanted["ledger"] = [
            line.model_copy(update={key: value * scale for key, value in line if key != "file"}) for line in made.ledger
        ]
    return made.model_copy(update=wanted), frame
