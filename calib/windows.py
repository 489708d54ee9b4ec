"""Windows of token ids: which tokens of which text are measured, calibrated on, and provably not both.

By default the convention is the source text's: windows do not overlap, a window of ``length`` tokens makes ``length - 1``
predictions, evaluation starts at token 0 and calibration far behind it; ``calib.conventions`` names other ones. A start token is
a policy (``calib.cut``), taken from the tokenizer unless told, so that float and quantised runs cannot differ in it. Every choice
enters the digest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from calib.corpora import Corpus
from calib.cut import START_TOKENS, Bos, Cut, Purpose, policy
from calib.tokenizer import TextTokenizer
from quant.errors import CorpusError, WindowsOverlap

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
        ids: ``[n, length]`` int64; with ``prefix`` and ``overwrite`` column 0 is the start token.
        span: tokens of the text that were taken, half open, the tail included.
        length, stride: tokens per window, and tokens of text from one window to the next (``length - 1`` with a prefix).
        bos: ``none``, ``prefix``, ``once`` or ``overwrite``.
        digest: SHA-256 over all ids, their shape, the stride, the start token policy and ``first_scored`` where it is not 1.
        tail: the short last window ``[< length]``, only where all of the text was asked for.
        first_scored: position in each window of the first token whose prediction counts.
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
    first_scored: int = 1

    @property
    def scored_tokens(self) -> int:
        """Predictions over all windows that count: those of the tokens from ``first_scored`` on."""
        short = 0 if self.tail is None else len(self.tail) - self.first_scored
        return len(self.ids) * (self.length - self.first_scored) + short

    def describe(self) -> str:
        """One line with all that a perplexity on these windows depends on."""
        tail = "" if self.tail is None else f" and a last one of {len(self.tail)}"
        behind = "" if self.first_scored == 1 else f", those from position {self.first_scored} of each on"
        return (
            f"{self.corpus_name}, tokens {self.span[0]:,} to {self.span[1]:,}: {len(self.ids)} x {self.length}{tail}, "
            f"stride {self.stride}, {START_TOKENS[self.bos]}, {self.scored_tokens:,} scored{behind}; {self.join}, "
            f"text {self.corpus_sha256[:12]}"
        )


def tokenise(corpus: Corpus, tokenizer: TextTokenizer, *, at_least: int = 0) -> Tokens:
    """The ids of the whole corpus. Raises CorpusError when there are fewer than ``at_least`` (or none)."""
    ids = tokenizer.encode(corpus.text, at_least=at_least)
    return Tokens(ids, corpus.name, corpus.sha256, corpus.join, tokenizer.digest, tokenizer.bos_id, tokenizer.adds_bos)


def evaluation_windows(
    tokens: Tokens,
    *,
    count: int | Literal["all"],
    length: int,
    start: int = 0,
    bos: Bos = "auto",
    first_scored: int = 1,
    tail: bool = True,
) -> Windows:
    """``count`` windows from token ``start``; "all" takes the whole text, with ``tail`` its short end as one short window.

    Raises UsageError for counts and lengths that make no window, CorpusError when the text has too few tokens.
    """
    cut = Cut(length, start, policy(bos, tokens.bos_id, tokens.adds_bos), "evaluation", first_scored)
    cut.check(1 if count == "all" else count)
    if count != "all":
        return _full_windows(tokens, count, cut)
    available = max(len(tokens.ids) - start, 0)
    full, rest = divmod(available + cut.lead, cut.width)
    # a short end whose tokens are all before the first scored one measures nothing and is left out
    short = rest + cut.prefix if tail and rest + cut.prefix > first_scored else 0
    if not full and not short:
        needed, what = (first_scored + 1, "a prediction") if tail else (length, "a window")
        raise CorpusError(
            f"{tokens.corpus_name} holds {available:,} tokens from token {start:,} on, and {what} needs "
            f"{needed - cut.prefix - cut.lead}: give a longer --corpus"
        )
    return _make(tokens, full, short, cut)


def calibration_windows(
    tokens: Tokens,
    *,
    count: int,
    length: int,
    start: int | None = None,
    evaluation: Windows | None = None,
    bos: Bos = "auto",
) -> Windows:
    """``count`` windows from token 200,000, or from as far behind as the text reaches, or from ``start``.

    Raises:
        UsageError: counts and lengths that make no window.
        CorpusError: the text has too few tokens, those of ``evaluation`` on the same text not counted.
        WindowsOverlap: ``start`` leads into the tokens of ``evaluation``.
    """
    cut = Cut(length, start or 0, policy(bos, tokens.bos_id, tokens.adds_bos), "calibration", first_scored=1)
    cut.check(count)
    needed = cut.text_tokens(count)
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
    windows = _full_windows(tokens, count, replace(cut, start=start))
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
    return [part[:, int(windows.bos in ("prefix", "overwrite")) :] for part in parts if len(part)]


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


def _full_windows(tokens: Tokens, count: int, cut: Cut) -> Windows:
    needed = cut.start + cut.text_tokens(count)
    if needed > len(tokens.ids):
        after = f" from token {cut.start:,} on" if cut.start else ""
        raise CorpusError(
            f"{tokens.corpus_name} holds {len(tokens.ids):,} tokens and {count} {cut.purpose} windows of {cut.length}{after} "
            f"need {needed:,}: lower --{cut.purpose}-windows or --window, or give a longer --corpus"
        )
    return _make(tokens, count, 0, cut)


def _make(tokens: Tokens, count: int, short: int, cut: Cut) -> Windows:
    """``count`` full windows and, unless ``short`` is 0, one of ``short`` tokens behind them."""
    stop = cut.start + cut.text_tokens(count) + max(short - cut.prefix, 0)
    ids, tail = cut.arrange(tokens.ids[cut.start : stop], count, tokens.bos_id)
    return Windows(
        ids=ids,
        span=(cut.start, stop),
        length=cut.length,
        stride=cut.width,
        bos=cut.bos,
        digest=cut.digest(ids, tail),
        corpus_sha256=tokens.corpus_sha256,
        tokenizer_digest=tokens.tokenizer_digest,
        purpose=cut.purpose,
        tail=tail,
        corpus_name=tokens.corpus_name,
        join=tokens.join,
        first_scored=cut.first_scored,
    )
