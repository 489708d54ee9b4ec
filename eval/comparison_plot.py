"""Quality against bits in one picture: every artefact a point with its interval, those that none beats joined, the float line.

Every figure is a cell of the comparison. Where names do not fit beside their points, points are numbered and a key stands at the
side. The same table gives the same bytes, as PNG and as SVG, under the same versions of matplotlib.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

from eval.comparison import Comparison
from eval.drawing import COLOURS, GREY, log_limits, shortened
from eval.labels import Box, Obstacles, Placed, place_labels
from eval.pareto import pareto_front

WIDTH_PIXELS, HEIGHT_PIXELS = 1200, 750
X_KEYS = {"linears": "bits_linears", "file": "bits_file"}
Y_KEYS = {"kl": "kl", "perplexity": "perplexity"}
_DPI = 100
_MOST_NAMES = 12
_KEY_LINES, _KEY_LINE_PIXELS = 33, 18
_LOG_FROM = {"kl": 8.0, "perplexity": 2.5}  # a larger ratio of the largest to the smallest gets a log axis
_MARKER, _SMALL_MARKER = 5.0, 4.0  # half of a marker in pixels
_HASH_SALT = "bitledger"


@dataclass(frozen=True, slots=True)
class Point:
    """One artefact in the picture: its place in the table, its coordinates, and the interval of ``y``."""

    place: int
    x: float
    y: float
    low: float | None
    high: float | None


def plotted(found: Comparison, x: str, y: str) -> list[Point]:
    """The artefacts that have both figures (columns ``x`` and ``y``).

    A perplexity's bar is that of its ratio to the float model, paired window by window and put on the float model's perplexity:
    how hard the text is differs from window to window, but alike for both. Where there is no ratio, it is its own interval.
    """
    points = []
    for place, cells in enumerate(found.cells):
        if x not in cells or y not in cells:
            continue
        a, b = cells[x].value, cells[y].value
        if a is None or b is None:
            continue
        low, high = cells[y].low, cells[y].high
        ratio, reference = cells.get("ln_perplexity_ratio"), cells.get("perplexity_float")
        if y == "perplexity" and ratio and reference and None not in (ratio.low, ratio.high, reference.value):
            low, high = (float(reference.value or 0) * math.exp(min(end or 0.0, 700.0)) for end in (ratio.low, ratio.high))
        points.append(Point(place, a, b, low, high))
    return points


def front_places(found: Comparison, x: str, y: str) -> list[int]:
    """Places in the table of the artefacts that no other beats in ``x`` and ``y``, by rising ``x``."""
    points = plotted(found, x, y)
    return [points[place].place for place in pareto_front([(point.x, point.y) for point in points])]


def comparison_plots(found: Comparison, x: str, y: str) -> tuple[bytes, bytes]:
    """PNG and SVG."""
    png, svg = io.BytesIO(), io.BytesIO()
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams["svg.hashsalt"] = _HASH_SALT
        figure = comparison_figure(found, x, y)
        figure.savefig(png, format="png", metadata={"Software": None})
        figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    return png.getvalue(), svg.getvalue()


def comparison_figure(found: Comparison, x: str, y: str) -> Figure:
    """The figure that ``comparison_plots`` renders, under the settings that hold when it is called."""
    points = plotted(found, x, y)
    names = [shortened(found.entries[point.place].label, 44) for point in points]
    if len(points) <= _MOST_NAMES:
        figure = _figure(HEIGHT_PIXELS)
        if _draw(figure, found, points, names, x, y, right=0.97):
            return figure
    height = HEIGHT_PIXELS + max(0, len(points) - _KEY_LINES) * _KEY_LINE_PIXELS
    figure = _figure(height)
    order = sorted(range(len(points)), key=lambda place: (points[place].x, points[place].y, place))
    numbers = {place: str(number) for number, place in enumerate(order, start=1)}
    placed = _draw(figure, found, points, [numbers[place] for place in range(len(points))], x, y, right=0.70)
    head = "no." if placed else "points lie too close to be numbered"
    _write_key(figure, head, [(numbers[place], shortened(names[place], 38)) for place in order], height)
    return figure


def _figure(height: int) -> Figure:
    figure = Figure(figsize=(WIDTH_PIXELS / _DPI, height / _DPI), dpi=_DPI)
    FigureCanvasAgg(figure)
    return figure


def _draw(figure: Figure, found: Comparison, points: Sequence[Point], names: Sequence[str], x: str, y: str, right: float) -> bool:
    """Everything but the key; False when a label found no place (the figure is then to be thrown away, or left without them)."""
    height = figure.get_figheight() * _DPI
    axes = figure.add_axes((0.08, 85 / height, right - 0.08, (height - 205) / height))
    front = pareto_front([(point.x, point.y) for point in points])
    level = _float_level(found, y)
    _set_axes(axes, found, points, level, x, y)
    rest = [point for place, point in enumerate(points) if place not in front]
    best = [points[place] for place in front]
    for chosen, colour, face, label in (
        (best, COLOURS[0], COLOURS[0], "on the front"),
        (rest, GREY, "white", "beaten by another"),
    ):
        bars = [(point.x, point.low, point.high) for point in chosen if point.low is not None and point.high is not None]
        for where, low, high in bars:
            axes.vlines(where, low, high, color=colour, linewidth=1.1, alpha=0.8)
        if chosen:
            place = ([point.x for point in chosen], [point.y for point in chosen])
            axes.scatter(*place, s=_area(len(points)), facecolor=face, edgecolor=colour, linewidth=1.3, zorder=3, label=label)
    steps = _steps(best)
    axes.plot([a for a, _ in steps], [b for _, b in steps], color=COLOURS[0], linewidth=1.2, alpha=0.6, label="Pareto front")
    _draw_float(axes, level)
    for text in axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=4, frameon=False, fontsize=9.5).get_texts():
        text.set_parse_math(False)
    _write_around(figure, found, points, y)
    return _write_labels(figure, axes, points, names, steps, level)


def _marker(count: int) -> float:
    return _MARKER if count <= _MOST_NAMES else _SMALL_MARKER


def _area(count: int) -> float:
    """Of a marker, in square points."""
    return (2 * _marker(count) * 72 / _DPI) ** 2


def _float_level(found: Comparison, y: str) -> float | None:
    """Where the float model lies: at its perplexity, or at a divergence of 0."""
    if y == "kl":
        return 0.0
    return next((value for value in found.values("perplexity_float") if value is not None), None)


def _set_axes(axes: Axes, found: Comparison, points: Sequence[Point], level: float | None, x: str, y: str) -> None:
    titles = {column.key: column for column in found.columns}
    heights = [end for p in points for end in (p.y, p.low, p.high) if end is not None]
    heights += [level] if level is not None and (y != "kl" or not _is_log(points, y)) else []
    positive = np.array([height for height in heights if height > 0])
    if _is_log(points, y) and len(positive):
        axes.set_yscale("log")
        log_limits(axes, "y", positive, below=0.06, above=0.1)
    else:
        low, high = min(heights, default=0.0), max(heights, default=1.0)
        span = (high - low) or abs(high) or 1.0
        axes.set_ylim(low - 0.06 * span, high + 0.1 * span)
    places = [point.x for point in points] or [0.0, 1.0]
    span = (max(places) - min(places)) or 1.0
    axes.set_xlim(min(places) - 0.1 * span, max(places) + 0.1 * span)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=9))
    unit = titles[y].unit if y in titles and titles[y].unit != "1" else ""
    bars = ", bars: paired with the float model" if y == "perplexity" else ""
    axes.set_xlabel(titles[x].title)
    axes.set_ylabel(f"{titles[y].title}{f', {unit}' if unit else ''}{bars}" if y in titles else y)
    axes.grid(alpha=0.3)


def _is_log(points: Sequence[Point], y: str) -> bool:
    values = [point.y for point in points]
    return bool(values) and min(values) > 0 and max(values) / min(values) > _LOG_FROM[y]


def _draw_float(axes: Axes, level: float | None) -> None:
    if level is None:
        return
    low, high = axes.get_ylim()
    if low <= level <= high:
        axes.axhline(level, color="black", linewidth=1.1, linestyle="--", label=f"float model: {level:.5g}")
    else:  # a log axis has no 0
        axes.plot([], [], color="black", linewidth=1.1, linestyle="--", label=f"float model: {level:.5g}, below this axis")


def _steps(best: Sequence[Point]) -> list[tuple[float, float]]:
    """Corners of the front: between two of its points only the left one's quality can be had."""
    corners: list[tuple[float, float]] = []
    for point in best:
        if corners:
            corners.append((point.x, corners[-1][1]))
        corners.append((point.x, point.y))
    return corners


def _write_around(figure: Figure, found: Comparison, points: Sequence[Point], y: str) -> None:
    """Headings above the axes, and below them which artefacts are not in the picture."""
    height = figure.get_figheight() * _DPI
    source = shortened(found.entries[0].manifest.source.requested, 70)
    part, _, rest = found.conventions.get(y, "").partition("; ")
    title = next((column.title for column in found.columns if column.key == y), y)
    below = f"{title} ({part}; {rest.partition('; ')[0]})" if part else title
    lines: list[tuple[float, float, str, str]] = [
        (height - 28, 15, "bold", f"{source}: {len(points)} artefacts, quality against bits")
    ]
    lines.append((height - 56, 10.5, "normal", shortened(below, 150)))
    missing = [entry.label for place, entry in enumerate(found.entries) if place not in {point.place for point in points}]
    if missing:
        text = f"not in the picture, for want of a finite figure: {', '.join(missing)}"
        lines.append((16, 9, "normal", shortened(text, 170)))
    for place, size, weight, text in lines:
        figure.text(0.5, place / height, text, ha="center", va="center", fontsize=size, fontweight=weight, parse_math=False)


def _write_labels(
    figure: Figure,
    axes: Axes,
    points: Sequence[Point],
    names: Sequence[str],
    steps: Sequence[tuple[float, float]],
    level: float | None,
) -> bool:
    width, height = (inches * _DPI for inches in figure.get_size_inches())
    texts = [figure.text(0, 0, name, fontsize=9.5, ha="center", va="center", parse_math=False, zorder=4) for name in names]
    places = [_pixels(axes, point.x, point.y) for point in points]
    frame = axes.get_window_extent()
    bounds = Box(frame.x0 + 2, frame.y0 + 2, frame.x1 - 2, frame.y1 - 2)
    lines = [tuple(_pixels(axes, *corner) for corner in steps)]
    if level is not None and axes.get_ylim()[0] <= level <= axes.get_ylim()[1]:
        lines.append(tuple((edge, _pixels(axes, axes.get_xlim()[0], level)[1]) for edge in (frame.x0, frame.x1)))
    obstacles = Obstacles(tuple(_bars(axes, points)), tuple(lines))
    placed = place_labels(places, [_size(text) for text in texts], bounds, obstacles, marker=_marker(len(points)))
    if placed is None:
        for text in texts:
            text.remove()
        return False
    for text, label, place in zip(texts, placed, places, strict=True):
        x, y = label.box.middle
        text.set_position((x / width, y / height))
        if label.leader:
            _draw_leader(figure, place, label, width, height)
    return True


def _draw_leader(figure: Figure, place: tuple[float, float], label: Placed, width: float, height: float) -> None:
    end = label.anchor(place)
    line = Line2D([place[0] / width, end[0] / width], [place[1] / height, end[1] / height], color=GREY, linewidth=0.7, zorder=1)
    line.set_transform(figure.transFigure)
    figure.add_artist(line)


def _pixels(axes: Axes, x: float, y: float) -> tuple[float, float]:
    a, b = axes.transData.transform((x, y))
    return float(a), float(b)


def _size(text: Text) -> tuple[float, float]:
    box = text.get_window_extent()
    return float(box.width), float(box.height)


def _bars(axes: Axes, points: Sequence[Point]) -> list[Box]:
    """The error bars as thin boxes; what leaves the axes below is cut there."""
    bottom = axes.get_ylim()[0]
    found = []
    for point in points:
        if point.low is not None and point.high is not None:
            x, low = _pixels(axes, point.x, max(point.low, bottom))
            found.append(Box(x - 1, low, x + 1, _pixels(axes, point.x, max(point.high, bottom))[1]))
    return found


def _write_key(figure: Figure, head: str, lines: Sequence[tuple[str, str]], height: int) -> None:
    """Number and name of every point, from the top down in the order of their bits."""
    top = height - 120
    for row, (number, name) in enumerate([(head, ""), *lines]):
        place = (top - row * _KEY_LINE_PIXELS) / height
        align = "right" if name else "left"
        figure.text(0.745 if name else 0.725, place, number, fontsize=9.5, ha=align, va="baseline", parse_math=False)
        figure.text(0.752, place, name, fontsize=9.5, ha="left", va="baseline", parse_math=False)
