"""Labels beside points without one lying on another: greedy placement on rings around each point.

Crowded points choose first. A label never lies over a marker, an error bar, another label, a leader line or the edge; where it
can, it also keeps off lines that merely run through the picture. All lengths are in pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

Point = tuple[float, float]
Segment = tuple[Point, Point]

_ORDER = (0, 8, 4, 12, 2, 6, 10, 14, 1, 3, 5, 7, 9, 11, 13, 15)
"""Right, left, above, below, then the diagonals, then what lies between, in 16ths of a turn."""
_RINGS = (0.0, 6.0, 14.0, 24.0, 36.0, 50.0, 68.0, 90.0, 116.0, 146.0, 190.0, 240.0, 300.0)
_NEAR = 80.0  # points this near make each other crowded
_TOUCHING, _CLEARLY = 6.0, 2.0  # a label goes without a leader this near its point, and twice as far from any other


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
        boxes = [
            box
            for box in _boxes(points[place], sizes[place], marker + gap)
            if bounds.contains(box) and not any(box.grown(gap).overlaps(other) for other in (*markers, *obstacles.boxes))
        ]
        found = [_with_leader(box, place, points, marker + gap) for box in boxes]
        free = [label for label in found if _free(label, place, points, markers, placed, gap)]
        if not free:
            return None
        placed[place] = min(free, key=lambda label: _cost(label, points[place], obstacles))
    return [placed[place] for place in range(len(points))]


def _neighbours(points: Sequence[Point], place: int) -> int:
    return sum(math.dist(points[place], other) < _NEAR for other in points)


def _boxes(point: Point, size: tuple[float, float], start: float) -> list[Box]:
    """Boxes around ``point``, the nearest rings first, each in 16 directions and never over the point."""
    found = []
    for ring in _RINGS:
        for step in _ORDER:
            angle = 2 * math.pi * step / len(_ORDER)
            cosine, sine = math.cos(angle), math.sin(angle)
            # The middle lies half of the box further out than where the ring is met in this direction.
            x = point[0] + cosine * (start + ring) + _sign(cosine) * size[0] / 2
            y = point[1] + sine * (start + ring) + _sign(sine) * size[1] / 2
            found.append(Box(x - size[0] / 2, y - size[1] / 2, x + size[0] / 2, y + size[1] / 2))
    return found


def _sign(value: float) -> float:
    return 0.0 if abs(value) < 1e-9 else math.copysign(1.0, value)


def _with_leader(box: Box, place: int, points: Sequence[Point], touching: float) -> Placed:
    label = Placed(box, leader=False)
    own = math.dist(points[place], label.anchor(points[place]))
    nearest = min((math.dist(p, label.anchor(p)) for k, p in enumerate(points) if k != place), default=math.inf)
    return Placed(box, leader=own > touching + _TOUCHING or nearest < _CLEARLY * own)


def _free(
    label: Placed, place: int, points: Sequence[Point], markers: Sequence[Box], placed: dict[int, Placed], gap: float
) -> bool:
    """Whether label and leader keep off the other labels, their leaders, and other points' markers."""
    around = label.box.grown(gap)
    leaders = [(points[k], other.anchor(points[k])) for k, other in placed.items() if other.leader]
    if any(around.overlaps(other.box) for other in placed.values()) or any(around.crossed_by(*leader) for leader in leaders):
        return False
    if not label.leader:
        return True
    own = (points[place], label.anchor(points[place]))
    # A marker that lies over this one is crossed by any leader.
    beside = [box for k, box in enumerate(markers) if k != place and not box.overlaps(markers[place])]
    if any(box.crossed_by(*own) for box in (*beside, *(other.box for other in placed.values()))):
        return False
    return not any(_crossing(own, leader) for leader in leaders)


def _cost(label: Placed, point: Point, obstacles: Obstacles) -> float:
    """Pixels of distance, with a surcharge for a leader and for lying on a line. Equal costs go to the first direction."""
    on_line = any(label.box.crossed_by(start, end) for line in obstacles.lines for start, end in pairwise(line))
    return round(math.dist(point, label.anchor(point)) + 25.0 * label.leader + 25.0 * on_line, 6)


def _crossing(one: Segment, other: Segment) -> bool:
    """Whether two segments cross inside both; touching ends do not count."""
    (a, b), (c, d) = one, other
    return _turn(a, b, c) * _turn(a, b, d) < 0 and _turn(c, d, a) * _turn(c, d, b) < 0


def _turn(a: Point, b: Point, c: Point) -> float:
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])
