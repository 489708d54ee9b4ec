"""Compare artefacts: bits per weight, size, quality with intervals, tasks and time in one table and one picture.

Exit code 0: the table is written. 1: an artefact is not what its manifest says. 2: they cannot stand in one table.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from formats.manifest import NAME
from pipelines.cli import HELP_OPTIONS, run_app
from pipelines.progress import Progress
from quant.errors import OutputError, UsageError

if TYPE_CHECKING:
    from eval.comparison import Comparison, Entry

app = typer.Typer(add_completion=False, context_settings=HELP_OPTIONS)


class Bits(StrEnum):
    LINEARS = "linears"
    FILE = "file"


class Quality(StrEnum):
    KL = "kl"
    PERPLEXITY = "perplexity"


@app.command()
def main(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders of artefacts, each with its manifest.json.")],
    output: Annotated[Path, typer.Option(metavar="DIR", help="Where the files go.")] = Path("artifacts/comparison"),
    x: Annotated[
        Bits, typer.Option("--x", help="Bits per weight of the quantised matrices, or of the whole file.")
    ] = Bits.LINEARS,
    y: Annotated[
        Quality | None, typer.Option("--y", help="What the picture shows; without it kl where every artefact has one.")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Hash every file instead of comparing sizes only.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> None:
    """Print and write bits per weight against quality: comparison.csv, .md, .png, .svg, and where every cell comes from."""
    entries = _entries(folders, output, verify)
    from eval.comparison import compare
    from eval.comparison_plot import X_KEYS, Y_KEYS, comparison_plots, front_places
    from eval.comparison_text import cells_csv, markdown, record, table_csv

    found = compare(entries)
    quality = Y_KEYS[(y or _quality(found)).value]
    bits = X_KEYS[x.value]
    if y is not None and all(value is None for value in found.values(quality)):
        raise UsageError(
            f"none of these artefacts has a {y.value}: python -m pipelines.evaluate DIR --suite standard measures it"
        )
    front = front_places(found, bits, quality)
    titles = {column.key: column.title for column in found.columns}
    axes = f"{titles[bits]} and {titles.get(quality, quality)}"
    png, svg = comparison_plots(found, bits, quality)
    files = {
        "comparison.csv": table_csv(found, front).encode(),
        "comparison-cells.csv": cells_csv(found).encode(),
        "comparison.md": markdown(found, front, axes).encode(),
        "comparison.png": png,
        "comparison.svg": svg,
    }
    _write(output, files)
    if as_json:
        typer.echo(json.dumps(record(found, front, axes), indent=1, ensure_ascii=False))
    else:
        _show(found, front, axes, output, files)


def _entries(folders: list[Path], output: Path, hashes: bool) -> list[Entry]:
    """The artefacts, after all names were checked. Raises UsageError or VerifyError."""
    from eval.comparison import labels, load_entry

    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"no such folder: {folder} (give folders that hold {NAME})")
        if not (folder / NAME).is_file():
            raise UsageError(f"{folder} holds no {NAME}: it is no finished artefact")
        if output.resolve().is_relative_to(folder.resolve()):
            raise UsageError(
                f"--output {output} lies in the artefact {folder}, whose manifest lists every file: give another folder"
            )
    names = labels(folders)
    entries = []
    with Progress().stage("check", total=len(folders), unit="artefact") as report:
        for done, (folder, name) in enumerate(zip(folders, names, strict=True), start=1):
            entries.append(load_entry(folder, name, hashes=hashes))
            report(done, len(folders))
    return entries


def _quality(found: Comparison) -> Quality:
    values = found.values("kl")
    return Quality.KL if values and all(value is not None for value in values) else Quality.PERPLEXITY


def _write(output: Path, files: dict[str, bytes]) -> None:
    from formats.atomic import write_bytes_atomically

    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot make the folder {output}: {error.strerror}") from None
    for name, data in files.items():
        write_bytes_atomically(output / name, data)


def _show(found: Comparison, front: Collection[int], axes: str, output: Path, files: Collection[str]) -> None:
    from rich.table import Table

    from eval.comparison_text import cell_text, measured_on
    from pipelines.screen import console

    out = console()
    table = Table(title="Comparison (artefacts across, figures down)", title_justify="left")
    table.add_column("", overflow="fold")
    for entry in found.entries:
        table.add_column(entry.label, justify="right", overflow="fold")
    table.add_row("method", *(entry.manifest.method for entry in found.entries))
    for column in found.columns:
        table.add_row(column.title, *(cell_text(cells[column.key], column) for cells in found.cells))
    table.add_row(f"on the front of {axes}", *("yes" if place in front else "no" for place in range(len(found.entries))))
    out.print(table, markup=False)
    for text in measured_on(found):
        out.print(f"measured on: {text}", markup=False, highlight=False, soft_wrap=True)
    for text in found.notes:
        out.print(f"note: {text}", markup=False, highlight=False, soft_wrap=True)
    out.print(f"written: {', '.join(str(output / name) for name in files)}", markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    run_app(app)
