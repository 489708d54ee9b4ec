"""Measure a finished artefact on its exact packed files, against its float model or another artefact, and write it down.

Every part (``language``, one per task, the deployment suite) goes into the manifest as soon as it is done, with a row per window
or item beside the weights. Exit code 1: the files are not those of the manifest, or the baseline itself is broken.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from calib.conventions import Convention, get_convention
from calib.corpora import load_corpus
from calib.tokenizer import TextTokenizer
from calib.windows import Windows, tokenise
from formats.integrity import verify_bytes
from formats.manifest import NAME, Manifest
from pipelines.cli import HELP_OPTIONS, run_app
from pipelines.options import device_name
from pipelines.progress import Progress, announce
from pipelines.reference import Reference, find_reference
from pipelines.suite import Margins, Suite, SuiteName, load_suite
from quant.errors import GateFailed, UsageError, WindowsOverlap

if TYPE_CHECKING:
    from eval.pair import Pair
    from eval.result import PartResult

_MEGABYTE = 1_000_000
PARTS = ("language",)

app = typer.Typer(add_completion=False, context_settings=HELP_OPTIONS)


@dataclass(frozen=True, slots=True)
class Asked:
    """The evaluation that was asked for, after all checks."""

    folder: Path
    manifest: Manifest
    reference: Reference
    tokenizer: TextTokenizer
    windows: Windows
    suite: SuiteName
    sizes: Suite
    margins: Margins
    parts: tuple[str, ...]
    seed: int
    batch: int
    device: str


@app.command()
def main(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help=f"Folder of an artefact, with its {NAME}.")],
    against: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL|DIR", help="What it is compared with: a model or another artefact; by default what it was made from."
        ),
    ] = None,
    suite: Annotated[str, typer.Option(metavar="quick|standard|full", help="How much is measured.")] = "quick",
    only: Annotated[
        str | None, typer.Option(metavar="PART,...", help=f"Only these parts: {', '.join(PARTS)}.", show_default=False)
    ] = None,
    corpus: Annotated[
        str | None, typer.Option(help="Text of the language part; by default the one that the run evaluated on.")
    ] = None,
    windows: Annotated[
        int | None, typer.Option(min=1, help="Windows of the language part, in place of the suite's number.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of every bootstrap and every choice of items.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Windows or requests that go through a model at a time.")] = 4,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print the measurements as JSON.")] = False,
) -> None:
    """Measure an artefact's exact files: language, tasks and deployment, paired with its float model."""
    name, sizes, margins = load_suite(suite)
    parts = _parts(only)
    where = device_name(device)
    if not folder.is_dir() or not (folder / NAME).is_file():
        raise UsageError(f"{folder} holds no {NAME}: give the folder of a finished artefact")
    progress = Progress()
    manifest = _verified(folder, progress)
    reference = find_reference(manifest, against)
    tokenizer = _tokenizer(folder, reference)
    cut = _windows(manifest, tokenizer, corpus, windows or sizes.windows)
    asked = Asked(folder, manifest, reference, tokenizer, cut, name, sizes, margins, parts, seed, batch, where)
    done = evaluate(asked, progress)
    _show(asked, done, as_json)


def _parts(only: str | None) -> tuple[str, ...]:
    wanted = PARTS if only is None else tuple(only.split(","))
    for part in wanted:
        if part not in PARTS:
            raise UsageError(f"no such part: {part!r} (there are: {', '.join(PARTS)})")
    return wanted


def _verified(folder: Path, progress: Progress) -> Manifest:
    """The manifest, after every file was found to be what it says: what is measured is what is listed. Raises Broken."""
    with progress.stage("hash", unit="MB") as report:
        return verify_bytes(folder, progress=lambda done, total: report(done // _MEGABYTE, total // _MEGABYTE))


def _tokenizer(folder: Path, reference: Reference) -> TextTokenizer:
    """The artefact's tokenizer, which must be the reference's: token ids of another one mean other words."""
    ours = TextTokenizer.from_folder(folder)
    theirs = TextTokenizer.from_folder(reference.folder)
    if ours.digest != theirs.digest:
        sample = "Pressure relief valves 0.5 MPa, 安全阀.\n\tdef f(x): return x"
        if ours.encode(sample).tolist() != theirs.encode(sample).tolist():
            raise UsageError(
                f"{folder} and {reference.name} cut text into different tokens (tokenizers {ours.digest[:12]} and "
                f"{theirs.digest[:12]}): compare models with one tokenizer"
            )
    return ours


def _windows(manifest: Manifest, tokenizer: TextTokenizer, corpus: str | None, count: int) -> Windows:
    """The first ``count`` windows by the run's own convention. Raises WindowsOverlap where it calibrated on them."""
    options = manifest.options
    convention = _convention(options)
    text = load_corpus(corpus or str(options.get("corpus", "pydoc")), join=convention.join, report=announce)
    start = int(str(options.get("evaluation_start", 0)))
    tokens = tokenise(text, tokenizer, at_least=start + count * (convention.window - 1))
    found = convention.windows(tokens, count=count, start=start)
    used = manifest.digests.calibration
    if used is not None and used.corpus_sha256 == found.corpus_sha256:
        first, last = used.span_tokens
        if first < found.span[1] and found.span[0] < last:
            raise WindowsOverlap(
                f"the artefact was calibrated on tokens {first:,} to {last:,} of this text, and {count} windows reach to token "
                f"{found.span[1]:,}: lower --windows, or give another --corpus"
            )
    return found


def _convention(options: dict[str, Any]) -> Convention:
    name = str(options.get("convention", "seed"))
    return get_convention(name, window=options.get("window"), bos=str(options.get("bos", "auto")))


def evaluate(asked: Asked, progress: Progress) -> list[PartResult]:
    """Measure part by part; each is in the manifest before the next begins. Raises GateFailed for a broken baseline."""
    from eval.pair import Pair
    from formats.reader import load_model  # heavy imports come after every check
    from pipelines.evaluations import append

    with progress.stage("load", total=2, unit="model") as report:
        artefact = load_model(asked.folder).to(asked.device)
        report(1, 2)
        reference = load_model(asked.reference.folder).to(asked.device)
        report(2, 2)
    pair = Pair(
        artefact,
        reference,
        asked.tokenizer,
        asked.folder,
        asked.manifest.weights(),
        asked.reference.weights,
        asked.reference.name,
        asked.seed,
        asked.batch,
    )
    done = []
    for part in asked.parts:
        found = _MEASURES[part](asked, pair, progress)
        append(asked.folder, found)
        done += found
    return done


def _language(asked: Asked, pair: Pair, progress: Progress) -> list[PartResult]:
    from eval.language import measure_language

    _check_baseline(asked, pair, progress)
    with progress.stage("language", unit="window") as report:
        return [measure_language(pair, asked.windows, floor=asked.sizes.noise_floor, progress=report)]


def _check_baseline(asked: Asked, pair: Pair, progress: Progress) -> None:
    """Score one window with the reference: a broken one is named before anything is measured against it."""
    import dataclasses

    from eval.perplexity import window_losses
    from eval.sanity import broken_baseline

    first = dataclasses.replace(asked.windows, ids=asked.windows.ids[:1], tail=None)
    with progress.stage("check baseline", unit="window") as report:
        losses = window_losses(pair.reference, first, progress=report)
    why = broken_baseline(losses, int(pair.reference.config.get_text_config().vocab_size))
    if why is not None:
        raise GateFailed(f"{asked.reference.name}: {why}")


_MEASURES = {"language": _language}


def _show(asked: Asked, done: list[PartResult], as_json: bool) -> None:
    if as_json:
        found = {
            "folder": str(asked.folder),
            "reference": asked.reference.name,
            "suite": asked.suite,
            "measurements": [measurement.record() for part in done for measurement in part.named()],
            "notes": [note for part in done for note in part.notes],
        }
        typer.echo(json.dumps(found, ensure_ascii=False, indent=1))
        return
    from pipelines.evaluation_text import show

    show(asked.folder, asked.reference.name, asked.windows, done, asked.margins)


if __name__ == "__main__":
    run_app(app)
