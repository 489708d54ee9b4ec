"""Quantise a model, write it packed, read it back, measure it, and bind everything in one manifest."""

from __future__ import annotations

import datetime
import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer

from calib.conventions import CONVENTIONS, get_convention
from calib.cut import BOS_CHOICES
from calib.methods import METHODS, get_method
from eval.capacity.implications import Assumptions
from formats.fates import Quantise, Rule
from formats.sizing import SizeTarget
from pipelines.cli import HELP_OPTIONS, run_app
from pipelines.prepare import Prepared, Request, prepare
from pipelines.progress import Progress
from pipelines.recipe import DEFAULT_BITS, DEFAULT_GROUP, find_recipe, load_recipe, parse_group_size, preset_names
from pipelines.summary import show_finished, show_plan
from quant.errors import UsageError
from quant.scheme import SCALE_BYTES, ScaleType, Scheme

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
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help=f"A scheme per pattern instead of the four above: {', '.join(preset_names())}, or a TOML file.",
            rich_help_panel=_QUALITY,
        ),
    ] = None,
    clip: Annotated[
        bool,
        typer.Option(
            "--clip/--no-clip", help="Calibrated methods: also search how far to clip every block.", rich_help_panel=_QUALITY
        ),
    ] = True,
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
    rules = _rules(context, method, bits, group_size, symmetric, scale_dtype, recipe)
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
        evaluation_windows=_window_count(evaluation_windows),
        convention=scoring,
        evaluation_start=evaluation_start,
        calibration_start=calibration_start,
        seed=seed,
        cards=cards,
        output=output or _default_output(model, method, rules, recipe),
        device=_device(device),
        batch=batch,
        clip=clip,
        tune_steps=tune,
        learn_iterations=learn_iterations,
        target=_target(context, target_bpw, target_bytes),
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


def _rules(
    context: typer.Context, method: str, bits: int, group_size: str, symmetric: bool, scale_dtype: str, recipe: str | None
) -> tuple[Rule, ...]:
    """One rule for everything from the options, or those of the recipe; both at once would contradict each other."""
    if recipe is None:
        scales = cast(ScaleType, _choice("--scale-dtype", scale_dtype, tuple(SCALE_BYTES)))
        scheme = Scheme(bits, "sym" if symmetric else "zp", parse_group_size(group_size), scales)
        return (Rule("*", Quantise(scheme, get_method(method).quantizer)),)
    names = ("bits", "group_size", "symmetric", "scale_dtype")
    given = [name for name in names if getattr(context.get_parameter_source(name), "name", "DEFAULT") != "DEFAULT"]
    if given:
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        raise UsageError(f"{flags} cannot go with --recipe, which says the same per pattern: put it into {recipe}")
    return load_recipe(find_recipe(recipe), method)


def _target(context: typer.Context, bits_per_weight: float | None, file_bytes: int | None) -> SizeTarget | None:
    """The size to be met, if one was given; the width is then not the user's to choose."""
    if bits_per_weight is None and file_bytes is None:
        return None
    if bits_per_weight is not None and file_bytes is not None:
        raise UsageError("--target-bpw and --target-bytes say the same in two ways: give one of them")
    if getattr(context.get_parameter_source("bits"), "name", "DEFAULT") != "DEFAULT":
        raise UsageError("--bits cannot go with a size target, which chooses the width of every matrix")
    if not (bits_per_weight or file_bytes or 0) > 0:
        raise UsageError(f"a size target is above 0, not {bits_per_weight if file_bytes is None else file_bytes}")
    return SizeTarget(bits_per_weight, file_bytes)


def _window_count(text: str) -> int | Literal["all"]:
    if text == "all":
        return "all"
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"--evaluation-windows is a number above 0 or 'all', not {text!r}")
    return int(text)


def _choice(option: str, value: str, known: tuple[str, ...]) -> Any:
    if value not in known:
        raise UsageError(f"{option} is one of {', '.join(known)}; got {value!r}")
    return value


def _device(text: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise UsageError(f"--device is cpu, cuda or cuda:N; got {text!r}")
    if text != "cpu":
        import torch

        if not torch.cuda.is_available():
            raise UsageError(f"--device {text}: torch sees no CUDA device here; use --device cpu")
    return text


def _default_output(model: str, method: str, rules: tuple[Rule, ...], recipe: str | None) -> Path:
    stem = Path(model.partition("@")[0].rstrip("/")).name or "model"
    fate = rules[0].fate
    single = fate.scheme if recipe is None and isinstance(fate, Quantise) else None
    what = str(single) if single is not None else Path(recipe or "recipe").stem
    return Path("artifacts") / f"{stem}-{method}-{what}"


if __name__ == "__main__":
    run_app(app)
