"""The real model with a cache as int8, keys per channel, in the loop at every position: short windows and long ones."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

pytestmark = [pytest.mark.real_model, pytest.mark.slow]


@pytest.mark.parametrize(("length", "count"), [(512, 4), (4096, 1)])
def test_int8_keys_per_channel_keep_the_perplexity_within_half_a_per_cent(length: int, count: int, shared_folder: Path) -> None:
    """Scales are calibrated on 8 windows of 512 tokens elsewhere in the text, so that 4,096 tokens ask for more than was seen."""
    import torch

    from calib.corpora import load_corpus
    from calib.tokenizer import TextTokenizer
    from calib.windows import evaluation_windows, tokenise
    from eval.kv_quality import divergence_sums, loss_sums
    from eval.kvcache import WithCache, calibrate
    from formats.reader import load_model
    from formats.sources import resolve
    from quant.kvscheme import KvScheme
    from tests.real_artefacts import MODEL

    corpus = shared_folder / "data" / "wikitext-2-raw-v1-test.parquet"
    folder = resolve(MODEL).folder
    tokens = tokenise(load_corpus(str(corpus)), TextTokenizer.from_folder(folder))
    model, scheme = load_model(folder), KvScheme.parse("int8")
    ids = torch.from_numpy(tokens.ids[200_000 : 200_000 + 8 * 512].reshape(8, 512).copy())
    cached = WithCache(model, scheme, calibrate(model, ids).scales(scheme))
    sums = np.zeros(4)
    with torch.inference_mode():
        for row in torch.from_numpy(evaluation_windows(tokens, count=count, length=length, bos="none").ids.copy()):
            plain, found = model(row[None], use_cache=False).logits[0], cached(row[None]).logits[0]
            before, scored, _ = loss_sums(plain, row, 1)
            sums += (loss_sums(found, row, 1)[0], before, scored, divergence_sums(plain, found)[0])
    quantised, plain_sum, number, nats = sums.tolist()
    kl = nats / (count * length)
    print(f"{count} x {length}: float {math.exp(plain_sum / number):.4f}, int8 {math.exp(quantised / number):.4f}, KL {kl:.6f}")
    assert abs(math.expm1((quantised - plain_sum) / number)) < 0.005
    assert 0 < kl < 0.01
