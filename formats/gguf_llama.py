"""A llama-architecture GGUF as a Hugging Face checkpoint folder: float32 safetensors, config, tokenizer, chat template.

Weights: q and k rows are un-permuted (llama.cpp interleaves the two rotary halves of each head), the head stays tied. The same
GGUF gives the same bytes on every machine (float32 arithmetic, keys sorted). Names and metadata keys: the GGUF specification
(ggml-org/ggml, docs/gguf.md) and llama.cpp's convert_hf_to_gguf.py.

Tokenizer: byte-level BPE cut by GPT-2's pattern alone, as transformers 5 reads SmolLM2's files (class ``GPT2Tokenizer``), which
makes 304,986 tokens of the WikiText-2 test text, the published count. llama.cpp and older transformers also cut at every digit;
the vocabulary has no token of two digits, so that this only moves the cut of a run of spaces before a digit (304,978 tokens).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quant.errors import SourceError

if TYPE_CHECKING:
    from gguf import GGUFReader

_TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
_CONTROL = 3  # GGUF token type of special tokens
# Without any of these the result would load and be wrong.
_SIZES = ("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "rope.freq_base")
_ATTENTION = ("attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon")
_NEEDED = (
    *("general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"),
    *("tokenizer.ggml.merges", "tokenizer.ggml.add_bos_token", "tokenizer.chat_template"),
    *(f"tokenizer.ggml.{key}_token_id" for key in _SPECIAL.values()),
    *(f"llama.{key}" for key in (*_SIZES, *_ATTENTION)),
)
_WAY_OUT = "give --model a folder with safetensors"


def write_checkpoint(gguf: Path, folder: Path) -> None:
    """Dequantise ``gguf`` into ``folder``, which exists.

    Raises SourceError for a damaged file and for an architecture, tokenizer or tensor that is not known here: a guess would give
    wrong logits in silence.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(gguf)
        meta = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
        raise SourceError(f"{gguf} cannot be read as GGUF ({error}): {_WAY_OUT}") from error
    absent = [name for name in _NEEDED if name not in meta]
    if "general.architecture" in meta and meta["general.architecture"] != "llama":
        raise SourceError(f"{gguf} is of the architecture {meta['general.architecture']}, and only llama is read: {_WAY_OUT}")
    if absent:
        raise SourceError(f"{gguf} lacks {', '.join(absent)}, without which the model would be read wrongly: {_WAY_OUT}")
    kind = f"{meta['tokenizer.ggml.model']}/{meta['tokenizer.ggml.pre']}"
    if kind != "gpt2/smollm":
        raise SourceError(f"{gguf} has a tokenizer of the kind {kind}, and only gpt2/smollm is read: {_WAY_OUT}")
    bos, eos, pad = (int(meta[f"tokenizer.ggml.{key}_token_id"]) for key in ("bos", "eos", "padding"))
    _write_weights(reader, meta, folder / "model.safetensors")
    _write_json(folder / "config.json", {**_config(meta), "bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad})
    _write_json(folder / "generation_config.json", {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad})
    _write_tokenizer(meta, folder)


def _shortest(value: float) -> float:
    """The shortest decimal with the same float32 value: GGUF stores 1e-05 as 9.99999975e-06."""
    return float(str(np.float32(value)))


def _config(meta: Mapping[str, Any]) -> dict[str, Any]:
    heads, hidden = int(meta["llama.attention.head_count"]), int(meta["llama.embedding_length"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": int(meta["llama.feed_forward_length"]),
        "max_position_embeddings": int(meta["llama.context_length"]),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": int(meta["llama.block_count"]),
        "num_key_value_heads": int(meta["llama.attention.head_count_kv"]),
        "pretraining_tp": 1,
        "rms_norm_eps": _shortest(meta["llama.attention.layer_norm_rms_epsilon"]),
        "rope_scaling": None,
        "rope_theta": _shortest(meta["llama.rope.freq_base"]),
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": int(meta["llama.vocab_size"]),
    }


def hf_name(gguf_name: str) -> str:
    """``blk.3.ffn_up.weight`` -> ``model.layers.3.mlp.up_proj.weight``; SourceError for a tensor that has no such name."""
    if gguf_name in _TOP:
        return _TOP[gguf_name]
    match gguf_name.split("."):
        case ["blk", block, part, "weight"] if part in _BLOCK and block.isdecimal():
            return f"model.layers.{block}.{_BLOCK[part]}.weight"
    raise SourceError(f"the GGUF holds the tensor {gguf_name}, which is not known here: {_WAY_OUT}")


def unpermute(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo llama.cpp's rotary order of q and k rows ``[heads * d, in]``: (pair, half) back to (half, pair) within each head."""
    return rows.reshape(heads, rows.shape[0] // heads // 2, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _shape(tensor: Any) -> tuple[int, ...]:
    """GGUF lists the fastest axis first: ``[in, out]`` in the file is ``[out, in]`` here."""
    return tuple(int(n) for n in reversed(tensor.shape))


def _write_weights(reader: GGUFReader, meta: Mapping[str, Any], path: Path) -> None:
    """A safetensors file written tensor by tensor, in the GGUF's order: the float model is never held whole."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in reader.tensors:
        shape = _shape(tensor)
        size = 4 * int(np.prod(shape, dtype=np.int64))
        header[hf_name(tensor.name)] = {"data_offsets": [at, at + size], "dtype": "F32", "shape": list(shape)}
        at += size
    expected = len(_TOP) + len(_BLOCK) * int(meta["llama.block_count"])
    if len(header) - 1 != expected:
        raise SourceError(f"the GGUF holds {len(header) - 1} tensors where its block count asks for {expected}: {_WAY_OUT}")
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for values in _float_tensors(reader, meta):
            stream.write(np.ascontiguousarray(values).data)


def _float_tensors(reader: GGUFReader, meta: Mapping[str, Any]) -> Iterator[NDArray[np.float32]]:
    from gguf import dequantize

    heads = {"attn_q": int(meta["llama.attention.head_count"]), "attn_k": int(meta["llama.attention.head_count_kv"])}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype("<f4", copy=False).reshape(_shape(tensor))
        count = heads.get(tensor.name.split(".")[-2])
        yield values if count is None else unpermute(values, count)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", "utf-8")


def _write_tokenizer(meta: Mapping[str, Any], folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json: byte-level BPE that adds no token to the text by itself."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges: list[tuple[str, str]] = [(left, right) for left, right in (pair.split(" ") for pair in meta["tokenizer.ggml.merges"])]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    kinds = meta["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True) + "\n", "utf-8")
    settings = {
        "add_bos_token": bool(meta["tokenizer.ggml.add_bos_token"]),
        "add_prefix_space": False,
        "chat_template": meta["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(meta["llama.context_length"]),
        # The class that every reader takes as "tokenizer.json as it stands"; GPT2Tokenizer is rebuilt by some and not by others.
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    special = {kind: tokens[int(meta[f"tokenizer.ggml.{key}_token_id"])] for kind, key in _SPECIAL.items()}
    _write_json(folder / "tokenizer_config.json", settings | special)
