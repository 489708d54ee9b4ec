"""The picture of one run, ``report.png``: what the artefact lost by window, and what it does on cards (or what its bytes are).

Every figure in it is read from the manifest and the rows, or computed from the manifest's card records with the formulas of
``eval.capacity.bounds``; none is typed. The same content gives the same bytes under the same versions of matplotlib: a person's
own matplotlib settings are not used, pyplot is not imported, and no date is written.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from eval.capacity.bounds import step_time
from eval.capacity.implications import Assumptions
from eval.drawing import COLOURS, GREY, log_limits, shortened
from formats.manifest import Manifest, MeasurementRecord
from formats.units import size_text

WIDTH_PIXELS, HEIGHT_PIXELS = 1200, 600
_DPI = 100
_MOST_CARDS = 4
_MOST_POINTS = 80  # batches computed along one curve
_LEFT_PANEL, _RIGHT_PANEL = (0.08, 0.11, 0.39, 0.68), (0.575, 0.11, 0.405, 0.68)  # left, bottom, width, height of the picture
_KINDS = ("codes", "scales", "zeros", "shape", "kept", "header")


def run_plot(manifest: Manifest, rows: pd.DataFrame) -> bytes:
    """PNG of 1200 x 600 pixels; ``rows`` are those of ``eval.rows.window_rows`` for the same artefact."""
    data = io.BytesIO()
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        run_figure(manifest, rows).savefig(data, format="png", metadata={"Software": None})
    return data.getvalue()


def run_figure(manifest: Manifest, rows: pd.DataFrame) -> Figure:
    """The figure that ``run_plot`` renders, under the settings that hold when it is called."""
    figure = Figure(figsize=(WIDTH_PIXELS / _DPI, HEIGHT_PIXELS / _DPI), dpi=_DPI)
    FigureCanvasAgg(figure)
    _write_title(figure, manifest)
    _draw_windows(figure.add_axes(_LEFT_PANEL), manifest, rows)
    curves = [card for card in manifest.cards if isinstance(card.get("decode_flops_per_sequence"), int | float) and card["fits"]]
    right = figure.add_axes(_RIGHT_PANEL)
    if curves:
        _draw_cards(right, _chosen(curves))
    else:
        _draw_bytes(right, manifest, "none of the chosen cards is known to hold it" if manifest.cards else "no cards were chosen")
    return figure


def _write_title(figure: Figure, manifest: Manifest) -> None:
    bits = manifest.bits_per_weight
    schemes = Counter(str(record.scheme) for record in manifest.tensors if record.fate == "quantised").most_common()
    what = schemes[0][0] if schemes else "nothing quantised"
    if len(schemes) > 1:
        what = f"{what} and {len(schemes) - 1} other scheme{'s' if len(schemes) > 2 else ''}"
    stored = "" if bits.quantised is None else f"{bits.quantised:.5g} bits per weight quantised, "
    total = sum(line.total_bytes for line in manifest.ledger)
    below = f"{manifest.method}, {what}: {stored}{bits.whole_file:.5g} in the whole file, weights {size_text(total)}"
    lines = ((0.96, 15, "bold", shortened(manifest.source.requested, 70)), (0.91, 12, "normal", below))
    for height, size, weight, text in lines:
        figure.text(0.5, height, text, ha="center", va="center", fontsize=size, fontweight=weight, parse_math=False)


def _draw_windows(axes: Axes, manifest: Manifest, rows: pd.DataFrame) -> None:
    """Perplexity of float and artefact on every window, joined by a line as long as ln of their ratio."""
    before, after = _perplexities(rows, "float"), _perplexities(rows, "artefact")
    number = rows["window"].to_numpy()
    both = np.isfinite(before) & np.isfinite(after)
    size = float(np.clip(400 / len(rows), 4, 45))
    axes.set_yscale("log")
    axes.vlines(number[both], before[both], after[both], color=GREY, linewidth=min(1.2, size / 8), alpha=0.6)
    for values, colour, marker, label in ((before, COLOURS[0], "o", "float"), (after, COLOURS[1], "D", "artefact")):
        axes.scatter(number[np.isfinite(values)], values[np.isfinite(values)], s=size, color=colour, marker=marker, label=label)
    finite = np.concatenate([values[np.isfinite(values)] for values in (before, after)])
    log_limits(axes, "y", finite, below=0.06 if both.all() else 0.14, above=0.16)
    if not both.all():
        missing = number[~both]
        label = f"no finite perplexity ({len(missing):,} of {len(rows):,} windows)"
        foot = np.full(len(missing), 0.03)  # in heights of the panel
        axes.scatter(missing, foot, s=45, color="black", marker="x", transform=axes.get_xaxis_transform(), label=label)
    axes.set_xlim(number.min() - 0.6, number.max() + 0.6)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    text = manifest.digests.evaluation
    of_what = "" if text is None else f" of {text.length_tokens:,} tokens, {shortened(text.corpus, 40)}"
    axes.set_xlabel(f"window{of_what}", parse_math=False)
    axes.set_ylabel("perplexity of the window")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(loc="upper right", ncols=3, frameon=False, fontsize=9.5, handletextpad=0.3, columnspacing=1.2)
    _set_title(axes, _quality(manifest))


def _perplexities(rows: pd.DataFrame, model: str) -> NDArray[np.float64]:
    """Perplexity by window ``[n]``; infinite where a prediction has no finite loss (or may have none) or where exp overflows."""
    mean = (rows[f"{model}_nats"] / rows["scored_predictions"]).to_numpy(dtype=np.float64)
    counted = rows[f"{model}_nonfinite"].fillna(1).to_numpy(dtype=np.int64)
    with np.errstate(over="ignore"):
        return np.asarray(np.where(counted == 0, np.exp(mean), np.inf), dtype=np.float64)


def _quality(manifest: Manifest) -> str:
    """Both perplexities, and their ratio with its interval or why there is none."""
    found = {measurement.name: measurement for measurement in manifest.measurements if not measurement.part}
    before, after = found.get("perplexity_float"), found.get("perplexity")
    ratio = found.get("ln_perplexity_ratio")
    text = f"Perplexity: float {_value(before)}, artefact {_value(after)}"
    if ratio is None or ratio.value is None:
        return f"{text}\n{ratio.flag if ratio is not None and ratio.flag else 'their ratio was not measured'}"
    interval = ratio.interval
    if interval is None:
        return f"{text}\nratio {_exp(ratio.value)}, no interval (one window)"
    ends = f"{_exp(interval.low)} to {_exp(interval.high)}"
    return f"{text}\nratio {_exp(ratio.value)}, {interval.level:.0%} interval {ends} ({ratio.n:,} windows, paired)"


def _value(measurement: MeasurementRecord | None) -> str:
    if measurement is None:
        return "not measured"
    return "not finite" if measurement.value is None else f"{measurement.value:,.5g}"


def _exp(nats: float) -> str:
    """exp of a difference in nats as text; past what a float holds as a power of e."""
    if abs(nats) > 700:
        return f"e^{nats:.0f}"
    return f"{math.exp(nats):.3f}" if abs(nats) < 5 else f"{math.exp(nats):.4g}"


def _chosen(cards: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """At most four: those with a price before the others, in the manifest's order."""
    return sorted(cards, key=lambda card: card["price"] is None)[:_MOST_CARDS]


def _draw_cards(axes: Axes, cards: Sequence[Mapping[str, Any]]) -> None:
    """Output tokens per second against the batch, from one request to the full batch of every card."""
    assumed = cards[0]["assumptions"]
    context = _mean_context(cards[0])
    curves = [(card, *_curve(card)) for card in cards]
    curves.sort(key=lambda curve: -float(curve[2][-1]))  # the legend in the order of the lines' ends
    axes.set_xscale("log")
    axes.set_yscale("log")
    for (card, batches, rates), colour in zip(curves, COLOURS, strict=False):
        label = f"{shortened(str(card['card_name']), 34)}: {rates[-1]:,.0f} tokens/s at batch {batches[-1]:,}"
        axes.plot(batches, rates, color=colour, linewidth=1.8, marker="o", markevery=[-1], label=label)
    log_limits(axes, "x", np.concatenate([[1, 2], *(curve[1] for curve in curves)]), below=0.04, above=0.06)
    log_limits(axes, "y", np.concatenate([curve[2] for curve in curves]), below=0.75, above=0.08)
    axes.set_xlabel("batch (requests decoded together)")
    axes.set_ylabel("output tokens per second")
    axes.grid(alpha=0.3)
    for text in axes.legend(loc="lower right", frameon=False, fontsize=9.5).get_texts():
        text.set_parse_math(False)
    tokens = f"{assumed['prompt_tokens']:,} tokens in, {assumed['output_tokens']:,} out"
    where = f"{tokens}; context {context:,.0f}, up to the full batch"
    _set_title(axes, f"Decoding: upper bounds from bandwidth and dense rate\n{where}")


def _mean_context(card: Mapping[str, Any]) -> float:
    assumed = card["assumptions"]
    return Assumptions(prompt_tokens=assumed["prompt_tokens"], output_tokens=assumed["output_tokens"]).mean_context_tokens


def _curve(card: Mapping[str, Any]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Batches ``[k]`` from 1 to the full one, evenly on a log scale, and the output tokens per second at each."""
    batches = np.unique(np.geomspace(1, card["batch"], _MOST_POINTS).round().astype(np.int64))
    kv_bytes = card["kv_bytes_per_token"] * _mean_context(card)
    steps = [
        step_time(
            batch=int(batch),
            traffic_bytes=card["weight_traffic_bytes_per_step"],
            kv_bytes_per_sequence=kv_bytes,
            flops_per_sequence=card["decode_flops_per_sequence"],
            bandwidth_bytes_per_s=card["bandwidth_bytes_per_s"],
            dense_flops_per_s=card["dense_flops_per_s"],
        )
        for batch in batches
    ]
    return batches, batches / np.array([step.seconds for step in steps])


def _draw_bytes(axes: Axes, manifest: Manifest, why: str) -> None:
    """Stored bytes by kind, over all weight files."""
    sums = {kind: sum(int(getattr(line, f"{kind}_bytes")) for line in manifest.ledger) for kind in _KINDS}
    total = sum(sums.values())
    kinds = [kind for kind in _KINDS if sums[kind]]
    unit, size = ("GB (10^9 bytes)", 1e9) if total >= 1e9 else ("MB (10^6 bytes)", 1e6)
    widths = [sums[kind] / size for kind in kinds]
    axes.barh(kinds, widths, color=COLOURS[0])
    for place, kind in enumerate(kinds):
        share = sums[kind] / total
        label = f"{sums[kind]:,} bytes, {f'{share:.2%}' if share >= 1e-4 else 'less than 0.01%'}"
        axes.annotate(label, (widths[place], place), (5, 0), textcoords="offset points", va="center")
    axes.invert_yaxis()
    axes.set_xlim(0, max(widths) * 2)  # room for the label of the longest bar
    axes.set_xlabel(unit)
    axes.spines[["top", "right"]].set_visible(False)
    _set_title(axes, f"{total:,} bytes stored, by kind\n{why}")


def _set_title(axes: Axes, text: str) -> None:
    """At most three lines that are no wider than a panel with its labels."""
    lines = [piece for line in text.splitlines() for piece in textwrap.wrap(line, 66)]
    cut = [*lines[:2], f"{lines[2]} …"] if len(lines) > 3 else lines
    axes.set_title("\n".join(cut), fontsize=10, parse_math=False)
