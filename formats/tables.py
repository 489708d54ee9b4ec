"""Embedding tables and output heads: which modules they are, and whether a checkpoint shares one table between both.

A tied pair whose table is quantised can be stored in two ways, and what engines load decides which is used. Seen with
transformers 5.24, compressed-tensors 0.20.1 and vLLM 0.32:

=====================  ====================================================================================================
the recipe names       what is stored
=====================  ====================================================================================================
neither                one float table, ``tie_word_embeddings`` as in the source; every engine loads it
only the head          an explicit pair: float table, quantised head, ``tie_word_embeddings`` false; both engines load it
only the embedding     an explicit pair: quantised table, float head, ``tie_word_embeddings`` false
both, alike            one quantised table that both share, ``tie_word_embeddings`` true
=====================  ====================================================================================================

A quantised *embedding* is refused by vLLM (no look-up for packed rows) and by transformers with packed weights; transformers with
``CompressedTensorsConfig(dequantize=True)`` and this project's reader load it. No torch is imported here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from formats.checkpoint import Checkpoint
from quant.errors import SourceError

_INPUT_TABLES = ("embed_tokens", "wte", "embed_in")
_TABLES = (*_INPUT_TABLES, "wpe", "embed_positions")
_HEADS = ("lm_head", "embed_out")
_TIED_BY_DEFAULT = ("gemma", "gemma2", "gemma3", "gemma3_text", "gpt2", "opt", "bloom")
TIE_KEY = "tie_word_embeddings"


def is_table(module: str) -> bool:
    """Whether a module is an embedding table, which is looked up and not multiplied."""
    return module.rpartition(".")[2] in _TABLES


def is_input_table(module: str) -> bool:
    """Whether a module is the table of token embeddings."""
    return module.rpartition(".")[2] in _INPUT_TABLES


def is_head(module: str) -> bool:
    """Whether a module is the output head."""
    return module.rpartition(".")[2] in _HEADS


@dataclass(frozen=True, slots=True)
class TiedPair:
    """Names of the two tensors that share one table; ``stored``: the source holds the head as well, with equal bytes."""

    head: str
    embedding: str
    stored: bool


def tied_pair(checkpoint: Checkpoint) -> TiedPair | None:
    """The output head and the embedding that are one table by the configuration, or None.

    Raises:
        SourceError: the two are tied but stored with different values, so that one of the two would be lost.
    """
    names = checkpoint.tensors
    embeddings = [name for name in names if name.endswith(".weight") and is_input_table(name.removesuffix(".weight"))]
    stored = [name for name in names if name.endswith(".weight") and is_head(name.removesuffix(".weight"))]
    head = stored[0] if stored else "lm_head.weight"
    if len(embeddings) != 1 or len(stored) > 1 or not _is_tied(checkpoint.config, bool(stored)):
        return None
    if stored and not np.array_equal(checkpoint.raw(head), checkpoint.raw(embeddings[0])):
        raise SourceError(
            f"{checkpoint.folder}: {TIE_KEY} is true, but {head} and {embeddings[0]} are stored with different values; "
            f"set {TIE_KEY} to false in config.json, or remove one of them"
        )
    return TiedPair(head, embeddings[0], bool(stored))


def _is_tied(config: Mapping[str, Any], head_stored: bool) -> bool:
    stated = config.get(TIE_KEY)
    if stated is None:  # without a head of its own a language model can only be tied
        return not head_stored or config.get("model_type") in _TIED_BY_DEFAULT
    return bool(stated)


def untied_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with the tie undone wherever it is stated, and at the top in any case."""
    found = {
        key: untied_config(value) if isinstance(value, dict) and TIE_KEY in value else value for key, value in config.items()
    }
    return found | {TIE_KEY: False}


def embedding_advice(modules: Iterable[str]) -> tuple[str, ...]:
    """What engines need where one of the quantised ``modules`` is an embedding table."""
    tables = [module for module in modules if is_table(module)]
    if not tables:
        return ()
    return (
        f"{tables[0]} is quantised: vLLM and SGLang cannot look up packed rows and refuse the model; transformers loads it "
        "with quantization_config=CompressedTensorsConfig(dequantize=True) where all groups have one scheme",
    )
