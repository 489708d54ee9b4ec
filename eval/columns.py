"""Which measurements a comparison shows, and from which part of an evaluation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eval.gates import Bound, measure_command
from formats.manifest import Manifest

LANGUAGE = "language"
_RATE = re.compile(r"(^|_)(acc|accuracy|exact|match|valid|validity|correct|found|rate|passed)(_|$)")
_NOT_OF_THE_ARTEFACT = re.compile(r"(^|_)(reference|float|difference|delta|minimum|detectable|mcnemar|p|n|flips?)(_|$)")


@dataclass(frozen=True, slots=True)
class MeasuredColumn:
    """One measurement by part and name; ``of_reference``: it is a figure of the baseline, not of the artefact."""

    key: str
    title: str
    unit: str
    digits: int
    part: str
    name: str
    of_reference: bool = False

    def command(self, folder: Path) -> str:
        """What measures it, as one types it."""
        return measure_command(Bound(self.name, self.part), folder)


def measured_columns(manifests: Sequence[Manifest]) -> list[MeasuredColumn]:
    """The columns that at least one artefact has, in the order of the table."""
    had = [{(m.part, m.name) for m in manifest.measurements} for manifest in manifests]
    part = _perplexity_part(had)
    reference = "perplexity_reference" if part else "perplexity_float"
    wanted = [
        MeasuredColumn("perplexity_float", "perplexity, float", "1", 4, part, reference, of_reference=True),
        MeasuredColumn("perplexity", "perplexity", "1", 4, part, "perplexity"),
        MeasuredColumn("ln_perplexity_ratio", "ln perplexity ratio", "nats/token", 5, part, "ln_perplexity_ratio"),
        MeasuredColumn("kl", "KL(float || artefact)", "nats/token", 5, LANGUAGE, "kl"),
        MeasuredColumn("reverse_kl", "KL(artefact || float)", "nats/token", 5, LANGUAGE, "reverse_kl"),
        MeasuredColumn("top1", "same best token", "1", 4, LANGUAGE, "top1"),
        MeasuredColumn("acceptance_overlap", "acceptance as a draft", "1", 4, LANGUAGE, "acceptance_overlap"),
    ]
    found = [column for column in wanted if any((column.part, column.name) in names for names in had)]
    return found + _rates(manifests)


def _perplexity_part(had: Sequence[set[tuple[str, str]]]) -> str:
    """The part that all artefacts have a perplexity of, else the one that most have; an evaluation before the run's own."""
    counts = {part: sum((part, "perplexity") in names for names in had) for part in (LANGUAGE, "")}
    return LANGUAGE if counts[LANGUAGE] >= counts[""] else ""


def _rates(manifests: Sequence[Manifest]) -> list[MeasuredColumn]:
    """Shares of items done right, of every task and of the deployment suite."""
    found: dict[tuple[str, str], str] = {}
    for manifest in manifests:
        for m in manifest.measurements:
            rate = _RATE.search(m.name) and not _NOT_OF_THE_ARTEFACT.search(m.name)
            if m.part not in ("", LANGUAGE) and rate:
                found.setdefault((m.part, m.name), m.unit)
    return [
        MeasuredColumn(f"{part}/{name}", f"{part}: {name}", unit, 4, part, name) for (part, name), unit in sorted(found.items())
    ]
