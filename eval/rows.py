"""One row per window: what the float model and the artefact lost on it, kept beside the weights as ``windows.parquet``.

The rows are what the perplexities and their paired interval were computed from: both can be recomputed, and windows looked at one
by one, without running a model again.
"""

from __future__ import annotations

import io

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from calib.windows import Windows
from eval.perplexity import WindowLosses
from quant.errors import UsageError

SCHEMA = pa.schema(
    [
        pa.field("window", pa.int64(), nullable=False),  # from 0; a short last window is the last row
        pa.field("first_token", pa.int64(), nullable=False),  # of the text that the window holds, counted in the corpus
        pa.field("scored_predictions", pa.int64(), nullable=False),
        pa.field("float_nats", pa.float64(), nullable=False),  # sum over the predictions that have a finite loss
        pa.field("artefact_nats", pa.float64(), nullable=False),
        pa.field("float_nonfinite", pa.int64()),  # predictions without a finite loss; null: not counted by window
        pa.field("artefact_nonfinite", pa.int64()),
    ]
)


# Only where a quantised cache was measured: the artefact's weights with that cache.
CACHE_FIELDS = (pa.field("cache_nats", pa.float64(), nullable=False), pa.field("cache_nonfinite", pa.int64()))


def window_rows(before: WindowLosses, after: WindowLosses, windows: Windows, cached: WindowLosses | None = None) -> pd.DataFrame:
    """Rows of the float model (``before``) and the artefact (``after``) on ``windows``; columns and units as in ``SCHEMA``.

    ``cached`` are the losses with a quantised cache.

    Raises:
        UsageError: the losses are not of the same windows, or not of these.
    """
    n = len(windows.ids) + (windows.tail is not None)
    for losses in (before, after, *(() if cached is None else (cached,))):
        if len(losses.nats) != n or losses.windows_digest not in ("", windows.digest):
            raise UsageError(f"losses of {len(losses.nats)} windows are not those of these {n}: measure both models on the same")
    if not all(np.array_equal(before.scored, losses.scored) for losses in (after, cached or after)):
        raise UsageError("the two models were scored on different predictions: measure both on the same windows")
    number = np.arange(n, dtype=np.int64)
    first = windows.span[0] + number * windows.stride
    if windows.bos == "once":  # the start token before the whole text takes a place in window 0 only
        first[1:] -= 1
    columns = {
        "window": number,
        "first_token": first,
        "scored_predictions": before.scored,
        "float_nats": before.nats,
        "artefact_nats": after.nats,
        "float_nonfinite": _nonfinite(before),
        "artefact_nonfinite": _nonfinite(after),
    }
    if cached is not None:
        columns |= {"cache_nats": cached.nats, "cache_nonfinite": _nonfinite(cached)}
    return pd.DataFrame(columns)


def _nonfinite(losses: WindowLosses) -> pd.Series[int]:
    """Counts by window, null where only their sum is known and it is not 0."""
    counts = losses.nonfinite_by_window
    if counts is None and losses.nonfinite:
        return pd.Series([None] * len(losses.nats), dtype="Int64")
    return pd.Series(np.zeros(len(losses.nats), dtype=np.int64) if counts is None else counts, dtype="Int64")


def rows_bytes(frame: pd.DataFrame) -> bytes:
    """The parquet file of ``frame``: the same rows give the same bytes under the same versions of pandas and pyarrow."""
    schema = pa.schema([*SCHEMA, *CACHE_FIELDS]) if "cache_nats" in frame else SCHEMA
    table = pa.Table.from_pandas(frame, schema=schema, preserve_index=False)
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()
