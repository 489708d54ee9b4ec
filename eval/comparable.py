"""When two figures may stand beside each other: measured on the same things, by the same convention, and on the files at hand."""

from __future__ import annotations

from formats.manifest import Manifest, MeasurementRecord

BASELINE = "baseline "
"""What leads the name of a reference's weight file in ``inputs``."""

# Settings that describe a result or its maker, not how it was measured.
_OF_THE_RESULT = frozenset({"mean_nats_per_token", "kv_cache", "reference", "reference_name", "seconds", "device", "batch"})


def differences(left: MeasurementRecord, right: MeasurementRecord) -> list[tuple[str, str, str]]:
    """(what, left's, right's) of every input and convention that is not the same, of unit and n; ``-`` where one has none."""
    found = []
    for a, b in ((left.inputs, right.inputs), (left.settings, right.settings)):
        for key in sorted({*a, *b} - _OF_THE_RESULT):
            if a.get(key) != b.get(key):
                found.append((key, a.get(key, "-"), b.get(key, "-")))
    if left.unit != right.unit:
        found.append(("unit", left.unit, right.unit))
    if left.n != right.n:
        found.append(("n", str(left.n), str(right.n)))
    return found


def differences_text(found: list[tuple[str, str, str]], left: str, right: str) -> str:
    """``windows 0123456789ab in LEFT, ba9876543210 in RIGHT; ...``"""
    return "; ".join(f"{what} {_short(a)} in {left}, {_short(b)} in {right}" for what, a, b in found)


def baseline(measurement: MeasurementRecord) -> dict[str, str]:
    """Weight file to SHA-256 of what the measurement is relative to; empty for an absolute one."""
    return {key.removeprefix(BASELINE): value for key, value in measurement.inputs.items() if key.startswith(BASELINE)}


def foreign(measurement: MeasurementRecord, manifest: Manifest) -> str | None:
    """Why the measurement is not one of the artefact's files as listed, or None.

    It must have measured every weight file, and nothing that the artefact does not have (scales of a cache are files, too).
    """
    listed = {file.name: file.sha256 for file in manifest.files}
    for name, sha256 in measurement.subject.items():
        if listed.get(name) != sha256:
            return f"was measured on another {name} (SHA-256 {sha256[:16]}, here {listed.get(name, 'no such file')[:16]})"
    for name in manifest.weights():
        if name not in measurement.subject:
            return f"was measured without {name}"
    return None


def _short(text: str) -> str:
    is_digest = len(text) == 64 and set(text) <= set("0123456789abcdef")
    return text[:12] if is_digest else text
