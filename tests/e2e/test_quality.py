"""The real model on the real windows: the source text's figures, the stored files' figures, and AWQ against rounding.

WikiText-2's raw test split is read from the folder beside the checkout; where it is not, these tests are skipped by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from calib.corpora import load_corpus
from calib.tokenizer import TextTokenizer
from calib.windows import Windows, evaluation_windows, tokenise
from eval.lab4 import load_lab4, misses, run_lab4
from eval.perplexity import WindowLosses, window_losses
from eval.stats import paired_difference
from formats.manifest import Manifest
from formats.sources import resolve
from tests.real_artefacts import MODEL, quantise

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

Made = Callable[..., Path]


@pytest.fixture(scope="module")
def wikitext(shared_folder: Path) -> Path:
    return shared_folder / "data" / "wikitext-2-raw-v1-test.parquet"


@pytest.fixture(scope="module")
def made(wikitext: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """``made(method, zero)``: the artefact at 4 bits, groups of 64, on the default windows of WikiText-2; each is made once."""

    @functools.cache
    def make(method: str, zero: str) -> Path:
        folder = tmp_path_factory.mktemp("quality") / f"{method}{zero}"
        return quantise(folder, method, zero, "--corpus", str(wikitext), "--cards", "none")

    return make


@functools.cache
def _tokens(wikitext: Path) -> Any:
    return tokenise(load_corpus(str(wikitext)), TextTokenizer.from_folder(resolve(MODEL).folder))


def _windows(wikitext: Path, count: int, start: int = 0) -> Windows:
    return evaluation_windows(_tokens(wikitext), count=count, length=512, start=start)


def _value(folder: Path, name: str) -> float:
    value = next(found.value for found in Manifest.load(folder).measurements if found.name == name)
    assert value is not None
    return value


def _losses(folder: Path, windows: Windows) -> WindowLosses:
    from formats.reader import load_model

    return window_losses(load_model(folder), windows)


def test_lab4_comes_out_on_the_embedded_model(wikitext: Path) -> None:
    import torch

    from eval.lab4_activations import activation_misses, largest_inputs, outliers, run_activation_rows, run_decomposition_rows
    from formats.reader import load_model

    lab = load_lab4()
    windows = _windows(wikitext, lab.windows)
    model = load_model(resolve(MODEL).folder)
    baseline = window_losses(model, windows).perplexity
    results = list(run_lab4(model, lab, windows, lambda done, total: None))
    assert [len(_tokens(wikitext).ids), len(results)] == [304_986, len(lab.row)]
    assert misses(lab, baseline, results, published=False) == []
    first, length = lab.calibration_start, lab.window_tokens
    ids = torch.from_numpy(_tokens(wikitext).ids[first : first + lab.calibration_windows * length].reshape(-1, length).copy())
    largest = largest_inputs(model, ids)
    found = outliers(model, largest)
    assert found.worst_layer == "model.layers.11.mlp.down_proj"
    rounded = list(run_activation_rows(model, lab, windows, largest, lambda done, total: None))
    decomposed = list(run_decomposition_rows(model, lab, windows, largest, lambda done, total: None))
    assert [result.row.label for result in rounded] == ["W8A8", "SmoothQuant 0.5", "SmoothQuant 0.8"]
    assert decomposed[0].nbytes == 110_042_560
    assert activation_misses(lab, found, rounded, decomposed, published=False) == []


@pytest.mark.parametrize(("zero", "fake"), [("--symmetric", 44.6065), ("--zero-point", 40.9775)])
def test_stored_files_are_within_one_per_cent_of_fake_quantisation(zero: str, fake: float, made: Made) -> None:
    folder = made("rtn", zero)
    assert _value(folder, "perplexity_float") == pytest.approx(30.6406, abs=1e-3)
    assert _value(folder, "perplexity") == pytest.approx(fake, rel=0.01)


@pytest.mark.parametrize("zero", ["--symmetric", "--zero-point"])
def test_awq_is_better_than_rounding_by_an_interval_that_excludes_zero(zero: str, wikitext: Path, made: Made) -> None:
    windows = _windows(wikitext, 8)
    paired = paired_difference(_losses(made("awq", zero), windows), _losses(made("rtn", zero), windows), seed=0)
    assert paired.interval is not None
    assert paired.interval.high < 0


def test_awq_beats_the_awq_measured_elsewhere(wikitext: Path, made: Made) -> None:
    """KL(float || quantised) below 0.2885 on 12 windows from token 100,000, perplexity below 41.25 on the first 8."""
    import torch

    from formats.reader import load_model

    folder = made("awq", "--symmetric")
    assert _value(folder, "perplexity") < 41.25
    reference, quantised = load_model(resolve(MODEL).folder), load_model(folder)
    total, count = 0.0, 0
    with torch.inference_mode():
        for row in torch.from_numpy(_windows(wikitext, 12, start=100_000).ids.copy()):
            p = reference(row[None], use_cache=False).logits[0].log_softmax(-1)
            q = quantised(row[None], use_cache=False).logits[0].log_softmax(-1)
            total += float((p.exp() * (p - q)).sum())
            count += len(row)
    assert total / count < 0.2885


def test_the_same_command_gives_the_same_bytes(tmp_path: Path) -> None:
    options = (
        "--corpus",
        "pydoc",
        "--window",
        "128",
        "--calibration-windows",
        "4",
        "--evaluation-windows",
        "1",
        "--cards",
        "none",
    )
    first, second = (Manifest.load(quantise(tmp_path / name, "awq", *options)) for name in ("first", "second"))
    assert [file.sha256 for file in first.files] == [file.sha256 for file in second.files]
    assert any(record.fate == "folded" for record in first.tensors)
