"""Scoring conventions by name: how rows become one text, how it is cut, and which predictions count.

Perplexities of two conventions must never be compared. ``seed`` is the source text's lab 4; ``gptq`` is the evaluation of the
GPTQ repository (Frantar et al. 2022), which most papers copied; ``llama.cpp`` is ``llama-perplexity`` on ``wiki.test.raw``: the
start token takes the place of each chunk's first token, and of 512 tokens only the last 255 are scored.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from calib.corpora import BLANK_LINE, WIKITEXT_FILE, Join
from calib.cut import BOS_CHOICES, Bos
from calib.windows import Tokens, Windows, evaluation_windows
from quant.errors import UsageError


@dataclass(frozen=True, slots=True)
class Convention:
    """All that a perplexity depends on besides text, span and model.

    Attributes:
        name: of the preset, with what was changed in it.
        join: how rows become one text.
        window: tokens per window.
        placement: where a start token goes, if the tokenizer adds one by itself.
        second_half: whether only predictions behind the middle of a window count.
        tail: whether the short end of a text, when all of it is measured, is a window too.
        bos: ``auto``, or a policy that was asked for in place of the preset's.
    """

    name: str
    join: Join
    window: int
    placement: Bos
    second_half: bool
    tail: bool
    bos: Bos = "auto"

    @property
    def first_scored(self) -> int:
        """Position of the first scored token in a window: the first one has nothing to be predicted from."""
        return self.window // 2 + 1 if self.second_half else 1

    def start_token(self, adds_bos: bool) -> Bos:
        """The policy for a tokenizer that adds a start token by itself, or does not."""
        if self.bos != "auto":
            return self.bos
        return self.placement if adds_bos else "none"

    def windows(self, tokens: Tokens, *, count: int | Literal["all"], start: int) -> Windows:
        """Evaluation windows of this convention from token ``start`` on; errors as ``calib.windows.evaluation_windows``."""
        return evaluation_windows(
            tokens,
            count=count,
            length=self.window,
            start=start,
            bos=self.start_token(tokens.adds_bos),
            first_scored=self.first_scored,
            tail=self.tail,
        )


CONVENTIONS: Mapping[str, Convention] = MappingProxyType(
    {
        convention.name: convention
        for convention in (
            Convention("seed", BLANK_LINE, 512, "prefix", second_half=False, tail=True),
            Convention("gptq", BLANK_LINE, 2048, "once", second_half=False, tail=False),
            Convention("llama.cpp", WIKITEXT_FILE, 512, "overwrite", second_half=True, tail=False),
        )
    }
)


def get_convention(name: str, *, window: int | None = None, bos: str = "auto") -> Convention:
    """The preset ``name``; ``window`` and ``bos`` overrule it and are then part of its name.

    Raises UsageError for a preset or a start token policy that does not exist.
    """
    found = CONVENTIONS.get(name)
    if found is None:
        near = difflib.get_close_matches(name, CONVENTIONS, n=1)
        raise UsageError(
            f"no such convention: {name!r}; " + (f"did you mean {near[0]}?" if near else f"known are {', '.join(CONVENTIONS)}")
        )
    policy = next((choice for choice in BOS_CHOICES if choice == bos), None)
    if policy is None:
        raise UsageError(f"--bos is one of {', '.join(BOS_CHOICES)}; got {bos!r}")
    changes = {"--window": window if window != found.window else None, "--bos": policy if policy != "auto" else None}
    said = " ".join(f"{option} {value}" for option, value in changes.items() if value is not None)
    window = found.window if window is None else window
    return replace(found, name=f"{name} with {said}" if said else name, window=window, bos=policy)
