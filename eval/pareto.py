"""What is not beaten: the front of points of which less is better in both directions."""

from __future__ import annotations

import math
from collections.abc import Sequence


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Places of the points that no other equals or beats in both coordinates and beats in one, by rising x.

    Points that are exactly alike stand on the front together. Raises ValueError for a coordinate that is not finite.
    """
    if not all(math.isfinite(value) for point in points for value in point):
        raise ValueError("a front needs finite coordinates")
    order = sorted(range(len(points)), key=lambda place: (*points[place], place))
    front: list[int] = []
    for place in order:
        if not front or points[place][1] < points[front[-1]][1] or points[place] == points[front[-1]]:
            front.append(place)
    return front
