"""Verdicts of non-inferiority: is the worse end of a paired interval within a margin that was fixed before?

"Not significantly different" is never said: few items make everything insignificant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from eval.stats import Interval

Answer = Literal["not inferior", "inferior", "undecided"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """``loss`` is how much worse the artefact is, with its interval turned so that up is worse; ``margin`` what is allowed."""

    answer: Answer
    loss: float
    low: float
    high: float
    margin: float

    def __str__(self) -> str:
        reach = f"worse by {self.loss:.4g} ({self.low:.4g} to {self.high:.4g}), margin {self.margin:g}"
        return f"{self.answer}: {reach}"


def verdict(value: float, interval: Interval | None, margin: float, *, higher_is_worse: bool) -> Verdict | None:
    """Where the whole interval lies against ``margin``; None without an interval."""
    if interval is None:
        return None
    ends = (interval.low, interval.high) if higher_is_worse else (-interval.high, -interval.low)
    answer: Answer = "not inferior" if ends[1] <= margin else "inferior" if ends[0] > margin else "undecided"
    return Verdict(answer, value if higher_is_worse else -value, ends[0], ends[1], margin)
