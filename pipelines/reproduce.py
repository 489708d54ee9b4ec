"""Compute the source text's labs again and print its published numbers beside ours."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from calib.corpora import load_corpus
from calib.tokenizer import TextTokenizer
from calib.windows import evaluation_windows, tokenise
from eval.lab4 import ActivationResult, Lab4, LabResult, OutlierFigures, load_lab4, misses, run_lab4
from formats.sources import Source, resolve
from pipelines.cli import HELP_OPTIONS, run_app
from pipelines.progress import Progress, announce
from quant.errors import BitledgerError, HubUnreachable, UsageError

LABS = ("lab4",)

app = typer.Typer(add_completion=False, context_settings=HELP_OPTIONS)


class NotReproduced(BitledgerError):
    """A figure that should have come out and did not."""

    exit_code = 1


@app.command()
def main(
    lab: Annotated[str, typer.Argument(metavar="LAB", help=f"Which lab: {', '.join(LABS)}.")],
    model: Annotated[
        str | None,
        typer.Option(help="Model to measure; by default the published one, else the embedded one.", show_default=False),
    ] = None,
    corpus: Annotated[str, typer.Option(help="wikitext2, or a file of WikiText-2's raw test split.")] = "wikitext2",
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """Print a lab's published numbers beside measured ones; exit code 1 when they should agree and do not."""
    if lab not in LABS:
        raise UsageError(f"no such lab: {lab!r} (there are: {', '.join(LABS)})")
    figures = load_lab4()
    text = load_corpus(corpus, report=announce)
    source, said = _source(figures, model)
    length, first = figures.window_tokens, figures.calibration_start
    needed = first + figures.calibration_windows * length
    tokens = tokenise(text, TextTokenizer.from_folder(source.folder), at_least=needed)
    windows = evaluation_windows(tokens, count=figures.windows, length=figures.window_tokens, bos="none")

    import torch  # heavy imports come after every check

    from eval.lab4_activations import activation_misses, largest_inputs, outliers, run_activation_rows
    from eval.perplexity import window_losses
    from formats.reader import load_model

    progress = Progress()
    with progress.stage("float", unit="window") as report:
        loaded = load_model(source.folder)
        baseline = window_losses(loaded, windows, progress=report).perplexity
    with progress.stage("lab4", unit="row") as report:
        results = list(run_lab4(loaded, figures, windows, report))
    with progress.stage("activations", unit="row") as report:
        ids = torch.from_numpy(tokens.ids[first:needed].reshape(-1, length).copy())
        largest = largest_inputs(loaded, ids)
        found = outliers(loaded, largest)
        rounded = list(run_activation_rows(loaded, figures, windows, largest, report))
    published = source.requested == figures.published_model
    comparable = published or source.requested == figures.embedded_model
    wrong = misses(figures, baseline, results, published) if comparable else []
    wrong += activation_misses(figures, found, rounded, published) if comparable else []
    if as_json:
        print(json.dumps(_record(said, baseline, results, wrong) | _activation_record(found, rounded)))
    else:
        _show(said, windows.describe(), figures, baseline, results)
        _show_activations(figures, found, rounded)
        if comparable and not wrong:
            print("every figure that is known for this model came out within its tolerance")
    if wrong:
        raise NotReproduced("; ".join(wrong))


def _source(figures: Lab4, model: str | None) -> tuple[Source, str]:
    """The model asked for; without one the published model, or the embedded one with the reason said."""
    if model is not None:
        source = resolve(model, report=announce)
        return source, source.note
    try:
        source = resolve(figures.published_model, report=announce)
    except HubUnreachable as error:
        source = resolve(figures.embedded_model, report=announce)
        return source, f"{source.note}; the published model cannot be had: {error}"
    return source, source.note


def _record(said: str, baseline: float, results: list[LabResult], wrong: list[str]) -> dict[str, Any]:
    rows = [
        {
            "label": result.row.label,
            "scheme": result.row.scheme,
            "bits_per_weight": result.bits_per_weight,
            "nbytes": result.nbytes,
            "mean_relative_error": result.mean_relative_error,
            "perplexity": result.perplexity,
            "published": result.row.published,
            "embedded": result.row.embedded,
        }
        for result in results
    ]
    return {"model": said, "float_perplexity": baseline, "rows": rows, "misses": wrong}


def _show(said: str, windows: str, figures: Lab4, baseline: float, results: list[LabResult]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console = console if console.is_terminal else Console(width=160)
    console.print(f"measured on: {said}", markup=False, highlight=False)
    console.print(windows, markup=False, highlight=False)
    table = Table(
        "scheme",
        "bits/w",
        "MB",
        "rel. error",
        "perplexity",
        "published bits, MB, error, perplexity (SmolLM2-135M)",
        "before (embedded)",
    )
    table.add_row("float32", "", "", "", f"{baseline:.4f}", f"{figures.published_float:.4f}", f"{figures.embedded_float:.4f}")
    for result in results:
        row = result.row
        given = "-" if row.published is None else "{:.3f}  {:.2f}  {:.4f}  {:.4f}".format(*row.published)
        before = "-" if row.embedded is None else f"{row.embedded:.4f}"
        size = f"{result.nbytes / 1e6:.2f}"
        measured = f"{result.perplexity:.4f}"
        table.add_row(
            row.label, f"{result.bits_per_weight:.3f}", size, f"{result.mean_relative_error:.4f}", measured, given, before
        )
    console.print(table)


def _activation_record(found: OutlierFigures, results: list[ActivationResult]) -> dict[str, Any]:
    rows = [
        {"label": r.row.label, "alpha": r.row.alpha, "perplexity": r.perplexity, "published": r.row.published} for r in results
    ]
    return {"outliers": found.model_dump(), "activation_rows": rows}


def _show_activations(figures: Lab4, found: OutlierFigures, results: list[ActivationResult]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console = console if console.is_terminal else Console(width=160)
    table = Table("int8 weights and inputs", "perplexity", "published (SmolLM2-135M)", "before (embedded)")
    for r in results:
        before = "-" if r.row.embedded is None else f"{r.row.embedded:.4f}"
        table.add_row(r.row.label, f"{r.perplexity:.4f}", f"{r.row.published:.4f}", before)
    console.print(table)
    table = Table("largest inputs", "here", "published (SmolLM2-135M)", "before (embedded)")
    columns = (found, figures.published_outliers, figures.embedded_outliers)
    table.add_row("worst layer", *(column.worst_layer for column in columns))
    for name in ("largest", "median", "ratio", "median_ratio", "worst_weight_ratio"):
        table.add_row(name.replace("_", " "), *(f"{getattr(column, name):.4g}" for column in columns))
    console.print(table)


if __name__ == "__main__":
    run_app(app)
