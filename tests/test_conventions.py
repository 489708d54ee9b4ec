"""R58: each named convention beside its tool's own loop, written out, on a tiny model whose tokenizer adds a start token."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from calib.conventions import CONVENTIONS, Convention, get_convention
from calib.corpora import load_corpus
from calib.cut import Bos
from calib.windows import Tokens, Windows, calibration_windows, check_disjoint, evaluation_windows
from eval.measurement import window_settings, windows_record
from eval.perplexity import window_losses
from formats.records import WindowsRecord
from pipelines.run import app
from quant.errors import CorpusError, UsageError
from tests.conftest import make_tiny_model

BOS = 200


def tokens(count: int, *, adds_bos: bool = True) -> Tokens:
    ids = np.random.default_rng(1).integers(0, BOS, count)
    return Tokens(ids, "corpus", "corpus", "one text", "t", BOS, adds_bos)


def cut(text: Tokens, convention: Convention) -> Windows:
    """All of ``text``, as the run command cuts it."""
    return evaluation_windows(
        text,
        count="all",
        length=convention.window,
        bos=convention.start_token(text.adds_bos),
        first_scored=convention.first_scored,
        tail=convention.tail,
    )


def gptq_perplexity(model: Any, text: Tokens, length: int) -> float:
    """The GPTQ repository's evaluation: the tokenizer puts its start token before the text, then chunks, mean of chunk means."""
    import torch

    stream = torch.tensor([[*([BOS] if text.adds_bos else []), *text.ids.tolist()]])
    losses = []
    for number in range(stream.numel() // length):
        batch = stream[:, number * length : (number + 1) * length]
        logits = model(batch).logits[:, :-1, :]
        loss = torch.nn.CrossEntropyLoss()(logits.view(-1, logits.size(-1)), batch[:, 1:].reshape(-1))
        losses.append(loss.float() * length)
    return math.exp(float(torch.stack(losses).sum()) / (len(losses) * length))


def llama_cpp_perplexity(model: Any, text: Tokens, n_ctx: int) -> tuple[float, int]:
    """llama-perplexity's loop and count: the start token is written over each chunk's first token, the first half is context."""
    import torch

    stream = [*([BOS] if text.adds_bos else []), *text.ids.tolist()]
    first, nll, count = n_ctx // 2, 0.0, 0
    for chunk in range(len(stream) // n_ctx):
        ids = stream[chunk * n_ctx : (chunk + 1) * n_ctx]
        if text.adds_bos:
            ids[0] = BOS
        probabilities = model(torch.tensor([ids])).logits[0].double().softmax(-1)
        for position in range(first, n_ctx - 1):
            nll -= math.log(float(probabilities[position, ids[position + 1]]))
        count += n_ctx - first - 1
    return math.exp(nll / count), count


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("available", [127, 128, 150])
def test_the_two_common_conventions_are_those_of_their_tools(available: int, adds_bos: bool) -> None:
    import torch

    model, text = make_tiny_model("llama"), tokens(available, adds_bos=adds_bos)
    with torch.inference_mode():
        gptq = cut(text, get_convention("gptq", window=64))
        assert window_losses(model, gptq).perplexity == pytest.approx(gptq_perplexity(model, text, 64), rel=1e-6)
        llama = cut(text, get_convention("llama.cpp", window=32))
        expected, count = llama_cpp_perplexity(model, text, 32)
        assert window_losses(model, llama).perplexity == pytest.approx(expected, rel=1e-6)
    assert llama.scored_tokens == count == window_losses(model, llama).scored_tokens
    assert (gptq.tail, llama.tail) == (None, None), "both tools drop the short end"


def test_presets_at_their_own_sizes() -> None:
    text = tokens(5000)
    made = {name: cut(text, convention) for name, convention in CONVENTIONS.items()}
    assert {name: (w.length, w.stride, w.bos, w.first_scored) for name, w in made.items()} == {
        "seed": (512, 511, "prefix", 1),
        "gptq": (2048, 2048, "once", 1),
        "llama.cpp": (512, 512, "overwrite", 257),
    }
    assert made["llama.cpp"].scored_tokens == 255 * len(made["llama.cpp"].ids) == 255 * 9
    assert made["gptq"].span == (0, 2 * 2048 - 1)
    assert made["llama.cpp"].span == (0, 9 * 512 - 1)
    assert (made["llama.cpp"].ids[:, 0] == BOS).all()
    assert (made["llama.cpp"].ids[3, 1:] == text.ids[3 * 512 : 4 * 512 - 1]).all()
    assert (made["gptq"].ids.reshape(-1) == [BOS, *text.ids[: 2 * 2048 - 1]]).all()
    assert "9 x 512, stride 512, a start token in place of each one's first token, 2,295 scored, those from position 257" in (
        made["llama.cpp"].describe()
    )
    assert "one start token before the text" in made["gptq"].describe()
    assert {convention.start_token(False) for convention in CONVENTIONS.values()} == {"none"}


def test_digests_of_the_seed_convention_are_those_of_earlier_manifests() -> None:
    counted = Tokens(np.arange(100), "corpus", "corpus", "one text", "t", 9_999_999, False)
    seed = evaluation_windows(counted, count=8, length=10)
    assert seed.digest == "1fdfd34129f76a90a03a2d76cde0d05f131fa1d5f813c42624eb5d394a187309"
    prefixed = evaluation_windows(counted, count="all", length=7, bos="prefix")
    assert prefixed.digest == "b07fd40ce4cb902f06879de98847abfabbcc1fa74967b3bd678a0812f6d3a98d"
    assert evaluation_windows(counted, count=8, length=10, first_scored=6).digest != seed.digest


def test_what_is_scored_and_where_the_start_token_is_are_in_settings_and_manifest() -> None:
    windows = cut(tokens(100), get_convention("llama.cpp", window=20))
    settings = window_settings(windows, windows.scored_tokens)
    assert (settings["bos"], settings["first_scored"], settings["scored_tokens"]) == ("overwrite", "11", "45")
    assert WindowsRecord(**windows_record(windows)).first_scored == 11


@pytest.mark.parametrize("bos", ["prefix", "once", "overwrite"])
def test_start_tokens_keep_calibration_apart_and_are_not_shared_text(bos: Bos) -> None:
    text = tokens(2000)
    evaluation = evaluation_windows(text, count=4, length=40, bos=bos)
    calibration = calibration_windows(text, count=4, length=40, start=evaluation.span[1], evaluation=evaluation, bos=bos)
    assert evaluation.span[1] <= calibration.span[0]
    assert check_disjoint(calibration, evaluation) == 0
    same = calibration_windows(replace(text, corpus_sha256="copy"), count=1, length=40, start=0, bos=bos)
    gram = 13
    shares = (40 - int(bos != "once") - gram + 1) / np.sum(
        [len(row) - gram + 1 for row in evaluation.ids[:, int(bos != "once") :]]
    )
    assert check_disjoint(same, evaluation) == pytest.approx(shares)


def test_a_short_end_counts_only_behind_the_first_scored_token() -> None:
    text = tokens(30, adds_bos=False)
    long_enough = evaluation_windows(text, count="all", length=18, first_scored=11)
    assert long_enough.tail is not None
    assert (len(long_enough.tail), long_enough.scored_tokens) == (12, 7 + 1)
    assert evaluation_windows(text, count="all", length=19, first_scored=11).tail is None
    for first in (0, 18):
        with pytest.raises(UsageError, match=rf"18 tokens has none to score from position {first} on"):
            evaluation_windows(text, count="all", length=18, first_scored=first)
    with pytest.raises(CorpusError, match="holds 30 tokens from token 0 on, and a window needs 31"):
        evaluation_windows(text, count="all", length=31, tail=False)
    assert len(evaluation_windows(replace(text, adds_bos=True), count="all", length=31, bos="once", tail=False).ids) == 1


def test_options_overrule_a_preset_and_are_named_with_it() -> None:
    changed = get_convention("llama.cpp", window=64, bos="none")
    assert (changed.name, changed.window, changed.first_scored) == ("llama.cpp with --window 64 --bos none", 64, 33)
    assert changed.start_token(adds_bos=True) == "none"
    assert get_convention("seed", window=512, bos="auto") == CONVENTIONS["seed"]
    assert get_convention("seed", bos="overwrite").start_token(adds_bos=False) == "overwrite"
    with pytest.raises(UsageError, match=r"no such convention: 'llama-cpp'; did you mean llama\.cpp\?"):
        get_convention("llama-cpp")
    with pytest.raises(UsageError, match="--bos is one of auto, none, prefix, once, overwrite; got 'yes'"):
        get_convention("seed", bos="yes")


def test_raw_rows_are_the_published_file(shared_folder: Path) -> None:
    """wiki.test.raw of wikitext-2-raw-v1.zip has 1,290,590 bytes; its hash is published beside others' corpora."""
    path = shared_folder / "data" / "wikitext-2-raw-v1-test.parquet"
    corpus = load_corpus(str(path), join=CONVENTIONS["llama.cpp"].join)
    raw = corpus.text.encode()
    assert len(raw) == 1_290_590
    assert hashlib.sha256(raw).hexdigest() == "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08"
    assert corpus.join == r"rows as they stand, empty ones as ' \n'"


def plan(model: Path, *options: str) -> dict[str, Any]:
    arguments = ["rtn", "--model", str(model), "--corpus", "pydoc", "--cards", "none", "--dry-run", "--json", *options]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.exception
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_command_prints_the_convention(tiny_model: Callable[[str], Path]) -> None:
    model = tiny_model("llama")
    found = plan(model, "--convention", "llama.cpp", "--window", "64")
    assert found["convention"] == "llama.cpp with --window 64"
    for part in ("8 x 64", "248 scored, those from position 33 of each on", r"rows as they stand, empty ones as ' \n'"):
        assert part in found["evaluation"]
    assert "504 scored; rows joined by a blank line" in plan(model, "--window", "64")["evaluation"]


def test_windows_longer_than_the_model_are_refused_before_any_work(tiny_model: Callable[[str], Path]) -> None:
    for name, positions in (("llama", 128), ("gpt2", 64)):
        model = str(tiny_model(name))
        done = CliRunner().invoke(app, ["rtn", "--model", model, "--convention", "gptq", "--cards", "none", "--dry-run"])
        assert isinstance(done.exception, UsageError)
        assert f"windows of 2048 tokens exceed the model's {positions} positions" in str(done.exception)
