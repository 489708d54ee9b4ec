"""Windows: exact ids, exact spans, a start token policy that is told, and nothing measured on what was calibrated on."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calib.windows import (
    Tokens,
    Windows,
    calibration_windows,
    check_disjoint,
    evaluation_windows,
)
from quant.errors import CorpusError, UsageError, WindowsOverlap


def tokens(
    count: int, *, text: str = "corpus", adds_bos: bool = False, bos_id: int | None = 9_999_999, seed: int | None = None
) -> Tokens:
    """``count`` ids that tell their own place (or random ones), as of a corpus with the hash ``text``."""
    ids = np.arange(count) if seed is None else np.random.default_rng(seed).integers(0, 50_000, count)
    return Tokens(ids.astype(np.int64), text, text, "one text", "t", bos_id, adds_bos)


# --- windows ---


@given(
    available=st.integers(0, 90),
    length=st.integers(2, 12),
    start=st.integers(0, 20),
    bos=st.sampled_from(["none", "prefix"]),
)
def test_all_windows_score_every_token_that_can_be_scored(
    available: int, length: int, start: int, bos: Literal["none", "prefix"]
) -> None:
    text = tokens(available)
    prefix = int(bos == "prefix")
    left = max(available - start, 0)
    try:
        windows = evaluation_windows(text, count="all", length=length, start=start, bos=bos)
    except CorpusError:
        assert left + prefix < 2, "only a text without one prediction is refused"
        return
    rows = [row.tolist() for row in windows.ids] + ([] if windows.tail is None else [windows.tail.tolist()])
    assert all(row[:prefix] == [text.bos_id] * prefix for row in rows)
    seen = [token for row in rows for token in row[prefix:]]
    assert seen == list(range(start, start + len(seen))), "text in order, nothing twice, nothing left out"
    assert windows.span == (start, start + len(seen))
    assert left - len(seen) in ((0,) if prefix else (0, 1)), "a single token that nothing precedes is all that may be left"
    assert windows.scored_tokens == sum(len(row) - 1 for row in rows)
    assert windows.ids.shape == (left // (length - prefix), length)
    assert windows.stride == length - prefix
    assert windows.tail is None or len(windows.tail) < length


@pytest.mark.parametrize(
    ("available", "rows", "tail", "scored"), [(512, 1, None, 511), (513, 1, None, 511), (514, 1, 2, 512), (7, 0, 7, 6)]
)
def test_text_around_one_window(available: int, rows: int, tail: int | None, scored: int) -> None:
    """R56: shorter than a window is one short window; exactly a window; a lone last token has nothing to be predicted from."""
    windows = evaluation_windows(tokens(available), count="all", length=512)
    assert (len(windows.ids), None if windows.tail is None else len(windows.tail), windows.scored_tokens) == (rows, tail, scored)


def test_seed_convention() -> None:
    """8 x 512 from token 0, 511 predictions each; calibration from token 200,000."""
    text = tokens(304_986)
    evaluation = evaluation_windows(text, count=8, length=512)
    calibration = calibration_windows(text, count=32, length=512, evaluation=evaluation)
    assert (evaluation.ids == np.arange(4096).reshape(8, 512)).all()
    assert (calibration.ids == 200_000 + np.arange(32 * 512).reshape(32, 512)).all()
    assert (evaluation.span, calibration.span) == ((0, 4096), (200_000, 216_384))
    assert (evaluation.scored_tokens, evaluation.stride, evaluation.bos, evaluation.purpose) == (4088, 512, "none", "evaluation")
    assert calibration.purpose == "calibration"
    assert check_disjoint(calibration, evaluation) == 0


def test_windows_cannot_be_changed_behind_their_digest() -> None:
    windows = evaluation_windows(tokens(30), count="all", length=8)
    assert windows.tail is not None
    for array in (windows.ids, windows.tail):
        with pytest.raises(ValueError, match="read-only"):
            array[..., 0] = 1


def test_digest_tells_apart_whatever_changes_a_score() -> None:
    base = tokens(100)
    changed = replace(base, ids=np.where(base.ids == 50, 51, base.ids))
    made = [
        evaluation_windows(base, count=8, length=10),
        evaluation_windows(changed, count=8, length=10),
        evaluation_windows(base, count=8, length=10, start=1),
        evaluation_windows(base, count=10, length=8),
        evaluation_windows(base, count=9, length=10),
        evaluation_windows(base, count=8, length=10, bos="prefix"),
        evaluation_windows(base, count="all", length=80),
        evaluation_windows(base, count=1, length=80),
    ]
    assert len({windows.digest for windows in made}) == len(made)
    same_ids = [replace(base, ids=np.array(ids), bos_id=7) for ids in ([7, 1, 2, 7, 3, 4], [1, 2, 3, 4])]
    plain = evaluation_windows(same_ids[0], count=2, length=3, bos="none")
    prefixed = evaluation_windows(same_ids[1], count=2, length=3, bos="prefix")
    assert (plain.ids == prefixed.ids).all()
    assert plain.digest != prefixed.digest, "a start token of the text is not one of the policy"
    again = evaluation_windows(tokens(100), count=8, length=10)
    assert again.digest == made[0].digest
    assert calibration_windows(base, count=8, length=10, start=0).digest == made[0].digest, "the same ids are the same windows"


@pytest.mark.parametrize(
    ("adds_bos", "bos", "expected"),
    [(False, "auto", "none"), (True, "auto", "prefix"), (True, "none", "none"), (False, "prefix", "prefix")],
)
def test_start_token_is_a_policy_that_is_told(adds_bos: bool, bos: Literal["auto", "none", "prefix"], expected: str) -> None:
    """R49: taken from the tokenizer unless told, the same in every window, and part of the description."""
    text = tokens(100, adds_bos=adds_bos)
    windows = evaluation_windows(text, count=3, length=10, bos=bos)
    assert windows.bos == expected
    if expected == "prefix":
        assert (windows.ids[:, 0] == text.bos_id).all()
        assert (windows.ids[:, 1:] == np.arange(27).reshape(3, 9)).all()
        assert "a start token before each" in windows.describe()
    else:
        assert (windows.ids == np.arange(30).reshape(3, 10)).all()
        assert "no start token" in windows.describe()


def test_description_holds_what_two_tools_differ_in() -> None:
    """R58: text and its hash, join, window, stride, scored tokens."""
    said = evaluation_windows(replace(tokens(1040), join="rows joined by a blank line"), count="all", length=1024).describe()
    for part in (
        "corpus, tokens 0 to 1,040",
        "1 x 1024 and a last one of 16",
        "stride 1024",
        "1,038 scored",
        "blank line",
    ):
        assert part in said


def test_prefix_without_a_start_token_is_refused() -> None:
    with pytest.raises(UsageError, match="names no start token"):
        evaluation_windows(tokens(100, bos_id=None), count=1, length=10, bos="prefix")


@pytest.mark.parametrize(("count", "length", "start"), [(0, 10, 0), (-1, 10, 0), (1, 1, 0), (1, 0, 0), (1, 10, -1)])
def test_windows_that_measure_nothing_are_refused(count: int, length: int, start: int) -> None:
    with pytest.raises(UsageError):
        evaluation_windows(tokens(100), count=count, length=length, start=start)
    with pytest.raises(UsageError):
        calibration_windows(tokens(100), count=count, length=length, start=start)


def test_too_short_a_text_names_what_is_there_and_what_is_needed() -> None:
    with pytest.raises(
        CorpusError, match=r"corpus holds 4,095 tokens and 8 evaluation windows of 512 need 4,096: lower --evaluation-w"
    ):
        evaluation_windows(tokens(4095), count=8, length=512)
    evaluation = evaluation_windows(tokens(5000), count=8, length=512)
    said = r"corpus holds 5,000 tokens; the evaluation windows end at token 4,096 and 32 calibration windows of 512 need 16,384"
    with pytest.raises(CorpusError, match=said):
        calibration_windows(tokens(5000), count=32, length=512, evaluation=evaluation)
    with pytest.raises(
        CorpusError, match=r"4 calibration windows of 512 from token 4,096 on need 6,144: lower --calibration-windows"
    ):
        calibration_windows(tokens(5000), count=4, length=512, start=4096)
    with pytest.raises(CorpusError, match=r"corpus holds 1 tokens from token 0 on, and a prediction needs 2"):
        evaluation_windows(tokens(1), count="all", length=512)


# --- disjoint ---


@given(
    available=st.integers(100, 400_000), evaluated=st.integers(1, 40), calibrated=st.integers(1, 40), length=st.integers(2, 600)
)
def test_default_calibration_is_far_behind_and_never_overlaps(
    available: int, evaluated: int, calibrated: int, length: int
) -> None:
    text = tokens(available)
    if (evaluated + calibrated) * length > available:
        return
    evaluation = evaluation_windows(text, count=evaluated, length=length)
    calibration = calibration_windows(text, count=calibrated, length=length, evaluation=evaluation)
    assert calibration.span[0] >= evaluation.span[1]
    assert calibration.span[0] == 200_000 or calibration.span[1] == available, "as far behind as the text reaches"
    assert check_disjoint(calibration, evaluation) == 0


def test_overlap_is_refused_with_both_spans() -> None:
    text = tokens(10_000)
    evaluation = evaluation_windows(text, count=8, length=512)
    for start in (0, 4095):
        both = rf"corpus tokens {start:,} to {start + 2048:,}\) and evaluation windows \(corpus tokens 0 to 4,096\) share tokens"
        with pytest.raises(WindowsOverlap, match=both):
            calibration_windows(text, count=4, length=512, start=start, evaluation=evaluation)
        with pytest.raises(WindowsOverlap, match=both):
            check_disjoint(calibration_windows(text, count=4, length=512, start=start), evaluation)
    assert calibration_windows(text, count=4, length=512, start=4096, evaluation=evaluation).span[0] == 4096
    later = evaluation_windows(text, count=2, length=512, start=2048)
    assert calibration_windows(text, count=4, length=512, start=0, evaluation=later).span == (0, 2048), "touching is not sharing"


def test_same_text_in_another_file_is_found() -> None:
    """R65: two files with one text have two hashes; the n-grams tell."""
    evaluation = evaluation_windows(tokens(20_000, seed=1), count=8, length=512)
    copy = replace(tokens(20_000, seed=1), corpus_name="copy", corpus_sha256="copy")
    with pytest.raises(WindowsOverlap, match=r"100% of the 13-grams .*corpus tokens 0 to 4,096.*copy tokens 0 to 8,192"):
        check_disjoint(calibration_windows(copy, count=16, length=512, start=0), evaluation)
    other = replace(tokens(20_000, seed=2), corpus_sha256="other")
    assert check_disjoint(calibration_windows(other, count=16, length=512, start=0), evaluation) == 0


@pytest.mark.parametrize("bos", ["none", "prefix"])
def test_half_of_the_lines_shared_is_measured(bos: Literal["none", "prefix"]) -> None:
    """R65: every second line of 40 tokens is shared; a 13-gram lies within one line in 28 of 40 places."""
    shared, ours, theirs = (np.random.default_rng(seed).integers(0, 50_000, (100, 40)) for seed in (1, 2, 3))
    made = []
    for name, own in (("a", ours), ("b", theirs)):
        ids = np.stack([shared, own], axis=1).reshape(-1).astype(np.int64)
        made.append(Tokens(ids, name, name, "one text", "t", 60_000, False))
    evaluation = evaluation_windows(made[0], count=1, length=8000, bos=bos)
    calibration = calibration_windows(made[1], count=1, length=8000, start=0, bos=bos)
    brute = set(grams(evaluation)) & set(grams(calibration))
    assert check_disjoint(calibration, evaluation) == pytest.approx(len(brute) / len(set(grams(evaluation))), abs=1e-12)
    assert check_disjoint(calibration, evaluation) == pytest.approx(0.5 * 28 / 40, abs=0.01)


def grams(windows: Windows, size: int = 13) -> list[tuple[int, ...]]:
    text = windows.ids[:, 1:].tolist() if windows.bos == "prefix" else windows.ids.tolist()
    return [tuple(row[i : i + size]) for row in text for i in range(len(row) - size + 1)]


def test_start_tokens_short_tails_and_short_windows_are_not_shared_text() -> None:
    one, two = (replace(tokens(1000, seed=seed), corpus_sha256=str(seed)) for seed in (1, 2))
    evaluation = evaluation_windows(one, count="all", length=47, bos="prefix")
    assert evaluation.tail is not None
    assert check_disjoint(calibration_windows(two, count=5, length=47, bos="prefix"), evaluation) == 0
    few = replace(tokens(1000, seed=3), ids=np.arange(1000) % 2, corpus_sha256="few")
    pairs = evaluation_windows(few, count=8, length=4)
    assert check_disjoint(calibration_windows(replace(few, corpus_sha256="else"), count=8, length=4), pairs) == 0
