"""Print methods, schemes with their exact bits, and number formats: all worked out from tables and layouts, nothing typed in."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from calib.methods import METHODS
from eval.capacity.cards import Card, load_cards
from eval.capacity.native import native_cards
from formats.catalogue import CatalogueEntry, Shape, catalogue_entry, known_schemes
from formats.checkpoint import Checkpoint
from formats.fates import role_of
from formats.sources import resolve
from pipelines.cli import HELP_OPTIONS, run_app
from pipelines.progress import announce
from quant.errors import UsageError
from quant.number_formats import NumberFormat, number_formats
from quant.scheme import Scheme

EXAMPLE = "4096x4096"

app = typer.Typer(add_completion=False, context_settings=HELP_OPTIONS)


@app.command()
def main(
    scheme: Annotated[
        list[str] | None, typer.Argument(metavar="[SCHEME]...", help="Show these schemes only, by name or string.")
    ] = None,
    shape: Annotated[str, typer.Option(metavar="OUTxIN", help="Matrix for which bits per weight are worked out.")] = EXAMPLE,
    model: Annotated[
        str | None, typer.Option(help="Work them out for what a run of this model would quantise instead.", show_default=False)
    ] = None,
    cards: Annotated[str, typer.Option(help="all, none, names with commas, or a TOML file of one's own.")] = "all",
    as_json: Annotated[bool, typer.Option("--json", help="Print the tables as JSON.")] = False,
) -> None:
    """Print what there is: methods, schemes with exact bits per weight, who holds and runs them, and number formats."""
    schemes = tuple(Scheme.parse(text) for text in scheme) if scheme else known_schemes()
    chosen = [] if cards == "none" else load_cards(cards)
    shapes = [_shape(shape)] if model is None else _matrices(model)
    entries = [catalogue_entry(each, shapes) for each in schemes]
    of_what = f"one matrix of {shape}" if model is None else f"the {len(shapes)} matrices of {model}"
    if as_json:
        print(json.dumps(_record(of_what, entries, chosen), ensure_ascii=False))
        return
    console = Console()
    console = console if console.is_terminal else Console(width=190)
    if not scheme:
        console.print(_method_table())
    console.print(_scheme_table(of_what, entries, chosen))
    if not scheme:
        console.print(_number_table(number_formats()))
        return
    for entry in entries:
        for sentence in (*entry.advice, *(f"{name}: {reason}" for name, reason in entry.refusals.items())):
            console.print(f"{entry.scheme}: {sentence}", markup=False, highlight=False)


def _shape(text: str) -> Shape:
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if not match or not all(map(int, match.groups())):
        raise UsageError(f"--shape is OUTxIN, for example {EXAMPLE}, not {text!r}")
    return int(match.group(1)), int(match.group(2))


def _matrices(model: str) -> list[Shape]:
    """Shapes of what a run of that model would quantise by default; only headers are read."""
    checkpoint = Checkpoint.open(resolve(model, report=announce).folder)
    names = frozenset(checkpoint.tensors)
    found = [info.shape for info in checkpoint.tensors.values() if role_of(info, checkpoint.config, names) is None]
    if not found:
        raise UsageError(f"{model} has no matrix in its decoder blocks that a run would quantise")
    return [(shape[0], shape[1]) for shape in found]


def _record(of_what: str, entries: list[CatalogueEntry], cards: list[Card]) -> dict[str, Any]:
    methods = [dataclasses.asdict(method) | {"needs_calibration": method.needs_calibration} for method in METHODS.values()]
    schemes = []
    for entry in entries:
        native = [card.slug for card in native_cards(entry.scheme, cards)]
        schemes.append(dataclasses.asdict(entry) | {"scheme": str(entry.scheme), "native_cards": native})
    return {
        "bits_for": of_what,
        "methods": methods,
        "schemes": schemes,
        "number_formats": [dataclasses.asdict(each) for each in number_formats()],
    }


def _method_table() -> Table:
    table = Table("method", "needs text", "scheme", "what it does", title="Methods", title_justify="left")
    for method in METHODS.values():
        scheme = method.scheme or ("integers" if method.learned else "any")
        table.add_row(method.name, "yes" if method.needs_calibration else "no", scheme, method.summary)
    return table


def _scheme_table(of_what: str, entries: list[CatalogueEntry], cards: list[Card]) -> Table:
    table = Table(
        "scheme", "names", "bits per weight", "stored", "formats", "engines", "multiplied natively by",
        title=f"Schemes, bits for {of_what} (scales and zero points included)", title_justify="left",
    )  # fmt: skip
    for column in table.columns[2:4]:
        column.justify = "right"
    for entry in entries:
        native = [card.name for card in native_cards(entry.scheme, cards)]
        table.add_row(
            str(entry.scheme),
            ", ".join(entry.names),
            f"{entry.ideal_bits:.4f}",
            "-" if entry.stored_bits is None else f"{entry.stored_bits:.4f}",
            ", ".join(entry.codecs) or "none",
            ", ".join(f"readers of {name}" for name in entry.engines) or "none: own reader",
            ", ".join(native) or ("none: unpacked to 16 bits" if cards else "-"),
        )
    return table


def _number_table(found: tuple[NumberFormat, ...]) -> Table:
    table = Table(
        "format", "for", "bits", "numbers", "lowest", "largest", "smallest above 0", "step after 1", "NaN and infinities",
        title="Number formats, before scaling", title_justify="left",
    )  # fmt: skip
    for column in table.columns[2:]:
        column.justify = "right"
    for each in found:
        step = "-" if each.step is None else f"{each.step:g}"
        table.add_row(
            each.name, each.use, str(each.bits), f"{each.numbers:,}", f"{each.lowest:g}", f"{each.largest:g}",
            f"{each.smallest:g}", step, f"{each.specials:,}",
        )  # fmt: skip
    return table


if __name__ == "__main__":
    run_app(app)
