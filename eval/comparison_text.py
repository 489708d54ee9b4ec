"""A comparison as files: a table for programs, one for people, and a line for every cell that says where it comes from."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from eval.comparison import Cell, Column, Comparison
from formats.units import size_text


def table_csv(found: Comparison, front: Collection[int]) -> str:
    """One line per artefact: every column with the ends of its interval; numbers in full, an empty cell where there is none.

    ``manifest`` and ``manifest_sha256`` say what the line was read from, ``cells_csv`` which entry of it every cell is.
    """
    head = ["artefact", "method", "schemes", "on_front"]
    for column in found.columns:
        head += [column.key, *((f"{column.key}_low", f"{column.key}_high") if _has_interval(found, column) else ())]
    lines = [[*head, "manifest", "manifest_sha256"]]
    for place, (entry, cells) in enumerate(zip(found.entries, found.cells, strict=True)):
        line = [entry.label, entry.manifest.method, entry.schemes, "yes" if place in front else "no"]
        for column in found.columns:
            cell = cells[column.key]
            line += [_full(cell.value), *((_full(cell.low), _full(cell.high)) if _has_interval(found, column) else ())]
        lines.append([*line, entry.path, entry.sha256])
    return _csv(lines)


def cells_csv(found: Comparison) -> str:
    """One line per cell: figure, interval, n, note, and the manifest, its SHA-256 and the place in it."""
    names = ("artefact", "column", "value", "low", "high", "level", "n", "unit", "note", "manifest", "manifest_sha256", "source")
    lines: list[Sequence[str]] = [names]
    for entry, cells in zip(found.entries, found.cells, strict=True):
        for column in found.columns:
            cell = cells[column.key]
            figures = [_full(number) for number in (cell.value, cell.low, cell.high, cell.level)]
            n = "" if cell.n is None else str(cell.n)
            place = (entry.path, entry.sha256, cell.source)
            lines.append((entry.label, column.key, *figures, n, column.unit, cell.note, *place))
    return _csv(lines)


def markdown(found: Comparison, front: Collection[int], axes: str) -> str:
    """The table for people, what its figures were measured on, what must be said, and the manifests behind it."""
    heads = ["artefact", "method", *(column.title for column in found.columns), "front"]
    lines = ["# Comparison", "", _row(heads), _row(["---", "---", *("---:" for _ in found.columns), "---"])]
    for place, (entry, cells) in enumerate(zip(found.entries, found.cells, strict=True)):
        shown = [cell_text(cells[column.key], column) for column in found.columns]
        lines.append(_row([entry.label, entry.manifest.method, *shown, "yes" if place in front else ""]))
    lines += ["", f"*front*: no other artefact is at least as good in both and better in one of: {axes}."]
    lines += ["Brackets hold the interval of a figure, at the level that the manifest gives."]
    for title, texts in (("Measured on", measured_on(found)), ("Notes", found.notes)):
        lines += ["", f"## {title}", "", *(f"* {text}" for text in texts or ("none",))]
    lines += ["", "## Read from", "", _row(["artefact", "schemes", "manifest", "SHA-256"]), _row(["---"] * 4)]
    lines += [_row([entry.label, entry.schemes, entry.path, entry.sha256]) for entry in found.entries]
    return "\n".join(lines) + "\n"


def record(found: Comparison, front: Collection[int], axes: str) -> dict[str, Any]:
    """The whole comparison as JSON."""
    artefacts = []
    for place, (entry, cells) in enumerate(zip(found.entries, found.cells, strict=True)):
        figures = {
            key: {name: getattr(cell, name) for name in ("value", "low", "high", "level", "n", "note", "source")}
            for key, cell in cells.items()
        }
        artefacts.append(
            {
                "artefact": entry.label,
                "manifest": entry.path,
                "manifest_sha256": entry.sha256,
                "method": entry.manifest.method,
                "schemes": entry.schemes,
                "on_front": place in front,
                "cells": figures,
            }
        )
    columns = [{"key": column.key, "title": column.title, "unit": column.unit} for column in found.columns]
    said = {"measured_on": dict(found.conventions), "notes": list(found.notes)}
    return {"columns": columns, "artefacts": artefacts, "front": axes, **said}


def measured_on(found: Comparison) -> list[str]:
    """One sentence for all columns that were measured on the same."""
    titles = {column.key: column.title for column in found.columns}
    alike: dict[str, list[str]] = {}
    for key, text in found.conventions.items():
        alike.setdefault(text, []).append(titles[key])
    return [f"{'; '.join(names)}: {text}" for text, names in alike.items()]


def cell_text(cell: Cell, column: Column) -> str:
    """``20.5277 [18.5, 22.1]``; a dash where there is no figure."""
    if cell.value is None:
        return "-"
    if column.unit == "bytes":
        return f"{int(cell.value):,} ({size_text(int(cell.value)).partition(' (')[0]})"
    text = _short(cell.value, column)
    flag = " (!)" if cell.note and cell.n is not None else ""
    if cell.low is None or cell.high is None:
        return text + flag
    return f"{text} [{_short(cell.low, column)}, {_short(cell.high, column)}]{flag}"


def _short(value: float, column: Column) -> str:
    return f"{value:,.{column.digits}f}" if abs(value) < 1e6 else f"{value:.4g}"


def _has_interval(found: Comparison, column: Column) -> bool:
    return any(cells[column.key].low is not None for cells in found.cells)


def _full(value: float | None) -> str:
    """All digits; whole numbers without a point."""
    if value is None:
        return ""
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)


def _csv(lines: Iterable[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
