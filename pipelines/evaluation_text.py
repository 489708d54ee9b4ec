"""An evaluation as it is printed: a table of all measurements, the conventions that they hang on, verdicts, and notes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from calib.windows import Windows
from eval.measurement import Measurement
from eval.result import PartResult
from eval.verdict import verdict
from pipelines.screen import console
from pipelines.suite import Margins


def show(folder: Path, reference: str, windows: Windows, parts: Sequence[PartResult], margins: Margins) -> None:
    """Print everything on standard output."""
    out = console()
    table = Table("part", "measurement", "value", "interval", "n", "unit", title=f"{folder} beside {reference}")
    table.title_justify = "left"
    for part in parts:
        for found in part.named():
            table.add_row(found.part, found.name, _value(found), _interval(found), str(found.n), found.unit)
    out.print(table, markup=False)
    lines = [f"language: {windows.describe()}"] if any(part.part == "language" for part in parts) else []
    lines += verdicts(parts, margins)
    lines += [f"note: {part.part}: {note}" for part in parts for note in part.notes]
    lines += [f"care: {found.part} {found.name}: {found.flag}" for part in parts for found in part.named() if found.flag]
    for line in lines:
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    out.print(f"all of it is in {folder / 'manifest.json'}, a row per window or item in {folder / 'evaluations'}", soft_wrap=True)


def verdicts(parts: Sequence[PartResult], margins: Margins) -> list[str]:
    """A sentence for every figure that has a margin: differences of losses, divergence, differences of rates."""
    found = []
    for part in parts:
        for measured in part.named():
            judged = _margin(measured, margins)
            if judged is None:
                continue
            answer = verdict(measured.value, measured.interval, judged[0], higher_is_worse=judged[1])
            if answer is not None:
                found.append(f"verdict: {measured.part} {measured.name}: {answer}")
    return found


def _margin(found: Measurement, margins: Margins) -> tuple[float, bool] | None:
    """(margin, whether more is worse) of a measurement that is judged."""
    if found.part == "language":
        allowed = {"ln_perplexity_ratio": margins.ln_perplexity_ratio, "kl": margins.kl}.get(found.name)
        return None if allowed is None else (allowed, True)
    if found.name.endswith("_difference"):
        return (margins.task_accuracy if found.part.startswith("task-") else margins.deployment_rate), False
    return None


def _value(found: Measurement) -> str:
    return f"{found.value:.6g}"


def _interval(found: Measurement) -> str:
    return "-" if found.interval is None else f"{found.interval.low:.6g} to {found.interval.high:.6g}"
