"""Verdicts of a policy in the manifest: what was judged, on exactly which files, and whether it still says what it said.

A verdict is worth what it is bound to. So a record names every file that an engine reads with its hash, and every bound keeps the
figures that it judged: files or measurements that have changed since make the record broken, not a little out of date.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from formats.broken import Broken
from formats.folder import REPORT_NAME, WINDOWS_NAME
from formats.records import Count, Record, Sha256

if TYPE_CHECKING:
    from formats.manifest import Manifest

Judged = Literal["value", "low", "high"]

EVALUATIONS = "evaluations"
_OF_THE_LEDGER = (WINDOWS_NAME, REPORT_NAME)
_SHOWN = 3


class BoundRecord(Record):
    """One bound of a policy against the measurement that it judges: ``figure`` is the value or the end of its interval.

    ``judged`` says which; ``figure`` is None where there was nothing to judge, which never holds; ``reason`` says why a bound
    does not hold although its figure may. ``value``, ``low``, ``high`` (at ``level``) and ``n`` are those of the measurement, or
    of its difference to the artefact ``against``, whose weight files are ``against_subject``.
    """

    name: str
    part: str
    unit: str = ""
    judged: Judged
    figure: float | None
    value: float | None = None
    low: float | None = None
    high: float | None = None
    level: float | None = None
    n: Count = 0
    at_most: float | None = None
    at_least: float | None = None
    held: bool
    reason: str = ""
    against: str | None = None
    against_subject: dict[str, Sha256] = Field(default_factory=dict)

    @property
    def limit(self) -> str:
        """The bound as text, ``at most 0.02``."""
        return f"at most {self.at_most:g}" if self.at_most is not None else f"at least {self.at_least:g}"

    def within(self) -> bool:
        """Whether the figure is there and inside the bound."""
        if self.figure is None:
            return False
        above = self.at_least is None or self.figure >= self.at_least
        return above and (self.at_most is None or self.figure <= self.at_most)


class GateRecord(Record):
    """A policy's verdict on exactly the files in ``subject``."""

    policy: str
    policy_sha256: Sha256
    passed: bool
    judged_utc: str
    subject: dict[str, Sha256]
    bounds: list[BoundRecord]

    def fault(self) -> str | None:
        """Why the record contradicts itself, or None: a verdict must follow from its own figures."""
        for bound in self.bounds:
            figures = {"value": bound.value, "low": bound.low, "high": bound.high}
            if (bound.at_most is None) == (bound.at_least is None):
                return f"its bound on {bound.name} needs one of at_most and at_least"
            if bound.held and (not bound.within() or bound.reason or bound.figure != figures[bound.judged]):
                return f"its bound on {bound.name} is recorded as held, but its own figures say otherwise"
        if self.passed != (bool(self.bounds) and all(bound.held for bound in self.bounds)):
            return "its verdict does not follow from its bounds"
        return None


def gate_subject(manifest: Manifest) -> dict[str, str]:
    """Name to SHA-256 of every file that an engine may read: all but the rows and the picture that only describe them."""
    return {
        file.name: file.sha256
        for file in manifest.files
        if file.name not in _OF_THE_LEDGER and not file.name.startswith(f"{EVALUATIONS}/")
    }


def check_gates(manifest: Manifest) -> list[str]:
    """One sentence for every verdict in the manifest: which policy, passed or not, on which hash.

    Raises:
        Broken: a verdict on other files than these, one that contradicts itself, or one on figures that were measured anew.
    """
    said = []
    files = gate_subject(manifest)
    names = [gate.policy for gate in manifest.gates]
    for gate in manifest.gates:
        where = f"policy {gate.policy}"
        if names.count(gate.policy) > 1:
            raise Broken("gates", f"{where} has two verdicts: judge again (python -m pipelines.gate)")
        for name in sorted({*files, *gate.subject}):
            if files.get(name) != gate.subject.get(name):
                text = f"{where} judged other files: judge these (python -m pipelines.gate)"
                raise Broken("gates", text, file=name, expected=files.get(name), actual=gate.subject.get(name))
        fault = gate.fault()
        if fault is not None:
            raise Broken("gates", f"{where}: {fault}")
        for bound in gate.bounds:
            _check_figures(manifest, gate.policy, bound)
        verdict = (
            "passed" if gate.passed else f"failed ({sum(not bound.held for bound in gate.bounds)} of {len(gate.bounds)} bounds)"
        )
        said.append(f"{gate.policy} {verdict} on {hashes_text(manifest.weights())}, judged {gate.judged_utc}")
    return said


def _check_figures(manifest: Manifest, policy: str, bound: BoundRecord) -> None:
    """A held bound must be about a measurement that is still there as it was judged."""
    if not bound.held or bound.against is not None:
        return
    found = [m for m in manifest.measurements if (m.name, m.part) == (bound.name, bound.part)]
    now = [(m.value, m.interval.low if m.interval else None, m.interval.high if m.interval else None) for m in found]
    judged = (bound.value, bound.low, bound.high)
    if now != [judged]:
        what = f"{bound.name}{f' of part {bound.part}' if bound.part else ''}"
        text = f"policy {policy} judged another {what}: judge again (python -m pipelines.gate)"
        raise Broken("gates", text, expected=now[0] if len(now) == 1 else now, actual=judged)


def hashes_text(files: dict[str, str]) -> str:
    """``model.safetensors 0123456789abcdef``, the first few of many."""
    shown = [f"{name} {digest[:16]}" for name, digest in list(files.items())[:_SHOWN]]
    more = f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else ""
    return ", ".join(shown) + more
