"""Quantise a model, write it packed, read it back, measure it, and bind everything in one manifest."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from calib.conventions import CONVENTIONS, get_convention
from calib.cut import BOS_CHOICES
from calib.methods import METHODS, get_method
from eval.capacity.implications import Assumptions
from formats.codec import codec_names
from pipelines.cli import HELP_OPTIONS, run_app
from pipelines.options import default_output, device_name, own_options, rules_of, size_target, smoothing_share, window_count
from pipelines.prepare import Prepared, Request, prepare
from pipelines.progress import Progress
from pipelines.recipe import DEFAULT_BITS, DEFAULT_GROUP, preset_names
from pipelines.summary import show_finished, show_plan
from quant.errors import UsageError
from quant.kvscheme import ALIASES as SHORT_NAMES
from quant.kvscheme import KvScheme
from quant.scheme import ALIASES, SCALE_BYTES

EMBEDDED = "smollm2-135m-instruct-q4_1"
DEFAULT_SHARD_BYTES = 5_000_000_000

app = typer.Typer(add_completion=False, context_settings=HELP_OPTIONS)

_METHODS_HELP = "; ".join(f"{method.name}: {method.summary}" for method in METHODS.values())
_WINDOWS = ", ".join(f"{found.window} for {name}" for name, found in CONVENTIONS.items())
_CALIBRATION, _QUALITY, _FILES, _CARDS = "Text and calibration", "Scheme", "Output", "Cards"


@app.command()
def main(
    context: typer.Context,
    method: Annotated[str, typer.Argument(metavar="METHOD", help=f"How to quantise. {_METHODS_HELP}.")],
    model: Annotated[
        str, typer.Option(help="A name of models.toml, a hub id (org/name or org/name@revision), or a folder.")
    ] = EMBEDDED,
    bits: Annotated[int, typer.Option(help="Bits per code, 2 to 8.", rich_help_panel=_QUALITY)] = DEFAULT_BITS,
    group_size: Annotated[
        str, typer.Option(metavar="N|channel|tensor", help="Weights that share a scale.", rich_help_panel=_QUALITY)
    ] = str(DEFAULT_GROUP),
    symmetric: Annotated[
        bool,
        typer.Option(
            "--symmetric/--zero-point", help="Signed grid around 0, or an integer zero point.", rich_help_panel=_QUALITY
        ),
    ] = True,
    scale_dtype: Annotated[
        str, typer.Option(metavar="|".join(SCALE_BYTES), help="Type in which scales are stored.", rich_help_panel=_QUALITY)
    ] = "f16",
    scheme: Annotated[
        str | None,
        typer.Option(
            help=f"All of a scheme by name instead of the four above: {', '.join(ALIASES)}, or a string as python -m "
            "pipelines.methods prints it.",
            rich_help_panel=_QUALITY,
        ),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="|".join(codec_names()),
            help="How it is stored. dense holds any scheme and shape, but no engine reads it; by default what most engines read "
            "among those that hold the scheme.",
            rich_help_panel=_QUALITY,
            show_default=False,
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help=f"A scheme per pattern instead of the five above: {', '.join(preset_names())}, or a TOML file.",
            rich_help_panel=_QUALITY,
        ),
    ] = None,
    clip: Annotated[
        bool,
        typer.Option(
            "--clip/--no-clip", help="Calibrated methods: also search how far to clip every block.", rich_help_panel=_QUALITY
        ),
    ] = True,
    mse: Annotated[
        bool,
        typer.Option(
            "--mse",
            help="Shrink every block's range to the least squared error of its weights: needs no data, replaces --clip.",
            rich_help_panel=_QUALITY,
        ),
    ] = False,
    order: Annotated[
        str | None,
        typer.Option(metavar="energy|none", help="gptq: order of the columns; energy by default.", rich_help_panel=_QUALITY),
    ] = None,
    scale_policy: Annotated[
        str | None,
        typer.Option(
            metavar="static|updated",
            help="gptq: grids of the original weights (static, by default), or of each group's weights when it is due.",
            rich_help_panel=_QUALITY,
        ),
    ] = None,
    damping: Annotated[
        float | None,
        typer.Option(
            help="gptq: share of the mean diagonal that is added to it; 0.01 by default.",
            rich_help_panel=_QUALITY,
            show_default=False,
        ),
    ] = None,
    asymmetric: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="gptq: also make up for what earlier layers did to the inputs (GPTAQ), 0 to 1; off by default.",
            rich_help_panel=_QUALITY,
        ),
    ] = None,
    tune: Annotated[
        int,
        typer.Option(
            metavar="STEPS",
            help="Then train scales and norm weights end to end on the calibration windows, this many steps; codes stay.",
            rich_help_panel=_QUALITY,
        ),
    ] = 0,
    target_bpw: Annotated[
        float | None,
        typer.Option(
            help="At most so many bits per quantised weight: widths are allocated by sensitivity, and kept only if they beat the "
            "best uniform scheme.",
            rich_help_panel=_QUALITY,
            show_default=False,
        ),
    ] = None,
    target_bytes: Annotated[
        int | None,
        typer.Option(help="The same for the bytes of all weight files.", rich_help_panel=_QUALITY, show_default=False),
    ] = None,
    kv_cache: Annotated[
        str,
        typer.Option(
            metavar="none|" + "|".join(SHORT_NAMES),
            help="Also measure a quantised key-value cache, and store its calibrated scales: a name here, or a format in full "
            "such as int8-ktoken-vtoken-g32.",
            rich_help_panel=_QUALITY,
        ),
    ] = "none",
    alpha: Annotated[
        str,
        typer.Option(
            metavar="X|search",
            help="smoothquant: share of the inputs' range that moves into the weights, 0 to 1; searched per group of matrices.",
            rich_help_panel=_QUALITY,
        ),
    ] = "search",
    learn_iterations: Annotated[
        int, typer.Option(help="Methods with learned rounding: steps per block.", rich_help_panel=_QUALITY)
    ] = 60,
    corpus: Annotated[
        str,
        typer.Option(
            help="pydoc, wikitext2, hub:ORG/NAME (a data set; @REVISION, :CONFIG and :SPLIT may follow), or a .parquet, .jsonl "
            "or .txt file.",
            rich_help_panel=_CALIBRATION,
        ),
    ] = "pydoc",
    convention: Annotated[
        str,
        typer.Option(
            metavar="|".join(CONVENTIONS),
            help="How the text is joined, cut and scored; --window and --bos overrule it.",
            rich_help_panel=_CALIBRATION,
        ),
    ] = "seed",
    calibration_windows: Annotated[int, typer.Option(help="Windows to calibrate on.", rich_help_panel=_CALIBRATION)] = 32,
    self_written: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Calibrate on N more windows that the float model writes itself, continuing pieces of the calibration text.",
            rich_help_panel=_CALIBRATION,
        ),
    ] = 0,
    evaluation_windows: Annotated[
        str, typer.Option(metavar="N|all", help="Windows to measure on.", rich_help_panel=_CALIBRATION)
    ] = "8",
    window: Annotated[
        int | None,
        typer.Option(
            help=f"Tokens per window; by default the convention's: {_WINDOWS}.", rich_help_panel=_CALIBRATION, show_default=False
        ),
    ] = None,
    evaluation_start: Annotated[
        int, typer.Option(help="First token of the evaluation windows.", rich_help_panel=_CALIBRATION)
    ] = 0,
    calibration_start: Annotated[
        int | None,
        typer.Option(
            help="First token of the calibration windows; 200,000 or as far behind as the text reaches.",
            rich_help_panel=_CALIBRATION,
            show_default=False,
        ),
    ] = None,
    bos: Annotated[
        str,
        typer.Option(
            metavar="|".join(BOS_CHOICES),
            help="Start token: before every window, once before the text, or in place of every window's first token; "
            "auto: where the convention puts it if the tokenizer adds one.",
            rich_help_panel=_CALIBRATION,
        ),
    ] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of the intervals' resampling.", rich_help_panel=_CALIBRATION)] = 0,
    cards: Annotated[
        str, typer.Option(help="all, none, names with commas, or a TOML file of one's own.", rich_help_panel=_CARDS)
    ] = "all",
    prompt_tokens: Annotated[int, typer.Option(help="Tokens in of a planned request.", rich_help_panel=_CARDS)] = 4000,
    output_tokens: Annotated[int, typer.Option(help="Tokens out of a planned request.", rich_help_panel=_CARDS)] = 2000,
    price_per_hour: Annotated[
        float | None,
        typer.Option(help="Price of a card-hour in USD, instead of the cards' own.", rich_help_panel=_CARDS, show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder to write; artifacts/MODEL-METHOD-SCHEME by default.", rich_help_panel=_FILES, show_default=False
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", "--yes", "-y", help="Replace an earlier artefact in that folder.", rich_help_panel=_FILES)
    ] = False,
    system_prompt: Annotated[
        Path | None, typer.Option(help="Text file to be recorded as the deployment's system prompt.", rich_help_panel=_FILES)
    ] = None,
    shard_bytes: Annotated[
        int, typer.Option(help="Largest size of one weight file.", rich_help_panel=_FILES)
    ] = DEFAULT_SHARD_BYTES,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    batch: Annotated[int, typer.Option(help="Windows per forward pass.")] = 4,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print fates, exact bytes and problems, and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan or the manifest as JSON.")] = False,
) -> None:
    """Quantise MODEL with METHOD into a packed, hashed and measured artefact."""
    chosen = get_method(method)
    scoring = get_convention(convention, window=window, bos=bos)
    own = own_options(context, method, order=order, scale_policy=scale_policy, damping=damping, asymmetric=asymmetric)
    rules = rules_of(context, method, bits, group_size, symmetric, scale_dtype, recipe, own)
    checked = {
        "--calibration-windows": calibration_windows,
        "--window": scoring.window - 1,
        "--batch": batch,
        "--learn-iterations": learn_iterations,
        "--shard-bytes": shard_bytes,
    }
    for name, number in checked.items():
        if number < 1:
            raise UsageError(f"{name} is too small: {number + (name == '--window')}")
    if self_written < 0:
        raise UsageError(f"--self-written takes a number of windows, 0 or more, not {self_written}")
    if tune < 0:
        raise UsageError(f"--tune takes a number of steps, 0 or more, not {tune}")
    if tune and calibration_windows < 2:
        raise UsageError("--tune holds a calibration window back to judge its steps: --calibration-windows must be 2 or more")
    if seed < 0:
        raise UsageError(f"--seed is 0 or more, not {seed}")
    given: dict[str, Any] = {name: value for name, value in context.params.items() if name not in _NOT_RECORDED}
    given["window"] = scoring.window
    today = datetime.datetime.now(datetime.UTC).date()
    request = Request(
        method=chosen,
        model=model,
        rules=rules,
        corpus=corpus,
        calibration_windows=calibration_windows,
        evaluation_windows=window_count(evaluation_windows),
        convention=scoring,
        evaluation_start=evaluation_start,
        calibration_start=calibration_start,
        seed=seed,
        cards=cards,
        output=output or default_output(model, method, rules, recipe),
        device=device_name(device),
        batch=batch,
        clip=clip and not mse,
        tune_steps=tune,
        self_written_windows=self_written,
        learn_iterations=learn_iterations,
        alpha=smoothing_share(context, method, alpha),
        target=size_target(context, target_bpw, target_bytes),
        kv_scheme=None if kv_cache == "none" else KvScheme.parse(kv_cache),
        force=force,
        shard_bytes=shard_bytes,
        system_prompt=system_prompt,
        assumptions=Assumptions(
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            price_per_hour=price_per_hour,
            price_date=today if price_per_hour is not None else None,
        ),
        options={name: str(value) if isinstance(value, Path) else value for name, value in given.items()},
    )
    prepared = prepare(request)
    progress = Progress()
    _check_values(prepared, progress)
    if dry_run:
        show_plan(prepared, as_json)
        return
    from pipelines.job import Job  # heavy imports come after every check

    finished = Job(prepared, progress).execute()
    if as_json:
        print(json.dumps(finished.manifest.model_dump(mode="json"), ensure_ascii=False))
    else:
        show_finished(prepared, finished.manifest, finished.sha256)


def _check_values(prepared: Prepared, progress: Progress) -> None:
    """Refuse NaN and infinities; what takes no second needs no progress line before its error."""
    if sum(file.nbytes for file in prepared.checkpoint.weight_files) < _SOON_READ_BYTES:
        prepared.checkpoint.check_finite()
        return
    with progress.stage("check values", unit="MB") as report:
        prepared.checkpoint.check_finite(lambda done, total: report(done // 10**6, total // 10**6))


_SOON_READ_BYTES = 1_000_000_000
_NOT_RECORDED = frozenset({"output", "force", "dry_run", "as_json", "method"})


if __name__ == "__main__":
    run_app(app)
