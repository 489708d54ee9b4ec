"""From text to token ids: the ids that transformers, and so every engine built on it, would feed for the same folder.

Nothing is guessed: either the folder is of a kind for which transformers takes tokenizer.json as it stands (then the tokenizers
library reads it, without torch), or transformers itself is asked. The difference is real: transformers 5 rebuilds SmolLM2's
tokenizer (class GPT2Tokenizer), which makes 8 more tokens of WikiText-2 than its tokenizer.json does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quant.errors import CorpusError, SourceError

# Everything that can change which ids a text becomes.
_FILES = (
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
    "tekken.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
_SETTINGS = ("added_tokens.json", "special_tokens_map.json", "tokenizer_config.json")
_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
_PLAIN_MODELS = ("llama",)  # other model types may replace even a plain class by their own
_LONGEST_TOKEN_BYTES = 16  # above at_least x this, a text is surely long enough and is not counted twice


@dataclass(frozen=True, slots=True)
class _Backend:
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    bos_id: int | None
    adds_bos: bool
    special_ids: tuple[int, ...]


class TextTokenizer:
    """The tokenizer of one checkpoint folder; ``digest`` is the SHA-256 over the names and bytes of its files."""

    def __init__(self, folder: Path, digest: str, config: Mapping[str, Any], as_it_stands: bool) -> None:
        self.folder = folder
        self.digest = digest
        self._config = config
        self._as_it_stands = as_it_stands

    @classmethod
    def from_folder(cls, folder: Path) -> TextTokenizer:
        """The tokenizer of ``folder``. Raises SourceError when the folder holds none, or one that cannot be read."""
        files = [folder / name for name in _FILES if (folder / name).is_file()]
        if not any(path.name not in _SETTINGS for path in files):
            raise SourceError(f"{folder} holds no tokenizer: put tokenizer.json, or the model's own files, beside config.json")
        whole = hashlib.sha256()
        for path in files:
            whole.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
        config = _read_object(folder / "tokenizer_config.json")
        plain = config.get("tokenizer_class") in _PLAIN_CLASSES and "auto_map" not in config
        known = _read_object(folder / "config.json").get("model_type") in _PLAIN_MODELS
        made = cls(folder, whole.hexdigest(), config, plain and known and (folder / "tokenizer.json").is_file())
        if made._as_it_stands:
            _ = made._backend  # a damaged file is named here, not at the first text
        return made

    @property
    def bos_id(self) -> int | None:
        """Id of the start token, or None when the tokenizer names none."""
        return self._backend.bos_id

    @property
    def adds_bos(self) -> bool:
        """Whether the tokenizer by itself puts the start token before a text."""
        return self._backend.adds_bos

    @property
    def special_ids(self) -> tuple[int, ...]:
        """Ids of all special tokens: what marks up a text and is no part of it."""
        return self._backend.special_ids

    def encode(self, text: str, *, at_least: int = 0) -> NDArray[np.int64]:
        """Ids ``[tokens]`` of ``text``, without any special token added.

        Raises CorpusError when there are fewer than ``at_least``; a text that is far too short is refused in milliseconds, before
        transformers is imported.
        """
        if not self._as_it_stands and (self.folder / "tokenizer.json").is_file() and len(text) < at_least * _LONGEST_TOKEN_BYTES:
            rough = len(_load(self.folder).encode(text, add_special_tokens=False).ids)
            if 2 * rough < at_least:  # transformers may cut some tokens otherwise, but not half of them
                raise too_short(f"about {rough:,}", at_least)
        ids = np.array(self._backend.encode(text), dtype=np.int64)
        if len(ids) < max(at_least, 1):
            raise too_short(f"{len(ids):,}", max(at_least, 1))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, special tokens included; bytes that are no whole character become U+FFFD."""
        return self._backend.decode([int(token) for token in ids])

    @cached_property
    def _backend(self) -> _Backend:
        return _direct(self.folder, self._config) if self._as_it_stands else _through_transformers(self.folder)


def too_short(available: str, needed: int) -> CorpusError:
    """The error for a text of ``available`` tokens (said as a figure) where ``needed`` are asked for."""
    return CorpusError(
        f"the corpus holds {available} tokens and {needed:,} are needed: lower --evaluation-windows, --calibration-windows or "
        "--window, or give a longer --corpus"
    )


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"{path} cannot be read as JSON ({error}): fetch the model's files again") from error
    if not isinstance(value, dict):
        raise SourceError(f"{path} is not a JSON object: fetch the model's files again")
    return value


def _load(folder: Path) -> Any:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises a bare Exception for every defect of the file
        raise SourceError(f"{folder / 'tokenizer.json'} cannot be read ({error}): fetch the model's files again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _direct(folder: Path, config: Mapping[str, Any]) -> _Backend:
    tokenizer = _load(folder)
    named = config.get("bos_token")
    text = named.get("content") if isinstance(named, dict) else named
    bos_id = tokenizer.token_to_id(text) if isinstance(text, str) else None
    adds = bos_id is not None and tokenizer.encode("a").ids[:1] == [bos_id]  # transformers ignores add_bos_token for this kind
    special = sorted(index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    return _Backend(
        lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids),
        lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)),
        bos_id,
        adds,
        tuple(special),
    )


def _through_transformers(folder: Path) -> _Backend:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # whatever a foreign tokenizer class raises, only the folder can be mended
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise SourceError(f"the tokenizer of {folder} cannot be read ({reason}): fetch the model's files again") from error
    bos_id = tokenizer.bos_token_id
    adds = bos_id is not None and list(tokenizer("a")["input_ids"])[:1] == [bos_id]
    # verbose=False: the warning about texts longer than the model is for those who feed the text whole.
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = sorted({*tokenizer.all_special_ids, *(index for index, token in added.items() if token.special)})
    return _Backend(
        lambda text: list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]),
        lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)),
        bos_id,
        adds,
        tuple(special),
    )
