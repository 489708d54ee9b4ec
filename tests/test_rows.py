"""Rows per window: which tokens, which losses, the same bytes, and the names that are ours in the output folder."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch

from calib.cut import Bos
from calib.windows import Tokens, Windows, evaluation_windows
from eval.perplexity import WindowLosses, window_losses
from eval.rows import rows_bytes, window_rows
from formats.checkpoint import Checkpoint
from quant.errors import UsageError
from tests.failure.damage import write_folder

START_TOKEN = 9_999
COLUMNS = ["window", "first_token", "scored_predictions", "float_nats", "artefact_nats", "float_nonfinite", "artefact_nonfinite"]


def windows(bos: Bos = "none", start: int = 0, length: int = 7, total: int = 40) -> Windows:
    """All of a text whose token number t has the id t."""
    tokens = Tokens(np.arange(total, dtype=np.int64), "text", "c", "one text", "t", START_TOKEN, adds_bos=False)
    return evaluation_windows(tokens, count="all", length=length, start=start, bos=bos)


def losses(chosen: Windows, seed: int = 0, nonfinite: list[int] | None = None) -> WindowLosses:
    texts = [*chosen.ids, *(() if chosen.tail is None else (chosen.tail,))]
    nats = np.random.default_rng(seed).uniform(1, 30, len(texts))
    scored = np.array([len(text) - 1 for text in texts], dtype=np.int64)
    counts = np.array([0] * len(texts) if nonfinite is None else nonfinite, dtype=np.int64)
    return WindowLosses(nats, scored, int(counts.sum()), chosen.digest, counts)


@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("bos", [policy for policy in get_args(Bos) if policy != "auto"])
def test_first_token_is_the_first_one_of_the_text_in_each_window(bos: Bos, start: int) -> None:
    chosen = windows(bos, start)
    assert chosen.tail is not None
    found = window_rows(losses(chosen), losses(chosen, seed=1), chosen)
    seen = [min(token for token in ids if token != START_TOKEN) for ids in [*chosen.ids, chosen.tail]]
    assert found["first_token"].tolist() == seen
    assert found["scored_predictions"].tolist() == [6] * len(chosen.ids) + [len(chosen.tail) - 1]


def test_the_perplexities_follow_from_the_rows() -> None:
    chosen = windows()
    before, after = losses(chosen), losses(chosen, seed=1)
    found = window_rows(before, after, chosen)
    assert list(found.columns) == COLUMNS
    assert found["window"].tolist() == list(range(6))
    total = found[["float_nats", "artefact_nats", "scored_predictions"]].sum()
    assert math.exp(total["float_nats"] / total["scored_predictions"]) == pytest.approx(before.perplexity, rel=1e-12)
    assert math.exp(total["artefact_nats"] / total["scored_predictions"]) == pytest.approx(after.perplexity, rel=1e-12)


def test_predictions_without_a_finite_loss_are_counted_in_their_window() -> None:
    chosen = replace(windows(), tail=None)

    class Broken(torch.nn.Module):
        """NaN from the position of token 16 on: the third of six predictions of window 2."""

        def forward(self, ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
            logits = torch.zeros(*ids.shape, 64)
            logits[ids >= 16] = math.nan
            return SimpleNamespace(logits=logits)

    found = window_losses(Broken(), chosen, batch=2)
    assert found.nonfinite_by_window is not None
    assert found.nonfinite_by_window.tolist() == [0, 0, 4, 6, 6]
    assert found.nonfinite == 16
    frame = window_rows(losses(chosen), found, chosen)
    assert frame["artefact_nonfinite"].tolist() == [0, 0, 4, 6, 6]
    assert frame["float_nonfinite"].tolist() == [0] * 5
    assert frame["artefact_nats"].tolist() == pytest.approx([6 * math.log(64)] * 2 + [2 * math.log(64), 0, 0])


def test_counts_that_are_known_as_a_sum_only_are_null_and_not_zero() -> None:
    chosen = windows()
    sums = replace(losses(chosen, nonfinite=[0, 2, 0, 0, 0, 1]), nonfinite_by_window=None)
    found = window_rows(replace(losses(chosen), nonfinite_by_window=None), sums, chosen)
    assert found["artefact_nonfinite"].isna().all()
    assert found["float_nonfinite"].tolist() == [0] * 6  # a sum of 0 leaves nothing open
    assert pd.read_parquet(io.BytesIO(rows_bytes(found)))["artefact_nonfinite"].isna().all()


def test_the_file_holds_the_rows_and_their_types() -> None:
    chosen = windows()
    frame = window_rows(losses(chosen), losses(chosen, seed=1, nonfinite=[0, 3, 0, 0, 0, 0]), chosen)
    data = rows_bytes(frame)
    pd.testing.assert_frame_equal(pd.read_parquet(io.BytesIO(data)), frame)
    schema = pq.read_schema(io.BytesIO(data))
    assert dict(zip(schema.names, map(str, schema.types), strict=True)) == {
        name: "double" if name.endswith("nats") else "int64" for name in COLUMNS
    }


def test_the_same_rows_give_the_same_bytes_and_others_do_not() -> None:
    chosen = windows()
    first, again = (rows_bytes(window_rows(losses(chosen), losses(chosen, seed=1), chosen)) for _ in range(2))
    assert first == again
    assert rows_bytes(window_rows(losses(chosen), losses(chosen, seed=2), chosen)) != first


def test_losses_on_other_windows_are_refused() -> None:
    chosen, other = windows(), windows(start=3)
    with pytest.raises(UsageError, match="not those of these"):
        window_rows(losses(chosen), losses(other), chosen)
    with pytest.raises(UsageError, match="losses of 5 windows are not those of these 6"):
        window_rows(losses(replace(chosen, tail=None)), losses(chosen), chosen)
    fewer = replace(losses(chosen), scored=losses(chosen).scored - 1)
    with pytest.raises(UsageError, match="different predictions"):
        window_rows(losses(chosen), fewer, chosen)


def test_losses_whose_counts_disagree_are_refused() -> None:
    with pytest.raises(ValueError, match="with the sum 3"):
        replace(losses(windows(), nonfinite=[0, 3, 0, 0, 0, 0]), nonfinite_by_window=np.zeros(6, dtype=np.int64))


def test_a_source_with_files_of_our_names_keeps_them_to_itself(tmp_path: Path) -> None:
    """Like its manifest: left out with a note, not overwritten in silence, and no reason to refuse the model."""
    folder = write_folder(tmp_path / "model")
    ours = ["Windows.Parquet", "manifest.json", "report.png"]
    for name in [*ours, "docs/report.png", "report.png.txt", "tokenizer.json"]:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.side_files() == ("docs/report.png", "report.png.txt", "tokenizer.json")
    assert checkpoint.notes == tuple(f"{name} is left out: the output gets a file of this name of its own" for name in ours)
