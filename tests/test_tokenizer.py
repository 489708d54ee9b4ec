"""Token ids: those that transformers, and so every engine, would feed for the same folder."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calib.corpora import Corpus
from calib.tokenizer import TextTokenizer
from calib.windows import tokenise
from quant.errors import CorpusError, SourceError

ROOT = Path(__file__).resolve().parents[1]


def corpus(text: str) -> Corpus:
    return Corpus("c", text, "h", "o", "one text")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folder with a small trained tokenizer and settings of choice."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["the cat sat on the mat   1 2 3  and then some more of it \n\n 4 5"] * 4, trainer)

    def make(name: str, settings: dict[str, Any], model_type: str = "llama", post: bool = False) -> Path:
        from tokenizers.processors import TemplateProcessing

        folder = tmp_path_factory.mktemp(name)
        own = Tokenizer.from_str(tokenizer.to_str())
        if post:
            own.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        own.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
        return folder

    return make


TEXT = "the cat  1 and\n  22 the mat </s> naïve \u2028 \U0001d11e"
PLAIN = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}


@pytest.mark.parametrize(
    ("settings", "model_type", "post"),
    [
        (PLAIN, "llama", False),
        (PLAIN, "llama", True),
        ({**PLAIN, "add_bos_token": True}, "llama", False),
        ({**PLAIN, "add_bos_token": False}, "llama", True),
        ({**PLAIN, "add_eos_token": False}, "llama", True),
        ({"tokenizer_class": "TokenizersBackend", "bos_token": {"content": "<s>", "__type": "AddedToken"}}, "llama", True),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, "llama", False),
        ({"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>"}, "llama", False),
        (PLAIN, "qwen2", False),
        ({}, "gpt2", False),
    ],
)
def test_ids_and_start_token_are_those_of_transformers(
    settings: dict[str, Any], model_type: str, post: bool, folders: Callable[..., Path]
) -> None:
    """Whatever transformers, and so an engine, would feed for this folder; R49."""
    from transformers import AutoTokenizer

    folder = folders("t", settings, model_type, post)
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = TextTokenizer.from_folder(folder)
    assert ours.encode(TEXT).tolist() == theirs(TEXT, add_special_tokens=False)["input_ids"]
    assert ours.encode(TEXT).dtype == np.int64
    assert ours.bos_id == theirs.bos_token_id
    assert ours.adds_bos == (theirs.bos_token_id is not None and theirs("the")["input_ids"][0] == theirs.bos_token_id)


def test_class_of_the_tokenizer_changes_ids(folders: Callable[..., Path]) -> None:
    """Why transformers is asked at all: the same tokenizer.json, two classes, two token counts."""
    plain, rebuilt = (
        TextTokenizer.from_folder(folders("t", {"tokenizer_class": name})) for name in ("TokenizersBackend", "GPT2Tokenizer")
    )
    assert len(plain.encode(TEXT)) != len(rebuilt.encode(TEXT))


def test_digest_follows_the_files(folders: Callable[..., Path]) -> None:
    one, two = (TextTokenizer.from_folder(folders("t", settings)) for settings in (PLAIN, PLAIN))
    assert one.digest == two.digest
    assert TextTokenizer.from_folder(folders("t", PLAIN, post=True)).digest != one.digest
    assert TextTokenizer.from_folder(folders("t", {**PLAIN, "add_bos_token": True})).digest != one.digest


def test_tokens_keep_where_they_come_from(folders: Callable[..., Path]) -> None:
    tokenizer = TextTokenizer.from_folder(folders("t", PLAIN, post=True))
    made = tokenise(Corpus("name", TEXT, "hash", "origin", "rows as they stand"), tokenizer)
    assert (made.corpus_name, made.corpus_sha256, made.join) == ("name", "hash", "rows as they stand")
    assert (made.tokenizer_digest, made.bos_id, made.adds_bos) == (tokenizer.digest, 0, True)


def test_folder_without_a_usable_tokenizer_is_named(folders: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(SourceError, match=r"holds no tokenizer: put tokenizer\.json"):
        TextTokenizer.from_folder(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        folder = folders("t", PLAIN)
        (folder / name).write_text('{"a": [')
        with pytest.raises(SourceError, match=rf"{name} cannot be read"):
            TextTokenizer.from_folder(folder)
    folder = folders("t", {"tokenizer_class": "GPT2Tokenizer"})
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(SourceError, match="cannot be read"):
        TextTokenizer.from_folder(folder).encode("a", at_least=0)


@pytest.mark.parametrize(("name", "count"), [("PreTrainedTokenizerFast", "2"), ("GPT2Tokenizer", "about 2")])
def test_short_text_is_refused_before_torch_is_imported(name: str, count: str, folders: Callable[..., Path]) -> None:
    settings = {"tokenizer_class": name}
    code = (
        "import sys; from pathlib import Path; from calib.windows import TextTokenizer; from quant.errors import CorpusError\n"
        f"try: TextTokenizer.from_folder(Path({str(folders('t', settings))!r})).encode('the cat', at_least=4096)\n"
        "except CorpusError as error: print(error)\n"
        "print(*sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    message, heavy = done.stdout.splitlines()
    assert message.startswith(f"the corpus holds {count} tokens and 4,096 are needed: lower --evaluation-windows")
    assert heavy == ""


def test_text_of_the_needed_length_passes_and_one_less_does_not(folders: Callable[..., Path]) -> None:
    for name in ("PreTrainedTokenizerFast", "GPT2Tokenizer"):
        tokenizer = TextTokenizer.from_folder(folders("t", {"tokenizer_class": name}))
        count = len(tokenizer.encode(TEXT))
        assert len(tokenise(corpus(TEXT), tokenizer, at_least=count).ids) == count
        with pytest.raises(CorpusError, match=rf"holds {count:,} tokens and {count + 1:,} are needed"):
            tokenise(corpus(TEXT), tokenizer, at_least=count + 1)
        with pytest.raises(CorpusError, match=r"holds 0 tokens and 1 are needed"):
            tokenise(corpus(""), tokenizer)
