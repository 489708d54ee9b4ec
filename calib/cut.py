"""Where a text is cut into windows, and where the start token goes.

Policies: ``none``. ``prefix``: every window, the last one too, is the start token and ``length - 1`` tokens of text. ``once``:
one start token before the whole text, which is then cut, as in the GPTQ repository. ``overwrite``: the same, and then the first
token of each window is replaced by the start token, as in llama.cpp, so that one token of text in ``length`` is never seen.
``auto`` stands for ``prefix`` where the tokenizer adds a start token by itself, else for ``none``.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from quant.errors import UsageError

Purpose = Literal["calibration", "evaluation"]
Bos = Literal["auto", "none", "prefix", "once", "overwrite"]
BOS_CHOICES: tuple[Bos, ...] = get_args(Bos)
START_TOKENS = {
    "none": "no start token",
    "prefix": "a start token before each",
    "once": "one start token before the text",
    "overwrite": "a start token in place of each one's first token",
}


def policy(bos: Bos, bos_id: int | None, adds_bos: bool) -> Bos:
    """What ``bos`` means for a tokenizer; never ``auto``. Raises UsageError where it needs a start token that does not exist."""
    if bos == "none" or (bos == "auto" and not adds_bos):
        return "none"
    if bos_id is None:
        raise UsageError("the tokenizer names no start token to put before the windows: use the start token policy none")
    return "prefix" if bos == "auto" else bos


@dataclass(frozen=True, slots=True)
class Cut:
    """Windows of ``length`` tokens from token ``start`` of a text; ``first_scored``: position of the first one that counts."""

    length: int
    start: int
    bos: Bos
    purpose: Purpose
    first_scored: int

    @property
    def prefix(self) -> int:
        """Start tokens before each window."""
        return int(self.bos == "prefix")

    @property
    def lead(self) -> int:
        """Start tokens before the whole text."""
        return int(self.bos in ("once", "overwrite"))

    @property
    def width(self) -> int:
        """Tokens from one window to the next."""
        return self.length - self.prefix

    def text_tokens(self, count: int) -> int:
        """Tokens of text that ``count`` full windows take."""
        return count * self.width - self.lead

    def check(self, count: int) -> None:
        """Raise UsageError for what makes no window, or one without a prediction that counts."""
        if count < 1:
            raise UsageError(f"{count} windows measure nothing: ask for one or more")
        if self.length < 2:
            raise UsageError(f"a window of {self.length} tokens predicts nothing: --window is 2 or more")
        if not 1 <= self.first_scored < self.length:
            raise UsageError(
                f"a window of {self.length} tokens has none to score from position {self.first_scored} on: give a longer --window"
            )
        if self.start < 0:
            raise UsageError(f"windows cannot start at token {self.start}: give 0 or more")

    def arrange(
        self, text: NDArray[np.int64], count: int, bos_id: int | None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        """``count`` windows ``[count, length]`` and what is left of ``text`` as a short one, or None; both read-only."""
        start_token = np.array([] if bos_id is None else [bos_id], dtype=np.int64)
        stream = np.concatenate([start_token[: self.lead], text])
        whole, rest = np.split(stream, [count * self.width])
        ids = np.concatenate([np.tile(start_token[: self.prefix], (count, 1)), whole.reshape(count, self.width)], axis=1)
        tail = np.concatenate([start_token[: self.prefix], rest]) if len(rest) else None
        for array in (ids, tail):
            if array is not None:
                if self.bos == "overwrite":
                    array[..., 0] = bos_id
                array.flags.writeable = False
        return ids, tail

    def digest(self, ids: NDArray[np.int64], tail: NDArray[np.int64] | None) -> str:
        """SHA-256 over the ids and how they were cut; ``first_scored`` enters where it is not 1, as it was before it existed."""
        scored = "" if self.first_scored == 1 else f" first scored {self.first_scored}"
        short = 0 if tail is None else len(tail)
        head = f"windows {len(ids)} x {self.length} stride {self.width} bos {self.bos} tail {short}{scored}\n"
        whole = hashlib.sha256(head.encode())
        whole.update(ids.astype("<i8").tobytes())
        whole.update(b"" if tail is None else tail.astype("<i8").tobytes())
        return whole.hexdigest()
