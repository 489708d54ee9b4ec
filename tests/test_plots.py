"""The picture of a run: its figures are the manifest's, nothing in it overlaps, and the same content gives the same bytes."""

from __future__ import annotations

import hashlib
import io
import struct
import subprocess
import sys
import warnings
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.text import Text

from eval.capacity.bounds import decode_step
from eval.capacity.cards import load_cards
from eval.capacity.implications import implications
from eval.plots import HEIGHT_PIXELS, WIDTH_PIXELS, run_figure, run_plot
from eval.rows import rows_bytes
from formats.manifest import Manifest
from tests.artefact import build_artefact
from tests.capacity_cases import CASE, CASE_BYTES, make_card
from tests.plot_cases import CASES, case, measured, records, rows
from tests.tiny_runs import run, write_text

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """The manifest of a real small artefact, with a made-up measurement of eight windows and all shipped cards."""
    folder = tmp_path_factory.mktemp("plots") / "artefact"
    return build_artefact(folder).model_copy(update={"measurements": measured(), "cards": records(load_cards("all"))})


def drawn(manifest: Manifest, frame: pd.DataFrame) -> Figure:
    """The figure after a draw, where every text has its place; a warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = run_figure(manifest, frame)
        figure.savefig(io.BytesIO(), format="png")
    return figure


def panels(figure: Figure) -> tuple[Axes, Axes]:
    left, right = figure.axes
    return left, right


def texts(figure: Figure) -> Iterator[Text]:
    """All texts that can be seen."""
    yield from figure.texts
    for axes in figure.axes:
        yield from (axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts)
        legend = axes.get_legend()
        yield from () if legend is None else legend.get_texts()
        for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            for tick in axis.get_major_ticks():
                if min(limits) <= tick.get_loc() <= max(limits):
                    yield tick.label1


@pytest.mark.parametrize("name", CASES)
def test_all_texts_lie_in_the_picture_and_apart(name: str, made: Manifest) -> None:
    figure = drawn(*case(made, name))
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts(figure) if text.get_text()]
    assert len(boxes) > 15
    for text, box in boxes:
        assert box.x0 >= 0, text
        assert box.y0 >= 0, text
        assert box.x1 <= WIDTH_PIXELS, text
        assert box.y1 <= HEIGHT_PIXELS, text
    overlaps = [(a, b) for (a, one), (b, other) in combinations(boxes, 2) if one.overlaps(other)]
    assert overlaps == []


@pytest.mark.parametrize("name", CASES)
def test_no_legend_lies_over_a_point(name: str, made: Manifest) -> None:
    figure = drawn(*case(made, name))
    for axes in figure.axes:
        legend = axes.get_legend()
        points = [np.asarray(line.get_xydata()) for line in axes.lines]
        points += [
            np.asarray(collection.get_offsets())
            for collection in axes.collections
            if isinstance(collection, PathCollection) and "no finite" not in str(collection.get_label())
        ]
        if legend is None:
            continue
        box = legend.get_window_extent()
        for place in axes.transData.transform(np.concatenate(points)):
            assert not box.contains(*place), (legend.get_texts(), place)


def test_the_picture_is_a_png_of_1200_by_600_without_any_remark(made: Manifest) -> None:
    data = run_plot(made, rows())
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (1200, 600)
    chunks, place = [], 8
    while place < len(data):
        (length,) = struct.unpack(">I", data[place : place + 4])
        chunks.append(data[place + 4 : place + 8])
        place += length + 12
    assert set(chunks) == {b"IHDR", b"pHYs", b"IDAT", b"IEND"}


def test_the_same_content_gives_the_same_bytes_in_another_process_and_without_pyplot(made: Manifest, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(made.text())
    (tmp_path / "rows.parquet").write_bytes(rows_bytes(rows()))
    code = (
        "import hashlib, sys, pandas; from pathlib import Path; from eval.plots import run_plot; "
        "from formats.manifest import Manifest; folder = Path(sys.argv[1]); "
        "data = run_plot(Manifest.load(folder), pandas.read_parquet(folder / 'rows.parquet')); "
        "print(hashlib.sha256(data).hexdigest(), 'matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [hashlib.sha256(run_plot(made, rows())).hexdigest(), "False"]


def test_a_persons_own_settings_change_nothing_and_are_left_as_they_were(made: Manifest) -> None:
    plain = run_plot(made, rows())
    own: dict[Any, Any] = {
        "font.size": 30.0,
        "axes.grid": True,
        "savefig.dpi": 50.0,
        "savefig.bbox": "tight",
        "axes.facecolor": "black",
    }
    with matplotlib.rc_context(own):
        assert run_plot(made, rows()) == plain
        assert {name: matplotlib.rcParams[name] for name in own} == own


def test_other_content_gives_another_picture(made: Manifest) -> None:
    plain = run_plot(made, rows())
    assert run_plot(made, rows(worse=0.26)) != plain
    assert run_plot(made.model_copy(update={"method": "awq"}), rows()) != plain


def test_the_headings_say_model_method_scheme_bits_and_size(made: Manifest) -> None:
    figure = drawn(made, rows())
    first, second = (text.get_text() for text in figure.texts)
    total = sum(line.total_bytes for line in made.ledger)
    assert first == "tiny"
    assert second.startswith("rtn, int4-sym-g32-f16 and 1 other scheme: ")
    assert f"{made.bits_per_weight.quantised:.5g} bits per weight quantised" in second
    assert f"{made.bits_per_weight.whole_file:.5g} in the whole file" in second
    assert f"weights {total / 1e6:.3f} MB ({total / 2**20:.3f} MiB)" in second


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("plain", "Perplexity: float 30.5, artefact 39.163\nratio 1.284, 95% interval 1.133 to 1.455 (8 windows, paired)"),
        ("one window", "Perplexity: float 30.5, artefact 39.163\nratio 1.284, no interval (one window)"),
        ("not measured", "Perplexity: float not measured, artefact not measured\ntheir ratio was not measured"),
        ("past what exp can hold", "ratio e^720, 95% interval 1.133 to 1.455 (8 windows, paired)"),
    ],
)
def test_the_left_title_gives_the_ratio_and_its_interval(name: str, title: str, made: Manifest) -> None:
    assert panels(drawn(*case(made, name)))[0].get_title().endswith(title)


def test_every_window_is_a_pair_of_points_joined_by_a_line(made: Manifest) -> None:
    frame = rows(8)
    left, _ = panels(drawn(made, frame))
    stems, before, after = left.collections
    for points, model in ((before, "float"), (after, "artefact")):
        offsets = np.asarray(points.get_offsets())
        assert offsets[:, 0].tolist() == list(range(8))
        assert offsets[:, 1] == pytest.approx(np.exp(frame[f"{model}_nats"] / 511))
    assert len(stems.get_paths()) == 8


def test_a_window_without_a_finite_value_is_marked_and_has_no_point(made: Manifest) -> None:
    """One with a null count may have one: it is not shown as finite either."""
    manifest, frame = case(made, "no finite value in two windows")
    left, _ = panels(drawn(manifest, frame))
    stems, before, after, missing = left.collections
    assert len(np.asarray(before.get_offsets())) == 8
    assert np.asarray(after.get_offsets())[:, 0].tolist() == [0, 1, 3, 4, 6, 7]
    assert np.asarray(missing.get_offsets())[:, 0].tolist() == [2, 5]
    assert len(stems.get_paths()) == 6
    assert missing.get_label() == "no finite perplexity (2 of 8 windows)"
    assert "have no finite loss" in left.get_title().replace("\n", " ")
    assert "artefact not finite" in left.get_title()


def test_a_mark_does_not_cover_the_lowest_point(made: Manifest) -> None:
    left, _ = panels(drawn(*case(made, "no finite value at all")))
    _, before, _, missing = left.collections
    point = left.transData.transform(np.asarray(before.get_offsets()).min(axis=0))
    mark = missing.get_offset_transform().transform(np.asarray(missing.get_offsets())[0])
    assert point[1] - mark[1] > 12  # pixels; both are about 8 wide


def test_cards_with_a_price_come_first_and_at_most_four(made: Manifest) -> None:
    cards = load_cards("all")
    priced = [card.name for card in cards if card.price is not None]
    first = next(card.name for card in cards if card.price is None)
    _, right = panels(drawn(made, rows()))
    names = [str(line.get_label()).split(":")[0] for line in right.lines]
    assert sorted(names) == sorted([*priced, first])
    assert len(names) == 4
    ends = [float(np.asarray(line.get_ydata())[-1]) for line in right.lines]
    assert ends == sorted(ends, reverse=True)


def test_a_curve_is_the_formula_from_one_request_to_the_full_batch(made: Manifest) -> None:
    """On a card where it starts bound by memory and ends bound by compute."""
    card = make_card(80, 2.0, 10)
    item = implications(CASE, card, weight_bytes=CASE_BYTES)
    assert (item.step_alone_bound, item.step_full_batch_bound) == ("memory", "compute")
    _, right = panels(drawn(made.model_copy(update={"cards": [item.record()]}), rows()))
    (line,) = right.lines
    batches, rates = (np.asarray(values) for values in line.get_data())
    assert (batches[0], batches[-1]) == (1, item.batch)
    assert rates[0] == item.output_tokens_per_s_alone
    assert rates[-1] == item.output_tokens_per_s_full_batch
    for batch, rate in zip(batches, rates, strict=True):
        step = decode_step(
            CASE, batch=int(batch), context_tokens=5000, traffic_bytes=CASE_BYTES,
            kv_bytes_per_token=CASE.kv_bytes_per_token(), bandwidth_bytes_per_s=2e12, dense_flops_per_s=10e12,
        )  # fmt: skip
        assert rate == pytest.approx(batch / step.seconds, rel=1e-12)
    assert line.get_label() == f"Card: {item.output_tokens_per_s_full_batch:,.0f} tokens/s at batch {item.batch}"


@pytest.mark.parametrize(
    ("name", "why"),
    [("no cards", "no cards were chosen"), ("no card that holds it", "none of the chosen cards is known to hold it")],
)
def test_without_a_card_the_bytes_are_shown_by_kind(name: str, why: str, made: Manifest) -> None:
    manifest, frame = case(made, name)
    _, right = panels(drawn(manifest, frame))
    total = sum(line.total_bytes for line in manifest.ledger)
    assert right.get_title() == f"{total:,} bytes stored, by kind\n{why}"
    shown = {label.get_text(): text.get_text() for label, text in zip(right.get_yticklabels(), right.texts, strict=True)}
    kinds = ("codes", "scales", "zeros", "shape", "kept", "header")
    sums = {kind: sum(getattr(line, f"{kind}_bytes") for line in manifest.ledger) for kind in kinds}
    assert sum(sums.values()) == total
    assert {kind: text.split(" bytes")[0] for kind, text in shown.items()} == {kind: f"{count:,}" for kind, count in sums.items()}


def test_a_run_leaves_both_files_and_lists_them(tiny_copy: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The source has a picture of the same name: it is not taken over, and the manifest says so."""
    model = tiny_copy("llama")
    (model / "report.png").write_bytes(b"somebody's picture")
    output = tmp_path / "out"
    manifest = run("rtn", model, output, write_text(tmp_path), "--cards", "l4", picture=True)
    frame = pd.read_parquet(output / "windows.parquet")
    listed = {file.name: file for file in manifest.files}
    for name, data in (("windows.parquet", rows_bytes(frame)), ("report.png", run_plot(manifest, frame))):
        assert (output / name).read_bytes() == data  # made again from what the artefact holds
        assert listed[name].role == "side"
        assert listed[name].sha256 == hashlib.sha256(data).hexdigest()
    assert [file.name for file in manifest.files] == sorted(listed)
    values = {measurement.name: measurement.value for measurement in manifest.measurements}
    total = frame[["float_nats", "artefact_nats", "scored_predictions"]].sum()
    difference = (total["artefact_nats"] - total["float_nats"]) / total["scored_predictions"]
    assert values["ln_perplexity_ratio"] == pytest.approx(difference, rel=1e-12)
    assert any("report.png is left out" in note.text for note in manifest.notes)
    assert f"{output / 'report.png'}" in capsys.readouterr().out.split("next:")[1].replace("\n", "")
