"""The picture of a comparison: legible whatever the number of artefacts, its points are the cells, the same bytes every time."""

from __future__ import annotations

import io
import math
import random
import warnings
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure

from eval.comparison import Comparison, Entry, compare
from eval.comparison_plot import WIDTH_PIXELS, comparison_figure, comparison_plots, front_places, plotted
from formats.manifest import Manifest
from tests.artefact import build_artefact
from tests.measured import of_run
from tests.test_plots import texts

METHODS = ("rtn", "awq", "gptq", "awq+gptq", "gptq+learned", "rtn-mse")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return build_artefact(tmp_path_factory.mktemp("comparison") / "artefact")


def entry(made: Manifest, label: str, bits: float, ratio: float, kl: float) -> Entry:
    sizes = made.bits_per_weight.model_copy(update={"quantised": bits, "whole_file": 5 + bits / 2})
    found = made.model_copy(update={"bits_per_weight": sizes, "measurements": of_run(made.weights(), ratio, kl)})
    return Entry(label, f"{label}/manifest.json", found, "0" * 64)


def several(made: Manifest, count: int, seed: int = 0) -> Comparison:
    """Artefacts as they come: a few widths, many methods, so that points crowd at each width."""
    choose = random.Random(seed)
    found = []
    for number in range(count):
        bits = choose.choice([2.25, 3.25, 4.125, 4.5, 6.25, 8.25]) + choose.choice([0.0, choose.uniform(-0.1, 0.1)])
        kl = math.exp(-1.3 * (bits - 2.5)) * choose.uniform(0.5, 2)
        label = f"smollm2-135m-{choose.choice(METHODS)}-int{int(bits)}-{number}"
        found.append(entry(made, label, bits, kl * 0.6, kl))
    return compare(found)


def drawn(found: Comparison, y: str) -> Figure:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = comparison_figure(found, "bits_linears", y)
        figure.savefig(io.BytesIO(), format="png")
    return figure


CASES = [(1, 0), (2, 0), (8, 0), (12, 1), (25, 0), (40, 0)]


@pytest.mark.parametrize("y", ["kl", "perplexity"])
@pytest.mark.parametrize(("count", "seed"), CASES)
def test_all_texts_lie_in_the_picture_and_apart_and_off_the_points(made: Manifest, count: int, seed: int, y: str) -> None:
    found = several(made, count, seed)
    figure = drawn(found, y)
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts(figure) if text.get_text()]
    height = figure.get_figheight() * figure.dpi
    for text, box in boxes:
        assert min(box.x0, box.y0) >= 0, text
        assert box.x1 <= WIDTH_PIXELS, text
        assert box.y1 <= height, text
    assert [(a, b) for (a, one), (b, other) in combinations(boxes, 2) if one.overlaps(other)] == []
    shown = [text for text, _ in boxes]
    for name in (entry.label for entry in found.entries):
        assert name in shown
    assert not any("too close" in text for text in shown)
    (axes,) = figure.axes
    places = [np.asarray(each.get_offsets()) for each in axes.collections if isinstance(each, PathCollection)]
    for place in axes.transData.transform(np.concatenate(places)):
        assert [text for text, box in boxes if box.contains(*place)] == []


@pytest.mark.parametrize("y", ["kl", "perplexity"])
def test_points_and_front_are_those_of_the_table(made: Manifest, y: str) -> None:
    found = several(made, 8)
    (axes,) = drawn(found, y).axes
    groups = {each.get_label(): np.asarray(each.get_offsets()) for each in axes.collections if isinstance(each, PathCollection)}
    rows = [(cells["bits_linears"].value, cells[y].value) for cells in found.cells]
    front = [rows[place] for place in front_places(found, "bits_linears", y)]
    assert [tuple(point) for point in groups["on the front"]] == front
    assert sorted(map(tuple, groups["beaten by another"])) == sorted(row for row in rows if row not in front)


def test_a_perplexitys_bar_is_paired_with_the_float_model(made: Manifest) -> None:
    found = several(made, 2)
    for point, cells in zip(plotted(found, "bits_linears", "perplexity"), found.cells, strict=True):
        ratio = cells["ln_perplexity_ratio"].value or 0
        assert point.low == pytest.approx(20 * math.exp(ratio - 0.01))
        assert point.high == pytest.approx(20 * math.exp(ratio + 0.01))


def test_the_float_line_is_drawn_where_the_axis_has_it_and_named_where_not(made: Manifest) -> None:
    def legend(found: Comparison, y: str) -> list[str]:
        (axes,) = drawn(found, y).axes
        box = axes.get_legend()
        return [] if box is None else [text.get_text() for text in box.get_texts()]

    assert "float model: 20" in legend(several(made, 2), "perplexity")
    near = compare([entry(made, "a", 4.0, 0.1, 0.2), entry(made, "b", 5.0, 0.05, 0.1)])
    far = compare([entry(made, "a", 4.0, 0.1, 0.2), entry(made, "b", 8.0, 0.05, 0.001)])
    assert "float model: 0" in legend(near, "kl")
    assert "float model: 0, below this axis" in legend(far, "kl")


@pytest.mark.parametrize("kl", [0.0, 1e-9, 50.0])
def test_odd_figures_can_be_drawn(made: Manifest, kl: float) -> None:
    same = [entry(made, f"same-{number}", 4.25, kl, kl) for number in range(4)]
    for y in ("kl", "perplexity"):
        drawn(compare(same), y)


def test_the_same_table_gives_the_same_bytes_without_a_date(made: Manifest, tmp_path: Path) -> None:
    png, svg = comparison_plots(several(made, 8), "bits_linears", "kl")
    assert comparison_plots(several(made, 8), "bits_linears", "kl") == (png, svg)
    assert png.startswith(b"\x89PNG")
    assert b"<dc:date>" not in svg
    assert comparison_plots(several(made, 8), "bits_file", "kl") != (png, svg)
