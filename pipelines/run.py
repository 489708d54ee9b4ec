"""Quantise a model, write it packed, read it back, measure it, and bind everything in one manifest."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import typer

from calib.conventions import get_convention
from calib.methods import get_method
from eval.capacity.implications import Assumptions
from pipelines import arguments
from pipelines.cli import HELP_OPTIONS, run_app
from pipelines.options import (
    check_numbers,
    clips,
    default_output,
    device_name,
    own_options,
    rules_of,
    size_target,
    smoothing_of,
    window_count,
)
from pipelines.prepare import Prepared, prepare
from pipelines.progress import Progress
from pipelines.request import Request
from pipelines.summary import show_finished, show_plan
from quant.kvscheme import KvScheme

EMBEDDED = "smollm2-135m-instruct-q4_1"
DEFAULT_SHARD_BYTES = 5_000_000_000

app = typer.Typer(add_completion=False, context_settings=HELP_OPTIONS)


@app.command()
def main(
    context: typer.Context,
    method: arguments.Method,
    model: arguments.Model = EMBEDDED,
    bits: arguments.Bits = 4,
    group_size: arguments.GroupSize = "64",
    symmetric: arguments.Symmetric = True,
    full_range: arguments.FullRange = False,
    scale_dtype: arguments.ScaleDtype = "f16",
    scheme: arguments.Scheme = None,
    storage: arguments.Storage = None,
    activations: arguments.Activations = None,
    alpha: arguments.Alpha = None,
    percentile: arguments.Percentile = None,
    recipe: arguments.Recipe = None,
    clip: arguments.Clip = True,
    mse: arguments.Mse = False,
    order: arguments.Order = None,
    scale_policy: arguments.ScalePolicy = None,
    damping: arguments.Damping = None,
    asymmetric: arguments.Asymmetric = None,
    tune: arguments.Tune = 0,
    target_bpw: arguments.TargetBpw = None,
    target_bytes: arguments.TargetBytes = None,
    kv_cache: arguments.KvCache = "none",
    learn_iterations: arguments.LearnIterations = 60,
    corpus: arguments.Corpus = "pydoc",
    convention: arguments.Convention = "seed",
    calibration_windows: arguments.CalibrationWindows = 32,
    self_written: arguments.SelfWritten = 0,
    evaluation_windows: arguments.EvaluationWindows = "8",
    window: arguments.Window = None,
    evaluation_start: arguments.EvaluationStart = 0,
    calibration_start: arguments.CalibrationStart = None,
    bos: arguments.Bos = "auto",
    seed: arguments.Seed = 0,
    cards: arguments.Cards = "all",
    prompt_tokens: arguments.PromptTokens = 4000,
    output_tokens: arguments.OutputTokens = 2000,
    price_per_hour: arguments.PricePerHour = None,
    output: arguments.Output = None,
    force: arguments.Force = False,
    system_prompt: arguments.SystemPrompt = None,
    shard_bytes: arguments.ShardBytes = DEFAULT_SHARD_BYTES,
    device: arguments.Device = "cpu",
    batch: arguments.Batch = 4,
    dry_run: arguments.DryRun = False,
    as_json: arguments.AsJson = False,
) -> None:
    """Quantise MODEL with METHOD into a packed, hashed and measured artefact."""
    chosen = get_method(method)
    scoring = get_convention(convention, window=window, bos=bos)
    own = own_options(context, method, order=order, scale_policy=scale_policy, damping=damping, asymmetric=asymmetric)
    smoothing = smoothing_of(method, alpha, percentile)
    rules = rules_of(context, method, bits, group_size, symmetric, scale_dtype, recipe, own)
    check_numbers(context.params, scoring)
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
        clip=clips(context, method),
        smoothing=smoothing,
        tune_steps=tune,
        self_written_windows=self_written,
        learn_iterations=learn_iterations,
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
