"""The perplexities of a manifest, computed again from the per-window rows that lie beside it."""

from __future__ import annotations

import math
from pathlib import Path

from formats.broken import Broken
from formats.folder import WINDOWS_NAME
from formats.manifest import Manifest

_CLOSE = 1e-9


def recheck_measurements(folder: Path, manifest: Manifest) -> str | None:
    """A sentence on what was computed again, or None where the artefact has no rows.

    Raises:
        Broken: a perplexity or the ratio is missing from the manifest, or is not what the rows give.
    """
    if WINDOWS_NAME not in {file.name for file in manifest.files}:
        return None
    from pyarrow import parquet

    rows = parquet.read_table(folder / WINDOWS_NAME).to_pydict()
    models = [model for model in ("float", "artefact", "cache") if f"{model}_nats" in rows]
    if any(sum(count or 0 for count in rows[f"{model}_nonfinite"]) for model in models):
        return "rows with losses that are not finite: their perplexities are not computed again"
    scored = sum(rows["scored_predictions"])
    before, after, *cached = (math.fsum(rows[f"{model}_nats"]) / scored for model in models)
    expected = {"perplexity_float": _exp(before), "perplexity": _exp(after), "ln_perplexity_ratio": after - before}
    if cached:
        expected |= {"perplexity_kv": _exp(cached[0]), "ln_perplexity_ratio_kv": cached[0] - after}
    if (manifest.kv_cache is not None) != bool(cached):
        raise Broken("measurements", "rows with a quantised cache do not go with the manifest's cache", file=WINDOWS_NAME)
    found = {measurement.name: measurement.value for measurement in manifest.measurements if not measurement.part}
    for name, value in expected.items():
        actual = found.get(name)
        if math.isinf(value) and actual is None:
            continue
        if actual is None or not math.isclose(actual, value, rel_tol=_CLOSE, abs_tol=_CLOSE):
            raise Broken("measurements", f"{name} is not what its rows give", file=WINDOWS_NAME, expected=value, actual=actual)
    return f"{len(expected)} figures computed again from {len(rows['window'])} windows"


def _exp(nats: float) -> float:
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf
