"""Windows of token ids: which tokens of which text are measured, calibrated on, and provably not both.

The convention is the source text's: windows do not overlap, a window of ``length`` tokens makes ``length - 1`` predictions,
evaluation starts at token 0 and calibration far behind it. A start token is a policy, taken from the tokenizer unless told: with
``prefix`` every window, the last one too, is the start token and ``length - 1`` tokens of text, so that float and quantised runs
cannot differ in it. Every choice enters the digest.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from calib.corpora import Corpus
from calib.tokenizer import TextTokenizer
from quant.errors import CorpusError, UsageError, WindowsOverlap

Purpose = Literal["calibration", "evaluation"]
FAR = 200_000  # default first token of the calibration windows
NGRAM = 13  # tokens; the length by which GPT-3 (Brown et al. 2020, appendix C) looked for test text in training text
_SHORTEST_NGRAM = 8  # shorter runs are common words, and say nothing about shared text
_MOST_SHARED = 0.5
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no id is shifted out of the hash


@dataclass(frozen=True, slots=True)
class Tokens:
    """The ids ``[tokens]`` of one corpus and what they were made from."""

    ids: NDArray[np.int64]
    corpus_name: str
    corpus_sha256: str
    join: str
    tokenizer_digest: str
    bos_id: int | None
    adds_bos: bool


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of one text.

    Attributes:
        ids: ``[n, length]`` int64; with ``bos == "prefix"`` column 0 is the start token.
        span: tokens of the text that were taken, half open, the tail included.
        length, stride: tokens per window, and tokens of text from one window to the next (``length - 1`` with a prefix).
        bos: ``none`` or ``prefix``.
        digest: SHA-256 over all ids, their shape, the stride and the start token policy.
        tail: the short last window ``[< length]``, only where all of the text was asked for.
    """

    ids: NDArray[np.int64]
    span: tuple[int, int]
    length: int
    stride: int
    bos: str
    digest: str
    corpus_sha256: str
    tokenizer_digest: str
    purpose: Purpose
    tail: NDArray[np.int64] | None = None
    corpus_name: str = ""
    join: str = ""

    @property
    def scored_tokens(self) -> int:
        """Predictions over all windows: the first token of each is never predicted."""
        return len(self.ids) * (self.length - 1) + (0 if self.tail is None else len(self.tail) - 1)

    def describe(self) -> str:
        """One line with all that a perplexity on these windows depends on."""
        tail = "" if self.tail is None else f" and a last one of {len(self.tail)}"
        start = "no start token" if self.bos == "none" else "a start token before each"
        return (
            f"{self.corpus_name}, tokens {self.span[0]:,} to {self.span[1]:,}: {len(self.ids)} x {self.length}{tail}, "
            f"stride {self.stride}, {start}, {self.scored_tokens:,} scored; {self.join}, text {self.corpus_sha256[:12]}"
        )


def tokenise(corpus: Corpus, tokenizer: TextTokenizer, *, at_least: int = 0) -> Tokens:
    """The ids of the whole corpus. Raises CorpusError when there are fewer than ``at_least`` (or none)."""
    ids = tokenizer.encode(corpus.text, at_least=at_least)
    return Tokens(ids, corpus.name, corpus.sha256, corpus.join, tokenizer.digest, tokenizer.bos_id, tokenizer.adds_bos)


def evaluation_windows(
    tokens: Tokens, *, count: int | Literal["all"], length: int, start: int = 0, bos: Literal["auto", "none", "prefix"] = "auto"
) -> Windows:
    """``count`` windows from token ``start``; "all" takes the whole text, its short end as one short window.

    Raises UsageError for counts and lengths that make no window, CorpusError when the text has too few tokens.
    """
    if count != "all":
        return _cut(tokens, count, length, start, _prefix(tokens, bos), "evaluation")
    _check(1, length, start)
    prefix = _prefix(tokens, bos)
    stride = length - len(prefix)
    available = max(len(tokens.ids) - start, 0)
    full, rest = divmod(available, stride)
    tail = None
    if rest and rest + len(prefix) >= 2:  # a lone token predicts nothing and is left out
        tail = np.array([*prefix, *tokens.ids[len(tokens.ids) - rest :]], dtype=np.int64)
    if not full and tail is None:
        raise CorpusError(
            f"{tokens.corpus_name} holds {available:,} tokens from token {start:,} on, and a prediction needs {2 - len(prefix)}: "
            "give a longer --corpus"
        )
    return _make(tokens, full, length, start, prefix, tail, "evaluation")


def calibration_windows(
    tokens: Tokens,
    *,
    count: int,
    length: int,
    start: int | None = None,
    evaluation: Windows | None = None,
    bos: Literal["auto", "none", "prefix"] = "auto",
) -> Windows:
    """``count`` windows from token 200,000, or from as far behind as the text reaches, or from ``start``.

    Raises:
        UsageError: counts and lengths that make no window.
        CorpusError: the text has too few tokens, those of ``evaluation`` on the same text not counted.
        WindowsOverlap: ``start`` leads into the tokens of ``evaluation``.
    """
    prefix = _prefix(tokens, bos)
    _check(count, length, start or 0)
    needed = count * (length - len(prefix))
    if start is None:
        same = evaluation is not None and evaluation.corpus_sha256 == tokens.corpus_sha256
        taken = evaluation.span[1] if evaluation is not None and same else 0
        if taken + needed > len(tokens.ids):
            before = f"the evaluation windows end at token {taken:,} and " if taken else ""
            options = "--calibration-windows, --evaluation-windows" if taken else "--calibration-windows"
            raise CorpusError(
                f"{tokens.corpus_name} holds {len(tokens.ids):,} tokens; {before}{count} calibration windows of {length} need "
                f"{needed:,}: lower {options} or --window, or give a longer --corpus"
            )
        start = max(min(FAR, len(tokens.ids) - needed), taken)
    windows = _cut(tokens, count, length, start, prefix, "calibration")
    if evaluation is not None:
        _check_spans(windows, evaluation)
    return windows


def check_disjoint(calibration: Windows, evaluation: Windows) -> float:
    """Share of the evaluation windows' distinct 13-grams that also stand in the calibration windows.

    Spans are compared when both come from one text, n-grams always: the same text may lie in two files. Shorter windows are
    compared by n-grams of their length, and below 8 tokens not at all (0.0).
    Raises WindowsOverlap, with both spans, when the spans meet or when more than half of the n-grams are shared.
    """
    _check_spans(calibration, evaluation)
    size = min(NGRAM, *(max(text.shape[1] for text in _texts(windows)) for windows in (calibration, evaluation)))
    if size < _SHORTEST_NGRAM:
        return 0.0
    wanted = np.unique(_hashes(evaluation, size))
    share = float(np.isin(wanted, _hashes(calibration, size)).mean())
    if share > _MOST_SHARED:
        raise WindowsOverlap(
            f"{share:.0%} of the {size}-grams of the evaluation windows ({_place(evaluation)}) also stand in the calibration "
            f"windows ({_place(calibration)}): calibrate on another text"
        )
    return share


def _check_spans(calibration: Windows, evaluation: Windows) -> None:
    (a, b), (c, d) = calibration.span, evaluation.span
    if calibration.corpus_sha256 == evaluation.corpus_sha256 and a < d and c < b:
        raise WindowsOverlap(
            f"calibration windows ({_place(calibration)}) and evaluation windows ({_place(evaluation)}) share tokens: start the "
            f"calibration at token {d:,} or later, or use fewer or shorter windows"
        )


def _place(windows: Windows) -> str:
    return f"{windows.corpus_name or 'text'} tokens {windows.span[0]:,} to {windows.span[1]:,}"


def _texts(windows: Windows) -> list[NDArray[np.int64]]:
    """``[n, length]`` of the full windows and ``[1, length]`` of the tail, without the start token that all share."""
    parts = [windows.ids, *(() if windows.tail is None else (windows.tail[None, :],))]
    return [part[:, int(windows.bos == "prefix") :] for part in parts if len(part)]


def _hashes(windows: Windows, size: int) -> NDArray[np.uint64]:
    """One 64-bit polynomial hash for each run of ``size`` ids inside a window: any two runs collide with chance about 2^-64."""
    found = [np.empty(0, dtype=np.uint64)]
    for text in _texts(windows):
        width = max(text.shape[1] - size + 1, 0)
        runs = np.zeros((len(text), width), dtype=np.uint64)
        for place in range(size):  # in place: eight bytes a run, however long the text
            runs *= _MULTIPLIER
            runs += text[:, place : place + width].astype(np.uint64) + np.uint64(1)
        found.append(runs.reshape(-1))
    return np.concatenate(found)


def _prefix(tokens: Tokens, bos: Literal["auto", "none", "prefix"]) -> tuple[int, ...]:
    if bos == "none" or (bos == "auto" and not tokens.adds_bos):
        return ()
    if tokens.bos_id is None:
        raise UsageError("the tokenizer names no start token to put before the windows: use the start token policy none")
    return (tokens.bos_id,)


def _check(count: int, length: int, start: int) -> None:
    if count < 1:
        raise UsageError(f"{count} windows measure nothing: ask for one or more")
    if length < 2:
        raise UsageError(f"a window of {length} tokens predicts nothing: --window is 2 or more")
    if start < 0:
        raise UsageError(f"windows cannot start at token {start}: give 0 or more")


def _cut(tokens: Tokens, count: int, length: int, start: int, prefix: tuple[int, ...], purpose: Purpose) -> Windows:
    _check(count, length, start)
    needed = start + count * (length - len(prefix))
    if needed > len(tokens.ids):
        after = f" from token {start:,} on" if start else ""
        raise CorpusError(
            f"{tokens.corpus_name} holds {len(tokens.ids):,} tokens and {count} {purpose} windows of {length}{after} need "
            f"{needed:,}: lower --{purpose}-windows or --window, or give a longer --corpus"
        )
    return _make(tokens, count, length, start, prefix, None, purpose)


def _make(
    tokens: Tokens,
    count: int,
    length: int,
    start: int,
    prefix: tuple[int, ...],
    tail: NDArray[np.int64] | None,
    purpose: Purpose,
) -> Windows:
    stride = length - len(prefix)
    text = tokens.ids[start : start + count * stride].reshape(count, stride)
    ids = np.concatenate([np.full((count, len(prefix)), prefix, dtype=np.int64), text], axis=1)
    bos = "prefix" if prefix else "none"
    stop = start + count * stride + (0 if tail is None else len(tail) - len(prefix))
    for array in (ids, tail):
        if array is not None:
            array.flags.writeable = False
    short = 0 if tail is None else len(tail)
    whole = hashlib.sha256(f"windows {count} x {length} stride {stride} bos {bos} tail {short}\n".encode())
    whole.update(ids.astype("<i8").tobytes())
    whole.update(b"" if tail is None else tail.astype("<i8").tobytes())
    return Windows(
        ids=ids,
        span=(start, stop),
        length=length,
        stride=stride,
        bos=bos,
        digest=whole.hexdigest(),
        corpus_sha256=tokens.corpus_sha256,
        tokenizer_digest=tokens.tokenizer_digest,
        purpose=purpose,
        tail=tail,
        corpus_name=tokens.corpus_name,
        join=tokens.join,
    )
