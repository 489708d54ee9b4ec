"""Labels beside points without one lying on another: greedy placement on rings around each point.

Crowded points choose first. A label never lies over a marker, an error bar, another label, a leader or the edge. Where they can,
labels keep off lines that merely run through the picture, and leaders off markers and each other. All lengths are in pixels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

Point = tuple[float, float]
Segment = tuple[Point, Point]

_ORDER = (0, 16, 8, 24, 4, 12, 20, 28, *(step for step in range(32) if step % 4))
"""Right, left, above, below, then the diagonals, then what lies between, in 32nds of a turn."""
_RINGS = (0.0, 6.0, 14.0, 24.0, 36.0, 50.0, 68.0, 90.0, 116.0, 146.0, 190.0, 240.0, 300.0)
_NEAR = 80.0  # points this near make each other crowded
_TOUCHING, _CLEARLY = 6.0, 2.0  # a label goes without a leader this near its point, and twice as far from any other
# What a place costs besides its distance in pixels.
_LEADER, _ON_LINE, _OVER_MARKER, _OVER_LEADER = 25.0, 60.0, 150.0, 100.0


@dataclass(frozen=True, slots=True)
class Box:
    x0: float
    y0: float
    x1: float
    y1: float

    def overlaps(self, other: Box) -> bool:
        return self.x0 < other.x1 and other.x0 < self.x1 and self.y0 < other.y1 and other.y0 < self.y1

    def contains(self, other: Box) -> bool:
        return self.x0 <= other.x0 and self.y0 <= other.y0 and self.x1 >= other.x1 and self.y1 >= other.y1

    def grown(self, by: float) -> Box:
        return Box(self.x0 - by, self.y0 - by, self.x1 + by, self.y1 + by)

    @property
    def middle(self) -> Point:
        return (self.x0 + self.x1) / 2, (self.y0 + self.y1) / 2

    def crossed_by(self, start: Point, end: Point) -> bool:
        """Whether the segment from ``start`` to ``end`` has a point inside (Liang and Barsky 1984)."""
        enter, leave = 0.0, 1.0
        for a, b, low, high in ((start[0], end[0], self.x0, self.x1), (start[1], end[1], self.y0, self.y1)):
            step = b - a
            if step == 0:
                if not low < a < high:
                    return False
                continue
            ends = sorted(((low - a) / step, (high - a) / step))
            enter, leave = max(enter, ends[0]), min(leave, ends[1])
        return enter < leave


@dataclass(frozen=True, slots=True)
class Obstacles:
    """What labels keep off: ``boxes`` always; ``lines`` (corners of polylines) where there is another place."""

    boxes: tuple[Box, ...] = ()
    lines: tuple[tuple[Point, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a label lies, and whether it needs a leader line: far from its point, or hardly nearer to it than to another."""

    box: Box
    leader: bool

    def anchor(self, point: Point) -> Point:
        """The place on the box that is nearest to ``point``: where the leader ends."""
        return min(max(point[0], self.box.x0), self.box.x1), min(max(point[1], self.box.y0), self.box.y1)


def place_labels(
    points: Sequence[Point],
    sizes: Sequence[tuple[float, float]],
    bounds: Box,
    obstacles: Obstacles,
    *,
    marker: float = 6.0,
    gap: float = 3.0,
) -> list[Placed] | None:
    """A place for the label (width, height) of every point, or None when one of them finds none.

    Args:
        marker: half of a marker's side; gap: pixels that stay free between a label and anything else.
    """
    markers = [Box(x - marker, y - marker, x + marker, y + marker) for x, y in points]
    placed: dict[int, Placed] = {}
    for place in sorted(range(len(points)), key=lambda place: (-_neighbours(points, place), points[place], place)):
        taken = list(placed.values())
        leaders = [(points[k], other.anchor(points[k])) for k, other in placed.items() if other.leader]
        # A marker that lies over this one is crossed by any leader.
        beside = [box for k, box in enumerate(markers) if k != place and not box.overlaps(markers[place])]
        best: Placed | None = None
        least = math.inf
        for ring in _RINGS:
            if least <= ring:  # no place further out costs less
                break
            for box in _boxes(points[place], sizes[place], marker + gap + ring):
                around = box.grown(gap)
                if not bounds.contains(box) or any(around.overlaps(other) for other in (*markers, *obstacles.boxes)):
                    continue
                label = _with_leader(box, place, points, marker + gap)
                cost = _cost(label, points[place], beside, leaders, obstacles)
                if cost < least and _free(label, points[place], taken, leaders, gap):
                    best, least = label, cost
        if best is None:
            return None
        placed[place] = best
    return [placed[place] for place in range(len(points))]


def _neighbours(points: Sequence[Point], place: int) -> int:
    return sum(math.dist(points[place], other) < _NEAR for other in points)


def _boxes(point: Point, size: tuple[float, float], reach: float) -> Iterator[Box]:
    """Boxes around ``point`` in 32 directions, each beginning where a circle of radius ``reach`` is met."""
    for step in _ORDER:
        angle = 2 * math.pi * step / len(_ORDER)
        cosine, sine = math.cos(angle), math.sin(angle)
        x = point[0] + cosine * reach + _sign(cosine) * size[0] / 2
        y = point[1] + sine * reach + _sign(sine) * size[1] / 2
        yield Box(x - size[0] / 2, y - size[1] / 2, x + size[0] / 2, y + size[1] / 2)


def _sign(value: float) -> float:
    return 0.0 if abs(value) < 1e-9 else math.copysign(1.0, value)


def _with_leader(box: Box, place: int, points: Sequence[Point], touching: float) -> Placed:
    label = Placed(box, leader=False)
    own = math.dist(points[place], label.anchor(points[place]))
    nearest = min((math.dist(p, label.anchor(p)) for k, p in enumerate(points) if k != place), default=math.inf)
    return Placed(box, leader=own > touching + _TOUCHING or nearest < _CLEARLY * own)


def _free(label: Placed, point: Point, taken: Sequence[Placed], leaders: Sequence[Segment], gap: float) -> bool:
    """Whether the label keeps off the others and their leaders, and its own leader off the other labels."""
    around = label.box.grown(gap)
    if any(around.overlaps(other.box) for other in taken) or any(around.crossed_by(*leader) for leader in leaders):
        return False
    return not label.leader or not any(other.box.crossed_by(point, label.anchor(point)) for other in taken)


def _cost(label: Placed, point: Point, markers: Sequence[Box], leaders: Sequence[Segment], obstacles: Obstacles) -> float:
    """Pixels of distance, with what is added for a leader, for what it crosses, and for lying on a line."""
    own = (point, label.anchor(point))
    cost = math.dist(*own)
    if any(label.box.crossed_by(start, end) for line in obstacles.lines for start, end in pairwise(line)):
        cost += _ON_LINE
    if label.leader:
        cost += _LEADER
        cost += _OVER_MARKER * sum(box.crossed_by(*own) for box in markers)
        cost += _OVER_LEADER * sum(_crossing(own, leader) for leader in leaders)
    return round(cost, 6)


def _crossing(one: Segment, other: Segment) -> bool:
    """Whether two segments cross inside both; touching ends do not count."""
    (a, b), (c, d) = one, other
    return _turn(a, b, c) * _turn(a, b, d) < 0 and _turn(c, d, a) * _turn(c, d, b) < 0


def _turn(a: Point, b: Point, c: Point) -> float:
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])
