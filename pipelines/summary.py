"""What a run shows a person: the plan of a dry run, and the table at the end; all figures come from the plan or the manifest."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from calib.footprint import held_states_bytes, peak_bytes
from formats.codec import get_codec
from formats.fates import Alias, Keep, Quantise, TensorPlan
from formats.folder import REPORT_NAME, WINDOWS_NAME
from formats.manifest import Manifest, MeasurementRecord
from formats.tables import embedding_advice
from formats.units import size_text
from pipelines.prepare import Prepared
from quant.scheme import Scheme


def _console() -> Console:
    """Standard output; in a pipe wide enough that no table is folded."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def _fate(plan: TensorPlan) -> tuple[str, str]:
    if isinstance(plan.fate, Quantise):
        copied = f" (a copy of {plan.copy_of})" if plan.copy_of else ""
        return "quantise", f"{plan.fate.quantizer} {plan.fate.scheme} {plan.fate.codec}{copied}"
    if isinstance(plan.fate, Keep):
        return "keep", f"{plan.fate.reason}{f', as {plan.stored_dtype}' if plan.fate.dtype else ''}"
    assert isinstance(plan.fate, Alias)
    return "alias", f"of {plan.fate.of}"


def _plan_record(prepared: Prepared) -> dict[str, Any]:
    """The plan as JSON: fates and bytes per tensor, bytes per file, expected peak memory in bytes."""
    tensors = []
    for plan in prepared.plans:
        fate, detail = _fate(plan)
        nbytes = sum(spec.nbytes for spec in plan.stored)
        tensors.append(
            {
                "name": plan.name,
                "dtype": plan.info.dtype,
                "shape": plan.info.shape,
                "fate": fate,
                "detail": detail,
                "nbytes": nbytes,
            }
        )
    return {
        "source": prepared.source.note,
        "output": str(prepared.request.output),
        "tensors": tensors,
        "files": [{"name": shard.name, "nbytes": shard.nbytes, "header_bytes": shard.header_bytes} for shard in prepared.shards],
        "peak_memory_bytes": peak_bytes(
            prepared.checkpoint,
            prepared.plans,
            prepared.calibration,
            prepared.evaluation,
            prepared.request.batch,
            prepared.request.streams,
            prepared.request.self_written_windows,
            prepared.request.tune_steps > 0,
            prepared.kv is not None,
        ),
        "held_states_bytes": held_states_bytes(
            prepared.checkpoint, prepared.calibration, prepared.request.streams, prepared.request.self_written_windows
        ),
        "convention": prepared.request.convention.name,
        "evaluation": prepared.evaluation.describe(),
        "calibration": None if prepared.calibration is None else prepared.calibration.describe(),
        "notes": [text for _, text in prepared.notes],
    }


def show_plan(prepared: Prepared, as_json: bool) -> None:
    """Print the plan: nothing has been computed or written."""
    record = _plan_record(prepared)
    if as_json:
        print(json.dumps(record, ensure_ascii=False))
        return
    console = _console()
    console.print(record["source"], markup=False, highlight=False)
    table = Table("tensor", "dtype", "shape", "fate", "how or why", "bytes", title="Fates", title_justify="left")
    table.columns[-1].justify = "right"
    for tensor in record["tensors"]:
        shape = " x ".join(map(str, tensor["shape"]))
        table.add_row(tensor["name"], tensor["dtype"], shape, tensor["fate"], tensor["detail"], f"{tensor['nbytes']:,}")
    console.print(table)
    for file in record["files"]:
        console.print(f"{file['name']}: {file['nbytes']:,} bytes, of which {file['header_bytes']:,} header", highlight=False)
    counts = Counter(tensor["fate"] for tensor in record["tensors"])
    console.print(f"{', '.join(f'{count} {fate}' for fate, count in counts.items())}; output {record['output']}", highlight=False)
    states = record["held_states_bytes"]
    held = (
        f", of which hidden states of the calibration {size_text(states)}: held in memory, nothing is spilled" if states else ""
    )
    console.print(f"expected peak memory {size_text(record['peak_memory_bytes'])}{held}", highlight=False)
    console.print(f"convention: {record['convention']}", markup=False, highlight=False)
    console.print(f"evaluation: {record['evaluation']}", markup=False, highlight=False)
    console.print(f"calibration: {record['calibration'] or 'none: this method needs no data'}", markup=False, highlight=False)
    for note in record["notes"]:
        console.print(f"note: {note}", markup=False, highlight=False)
    if prepared.request.method.transform is not None:
        console.print("normalisations are kept in place and size, but may take up scaling factors (folded)", highlight=False)
    console.print("no problems found; nothing was written", highlight=False)


def show_finished(prepared: Prepared, manifest: Manifest, sha256: str) -> None:
    """Print what was made, how good it is, what it means on each card, and what to type next."""
    console = _console()
    console.print(f"source: {manifest.source.note}", markup=False, highlight=False)
    console.print(_result_table(prepared, manifest))
    if manifest.cards:
        console.print(_card_table(manifest))
        console.print(
            "times are bounds from bandwidth and dense rates, not measurements; units are decimal (GB = 10^9 bytes)",
            highlight=False,
        )
    notes = [f"{note.count} x {note.kind}: {note.text[:200]}" for note in manifest.notes]
    console.print(f"notes: {len(notes) or 'none'}", highlight=False)
    for note in notes:
        console.print(f"  {note}", markup=False, highlight=False)
    folder = prepared.request.output
    console.print(f"manifest {folder / 'manifest.json'} sha256 {sha256[:16]}", markup=False, highlight=False)
    console.print("next:", highlight=False)
    console.print(
        f"  {folder / REPORT_NAME}        # this run as a picture; its windows: {WINDOWS_NAME}", markup=False, highlight=False
    )
    quoted, python = shlex.quote(str(folder)), shlex.quote(_python())
    engines = all(get_codec(plan.fate.codec).quant_method for plan in prepared.plans if isinstance(plan.fate, Quantise))
    load = f"from transformers import AutoModelForCausalLM as A; print(A.from_pretrained({str(folder)!r}))"
    if not engines:
        load = f"from pathlib import Path; from formats.reader import load_model; print(load_model(Path({str(folder)!r})))"
    console.print(f"  {python} -m pipelines.verify {quoted}", markup=False, highlight=False)
    console.print(f"  {python} -c {shlex.quote(load)}", markup=False, highlight=False)
    if engines:
        console.print(f"  vllm serve {quoted}        # where vLLM is installed", markup=False, highlight=False)
    for sentence in _advice(prepared):
        console.print(f"  mind: {sentence}", markup=False, highlight=False)


def _python() -> str:
    """The running interpreter as one would type it here."""
    here, running = Path.cwd(), Path(sys.executable)
    return str(running.relative_to(here)) if running.is_relative_to(here) else str(running)


def _advice(prepared: Prepared) -> list[str]:
    """What engines need to load these schemes, each sentence once."""
    plans = [plan for plan in prepared.plans if isinstance(plan.fate, Quantise)]
    fates = [plan.fate for plan in plans if isinstance(plan.fate, Quantise)]
    found = [sentence for fate in fates for sentence in get_codec(fate.codec).advice(fate.scheme)]
    return list(dict.fromkeys([*found, *embedding_advice(plan.module for plan in plans)]))


def _result_table(prepared: Prepared, manifest: Manifest) -> Table:
    table = Table("", "", title=f"{manifest.method} of {manifest.source.requested}", title_justify="left", show_header=False)
    quantised = [record for record in manifest.tensors if record.fate == "quantised"]
    fates = Counter(record.fate for record in manifest.tensors)
    source_bytes = sum(info.nbytes for info in prepared.checkpoint.tensors.values())
    total = sum(line.total_bytes for line in manifest.ledger)
    bits = manifest.bits_per_weight
    table.add_row("tensors", ", ".join(f"{count} {fate}" for fate, count in fates.items()))
    for scheme, count in sorted(Counter(record.scheme for record in quantised).items(), key=lambda item: str(item[0])):
        chosen = [record for record in quantised if record.scheme == scheme]
        stored = sum((record.bits_per_weight or 0) * record.elements for record in chosen) / sum(
            record.elements for record in chosen
        )
        asked = Scheme.parse(str(scheme)).bits
        table.add_row(
            str(scheme), f"{count} matrices, {asked} bits asked, {stored:.4f} bits per weight stored with scales and zero points"
        )
    table.add_row(
        "bits per weight",
        f"{bits.quantised:.4f} quantised matrices ({bits.quantised_elements:,}), "
        f"{bits.whole_file:.4f} whole file ({bits.all_elements:,})",
    )
    table.add_row("weight files", f"{size_text(total)}, {total / source_bytes:.1%} of the source's {size_text(source_bytes)}")
    for measurement in manifest.measurements:
        table.add_row(measurement.name, _value(measurement))
    table.add_row("convention", prepared.request.convention.name)
    table.add_row("windows", prepared.evaluation.describe())
    if prepared.calibration is not None:
        table.add_row("calibration", prepared.calibration.describe())
        table.add_row("overlap", f"{prepared.overlap:.2%} of the evaluation 13-grams stand in the calibration text")
    if manifest.source.kind == "embedded":
        table.add_row(
            "caution",
            "these source weights lie on a block-32 affine 4-bit grid (Q4_1): schemes like it look better here than elsewhere",
        )
    table.add_row("peak memory", size_text(manifest.run.peak_rss_bytes))
    return table


def _value(measurement: MeasurementRecord) -> str:
    if measurement.value is None:
        return f"{measurement.flag}"
    text = f"{measurement.value:.4f}"
    if measurement.name.startswith("ln_"):
        ratio = f"{math.exp(measurement.value):.4f}" if measurement.value < 700 else "beyond 10^300"
        text = f"{measurement.value:+.4f} nats per token (ratio {ratio})"
    interval = measurement.interval
    if interval is None:
        return f"{text}, interval - (one window)"
    flag = f"; {measurement.flag}" if measurement.flag else ""
    return f"{text}, {interval.level:.0%} interval {interval.low:.4f} to {interval.high:.4f} over {measurement.n} windows{flag}"


def _card_table(manifest: Manifest) -> Table:
    first = manifest.cards[0]["assumptions"]
    assert isinstance(first, dict)
    total = sum(line.total_bytes for line in manifest.ledger)
    title = f"What {total:,} bytes mean for {first['prompt_tokens']} tokens in, {first['output_tokens']} out"
    table = Table(
        "card",
        "requests",
        "prefill",
        "step alone",
        "step full",
        "tokens/s full",
        "cost per M tokens",
        title=title,
        title_justify="left",
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for card in manifest.cards:
        price = card["price"]
        cost = card["cost_per_million_output_tokens"]
        currency = price["currency"] if isinstance(price, dict) else ""
        table.add_row(
            str(card["card_name"]),
            "-" if card["batch"] is None else f"{card['batch']:,}",
            _time(card["prefill_s"]),
            _time(card["step_alone_s"]),
            _time(card["step_full_batch_s"]),
            "-" if card["output_tokens_per_s_full_batch"] is None else f"{card['output_tokens_per_s_full_batch']:,.0f}",
            "-" if cost is None else f"{cost:.4f} {currency}",
        )
    return table


def _time(seconds: Any) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.3f} ms"
