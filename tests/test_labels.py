"""Labels never lie on each other, on markers or bars; the front is what comparing all pairs gives."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.labels import Box, Obstacles, place_labels
from eval.pareto import pareto_front

BOUNDS = Box(0, 0, 900, 600)
MARKER, GAP = 5.0, 3.0

inside = st.tuples(st.floats(10, 890), st.floats(10, 590))


def sampled(start: tuple[float, float], end: tuple[float, float]) -> list[tuple[float, float]]:
    """400 places along a segment: the slow way to ask what it crosses."""
    steps = [step / 399 for step in range(400)]
    return [(start[0] + (end[0] - start[0]) * s, start[1] + (end[1] - start[1]) * s) for s in steps]


def in_box(box: Box, place: tuple[float, float], margin: float = 0.0) -> bool:
    return box.x0 + margin < place[0] < box.x1 - margin and box.y0 + margin < place[1] < box.y1 - margin


@settings(deadline=None, max_examples=30)
@given(st.lists(inside, min_size=1, max_size=15), st.lists(inside, max_size=3), st.sampled_from([(14.0, 11.0), (120.0, 12.0)]))
def test_no_label_lies_on_anything(
    points: list[tuple[float, float]], bars: list[tuple[float, float]], size: tuple[float, float]
) -> None:
    boxes = tuple(Box(x - 1, y - 30, x + 1, y + 30) for x, y in bars)
    placed = place_labels(points, [size] * len(points), BOUNDS, Obstacles(boxes), marker=MARKER, gap=GAP)
    if placed is None:
        return
    assert len(placed) == len(points)
    for label in placed:
        assert label.box.x1 - label.box.x0 == pytest.approx(size[0])
        assert label.box.y1 - label.box.y0 == pytest.approx(size[1])
        assert BOUNDS.contains(label.box)
        for x, y in points:
            assert not label.box.overlaps(Box(x - MARKER, y - MARKER, x + MARKER, y + MARKER))
        assert not any(label.box.overlaps(box) for box in boxes)
    for one, other in combinations(placed, 2):
        assert not one.box.grown(GAP / 2).overlaps(other.box.grown(GAP / 2 - 1e-6))
    for place, label in enumerate(placed):
        leader = sampled(points[place], label.anchor(points[place])) if label.leader else []
        assert not any(in_box(other.box, at, 0.01) for k, other in enumerate(placed) if k != place for at in leader)


@settings(deadline=None, max_examples=100)
@given(inside, inside, inside, st.floats(1, 200), st.floats(1, 200))
def test_what_a_segment_crosses(
    start: tuple[float, float], end: tuple[float, float], corner: tuple[float, float], width: float, height: float
) -> None:
    box = Box(*corner, corner[0] + width, corner[1] + height)
    if any(in_box(box, place) for place in sampled(start, end)):
        assert box.crossed_by(start, end)
    if not any(in_box(box.grown(4), place) for place in sampled(start, end)):
        assert not box.crossed_by(start, end)


def test_a_label_alone_goes_to_the_right_without_a_leader() -> None:
    placed = place_labels([(100, 100)], [(50, 12)], BOUNDS, Obstacles(), marker=MARKER, gap=GAP)
    assert placed is not None
    assert placed[0].box == Box(108, 94, 158, 106)
    assert not placed[0].leader


def test_a_line_is_kept_clear_where_there_is_another_place() -> None:
    placed = place_labels([(100, 100)], [(50, 12)], BOUNDS, Obstacles(lines=(((0, 100), (900, 100)),)), marker=MARKER, gap=GAP)
    assert placed is not None
    assert not placed[0].box.crossed_by((0, 100), (900, 100))


def test_a_label_between_two_points_gets_a_leader_and_what_cannot_be_placed_is_said() -> None:
    points = [(450.0 + 12 * (k % 5), 300.0 + 12 * (k // 5)) for k in range(25)]
    placed = place_labels(points, [(14, 11)] * 25, BOUNDS, Obstacles(), marker=MARKER, gap=GAP)
    assert placed is not None, "25 points side by side can be numbered"
    assert sum(label.leader for label in placed) >= 16
    assert place_labels(points, [(400, 300)] * 25, BOUNDS, Obstacles()) is None


coordinate = st.integers(0, 6).map(float) | st.floats(0, 6, allow_nan=False)


@given(st.lists(st.tuples(coordinate, coordinate), max_size=30))
def test_the_front_is_what_comparing_all_pairs_gives(points: list[tuple[float, float]]) -> None:
    def beaten(p: tuple[float, float]) -> bool:
        return any(q[0] <= p[0] and q[1] <= p[1] and q != p for q in points)

    front = pareto_front(points)
    assert sorted(front) == [place for place, point in enumerate(points) if not beaten(point)]
    assert [points[place][0] for place in front] == sorted(points[place][0] for place in front)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_front_needs_finite_points(bad: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        pareto_front([(1.0, 2.0), (bad, 1.0)])
