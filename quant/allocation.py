"""Choose one scheme for every unit of matrices so that the sum of errors is least under a budget of bytes.

The choices of a unit are reduced to the lower convex hull of (bytes, error); upgrades along all hulls are then taken in the order
of error saved per byte while they fit. For convex choices this is the optimum up to the last upgrade (the classic allocation
of Shoham and Gersho, 1988). Nothing here knows of models or torch.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from quant.errors import UsageError
from quant.scheme import Scheme


@dataclass(frozen=True, slots=True)
class Choice:
    """A scheme that a unit can be stored in: its exact bytes and the error it causes."""

    scheme: Scheme
    nbytes: int
    error: float


@dataclass(frozen=True, slots=True)
class Unit:
    """Matrices that must share a scheme (engines fuse them), and what they can be stored in."""

    modules: tuple[str, ...]
    choices: tuple[Choice, ...]


def hull(choices: Sequence[Choice]) -> list[Choice]:
    """The lower convex hull: ever more bytes, ever less error, ever less of it per byte."""
    found: list[Choice] = []
    for choice in sorted(choices, key=lambda c: (c.nbytes, c.error)):
        if found and choice.error >= found[-1].error:
            continue
        while len(found) > 1 and _slope(found[-2], found[-1]) <= _slope(found[-2], choice):
            found.pop()
        if found and found[-1].nbytes == choice.nbytes:
            found.pop()
        found.append(choice)
    return found


def _slope(small: Choice, large: Choice) -> float:
    """Error saved per byte."""
    return (small.error - large.error) / max(large.nbytes - small.nbytes, 1)


def allocate(units: Sequence[Unit], budget_bytes: int) -> dict[str, Scheme]:
    """Scheme of every module.

    Raises:
        UsageError: a budget below the smallest choices, with the bytes that those take.
    """
    hulls = [hull(unit.choices) for unit in units]
    left = budget_bytes - sum(steps[0].nbytes for steps in hulls)
    if left < 0:
        raise UsageError(
            f"the matrices take {sum(steps[0].nbytes for steps in hulls):,} bytes in their smallest schemes, "
            f"the target leaves {budget_bytes:,}: raise it"
        )
    place = [0] * len(hulls)
    upgrades: list[tuple[float, int]] = []

    def offer(index: int) -> None:
        steps, here = hulls[index], place[index]
        if here + 1 < len(steps):
            heapq.heappush(upgrades, (-_slope(steps[here], steps[here + 1]), index))

    for index in range(len(hulls)):
        offer(index)
    while upgrades:
        _, index = heapq.heappop(upgrades)
        steps, here = hulls[index], place[index]
        cost = steps[here + 1].nbytes - steps[here].nbytes
        if cost <= left:  # one that does not fit ends its unit; cheaper ones of others may still fit
            left -= cost
            place[index] += 1
            offer(index)
    return {module: hulls[i][place[i]].scheme for i, unit in enumerate(units) for module in unit.modules}
