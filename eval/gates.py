"""Bounds of a policy judged on what was measured: an artefact passes by its figures on its own files, never for want of one.

Where a figure has an interval, the end that is worse for the artefact is judged: non-inferiority against a margin that was fixed
before. What is missing, not finite, flagged, measured on other files or on fewer clusters than asked for does not hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from eval.comparable import baseline, differences, differences_text, foreign
from formats.gates import BoundRecord, Judged
from formats.manifest import IntervalRecord, Manifest, MeasurementRecord


@dataclass(frozen=True, slots=True)
class Bound:
    """One line of a policy: exactly one of ``at_most`` and ``at_least`` is set.

    Attributes:
        name: of the measurement; ``part``: of the evaluation that made it, empty for the run's own.
        judge: the value, or the low or high end of its interval; None: the worse end.
        minimum_n: least number of clusters (windows, items) behind the figure.
        level: least level of the interval that is judged.
        windows: digest of the windows, or its first 12 digits or more; None: any.
        accepted_flag: a text; a flag that contains it does not keep the bound from holding.
        against: manifest of another artefact, where the difference to its figure is judged.
    """

    name: str
    part: str = ""
    at_most: float | None = None
    at_least: float | None = None
    judge: Judged | None = None
    minimum_n: int = 1
    level: float = 0.95
    windows: str | None = None
    accepted_flag: str | None = None
    against: Path | None = None

    @property
    def judged(self) -> Judged:
        if self.judge is not None:
            return self.judge
        return "low" if self.at_most is None else "high"

    @property
    def title(self) -> str:
        """``kl of part language``."""
        return f"{self.name} of part {self.part}" if self.part else self.name


@dataclass(frozen=True, slots=True)
class Other:
    """The artefact that a difference is to."""

    name: str
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class _Found:
    """What is judged, or why there is nothing."""

    measurement: MeasurementRecord | None
    reasons: tuple[str, ...] = ()


def judge(bound: Bound, manifest: Manifest, folder: Path, other: Other | None = None) -> BoundRecord:
    """The verdict on ``bound``; ``folder`` is named in what to type where a measurement is missing."""
    found = _plain(bound, manifest, folder) if other is None else _difference(bound, manifest, folder, other)
    measured = found.measurement
    reasons = list(found.reasons)
    value = None if measured is None else measured.value
    interval = None if measured is None else measured.interval
    ends = {"value": value, "low": interval.low if interval else None, "high": interval.high if interval else None}
    figure = None if value is None else ends[bound.judged]
    if measured is not None:
        reasons += _doubts(bound, measured, folder)
    record = BoundRecord(
        name=bound.name,
        part=bound.part,
        unit="" if measured is None else measured.unit,
        judged=bound.judged,
        figure=figure,
        value=value,
        low=ends["low"],
        high=ends["high"],
        level=None if interval is None else interval.level,
        n=0 if measured is None else measured.n,
        at_most=bound.at_most,
        at_least=bound.at_least,
        held=False,
        reason="; ".join(dict.fromkeys(reasons)),
        against=None if other is None else other.name,
        against_subject={} if other is None else other.manifest.weights(),
    )
    return record.model_copy(update={"held": record.within() and not record.reason})


def _doubts(bound: Bound, measured: MeasurementRecord, folder: Path) -> Iterator[str]:
    """Why a measurement that is there cannot make its bound hold."""
    if measured.value is None:
        yield f"is not finite ({measured.flag or 'no reason is recorded'})"
    elif measured.flag and not (bound.accepted_flag and bound.accepted_flag in measured.flag):
        yield f"is flagged: {measured.flag}"
    if measured.n < bound.minimum_n:
        yield f"is over {measured.n}, the policy asks for {bound.minimum_n} or more: {measure_command(bound, folder)}"
    digest = measured.inputs.get("windows", "")
    if bound.windows is not None and not digest.startswith(bound.windows):
        yield f"was measured on windows {digest[:12] or 'unknown'}, the policy asks for {bound.windows[:12]}"
    if bound.judged == "value" or measured.value is None:
        return
    if measured.interval is None:
        yield f"has no interval (n = {measured.n}): {measure_command(bound, folder)}, on more, or judge its value"
    elif measured.interval.level < bound.level:
        yield f"has an interval at level {measured.interval.level:g}, the policy asks for {bound.level:g}"


def _plain(bound: Bound, manifest: Manifest, folder: Path) -> _Found:
    found = _named(manifest, bound.part, (bound.name,))
    if len(found) > 1:
        return _Found(None, (f"{bound.title} stands in the manifest {len(found)} times",))
    if not found:
        return _Found(None, (f"was not measured: {measure_command(bound, folder)}",))
    wrong = foreign(found[0], manifest)
    return _Found(found[0], () if wrong is None else (wrong,))


def _difference(bound: Bound, manifest: Manifest, folder: Path, other: Other) -> _Found:
    """The stored paired difference to the other artefact, or the value minus the other's with an interval that is wide enough.

    The latter goes from low - high to high - low. With normal errors its level is at least that of both, whatever their
    correlation: sd(a - b) <= sd(a) + sd(b). Paired intervals are narrower; without normality two of level L give 2L - 1.
    """
    names = (f"{bound.name}_difference", *((bound.name,) if bound.name.startswith("ln_") else ()))
    for measured in _named(manifest, bound.part, names):
        if baseline(measured) == other.manifest.weights():
            wrong = foreign(measured, manifest)
            return _Found(measured, () if wrong is None else (wrong,))
    ours = _plain(bound, manifest, folder)
    theirs = _plain(bound, other.manifest, other_folder(other))
    reasons = [*ours.reasons, *(f"{other.name}: {reason}" for reason in theirs.reasons)]
    if ours.measurement is None or theirs.measurement is None:
        return _Found(None, tuple(reasons))
    a, b = ours.measurement, theirs.measurement
    apart = differences(a, b)
    if apart:
        reasons.append(f"cannot be compared: {differences_text(apart, str(folder), other.name)}")
    flags = [text for text in (a.flag, f"{other.name}: {b.flag}" if b.flag else None) if text]
    finite = a.value is not None and b.value is not None
    return _Found(
        a.model_copy(
            update={
                "value": a.value - b.value if a.value is not None and b.value is not None else None,
                "interval": _both(a.interval, b.interval) if finite else None,
                "n": min(a.n, b.n),
                "flag": "; ".join(flags) or None,
            }
        ),
        tuple(reasons),
    )


def other_folder(other: Other) -> Path:
    """The folder of the other artefact, for what to type."""
    path = Path(other.name)
    return path.parent if path.suffix == ".json" else path


def _both(a: IntervalRecord | None, b: IntervalRecord | None) -> IntervalRecord | None:
    if a is None or b is None:
        return None
    return IntervalRecord(low=a.low - b.high, high=a.high - b.low, level=min(a.level, b.level), method="ends of both intervals")


def _named(manifest: Manifest, part: str, names: tuple[str, ...]) -> list[MeasurementRecord]:
    return [measured for measured in manifest.measurements if measured.part == part and measured.name in names]


def measure_command(bound: Bound, folder: Path) -> str:
    """What measures it, as one types it."""
    against = f" --against {bound.against.parent}" if bound.against is not None else ""
    if bound.part.startswith("task-"):
        return f"python -m pipelines.evaluate {folder} --tasks {bound.part.removeprefix('task-')}{against}"
    if bound.part:
        return f"python -m pipelines.evaluate {folder} --suite standard{against}"
    return "the run that makes an artefact measures it (python -m pipelines.run ... --evaluation-windows N)"
