"""The embedded model on WikiText-2 with a quantised cache in the loop at every position: the bar of an int8 cache.

Static scales are calibrated on text behind the windows. The windows are short (512) and as long as the model's positions (4,096),
because keys turn with their position: scales that were calibrated on near positions only clip the far ones.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eval.kv_quality import divergence_sums, loss_sums
from formats.sources import resolve
from quant.kvscheme import KvScheme
from tests.real_artefacts import MODEL

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

CALIBRATION = (8, 512, 200_000)  # windows, tokens in each, first token
WINDOWS = {512: 8, 4096: 1}
CACHES = {512: ("int8", "int4"), 4096: ("int8",)}


@functools.cache
def _measured(wikitext: Path) -> dict[tuple[str, int], tuple[float, float]]:
    """(ln of the perplexity's ratio to float, mean KL in nats) per cache and window length."""
    import torch

    from calib.corpora import load_corpus
    from calib.tokenizer import TextTokenizer
    from calib.windows import evaluation_windows, tokenise
    from eval.kvcache import WithCache, calibrate
    from formats.reader import load_model

    folder = resolve(MODEL).folder
    tokens = tokenise(load_corpus(str(wikitext)), TextTokenizer.from_folder(folder))
    model: Any = load_model(folder)
    count, length, start = CALIBRATION
    evidence = calibrate(model, torch.from_numpy(tokens.ids[start : start + count * length].reshape(count, length).copy()))
    schemes = {name: KvScheme.parse(name) for name in CACHES[512]}
    cached = {name: WithCache(model, s, evidence.scales(s) if s.static else None) for name, s in schemes.items()}
    found: dict[tuple[str, int], tuple[float, float]] = {}
    for length, count in WINDOWS.items():
        sums = {name: np.zeros(2) for name in CACHES[length]}
        scored = 0
        for row in torch.from_numpy(evaluation_windows(tokens, count=count, length=length, bos="none").ids.copy()):
            with torch.inference_mode():
                plain = model(row[None], use_cache=False).logits[0]
                before, predictions, lost = loss_sums(plain, row, 1)
                scored += predictions
                for name in CACHES[length]:
                    logits = cached[name](row[None]).logits[0]
                    after, _, missing = loss_sums(logits, row, 1)
                    divergence, _, _, undefined = divergence_sums(plain, logits)
                    assert (lost, missing, undefined) == (0, 0, 0), "a position without a finite figure would be left out"
                    sums[name] += (after - before, divergence)
        for name, (nats, total) in sums.items():
            found[name, length] = (nats / scored, total / (count * length))
            print(f"{name} at {length}: perplexity {math.expm1(nats / scored):+.4%}, KL {total / (count * length):.6f}")
    return found


@pytest.fixture(scope="module")
def measured(shared_folder: Path) -> dict[tuple[str, int], tuple[float, float]]:
    return _measured(shared_folder / "data" / "wikitext-2-raw-v1-test.parquet")


@pytest.mark.parametrize("length", WINDOWS)
def test_an_int8_cache_keeps_perplexity_within_half_a_per_cent(
    measured: dict[tuple[str, int], tuple[float, float]], length: int
) -> None:
    change, divergence = measured["int8", length]
    assert abs(math.expm1(change)) <= 0.005
    assert 0 < divergence < 0.01, "either the cache was not in the loop or it costs more than its perplexity says"


def test_four_bits_cost_more_than_eight(measured: dict[tuple[str, int], tuple[float, float]]) -> None:
    assert measured["int4", 512][1] > 5 * measured["int8", 512][1]
