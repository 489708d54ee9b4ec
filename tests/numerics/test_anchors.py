"""The real model on WikiText-2 gives the figures that were measured elsewhere with other code, errors and intervals included."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from calib.corpora import load_corpus
from calib.tokenizer import TextTokenizer
from calib.windows import evaluation_windows, tokenise
from eval.perplexity import WindowLosses, window_losses
from eval.stats import mean_loss, paired_difference
from formats.sources import resolve

WINDOWS = 24


@pytest.mark.real_model
@pytest.mark.slow
def test_float_and_int8_losses_on_24_windows(shared_folder: Path) -> None:
    """Float: 30.6406 on the first 8 windows. int8 group 64: ln ratio -0.00047 [-0.0018, 0.0008], error 0.00069 by window."""
    import torch

    from formats.reader import load_model
    from quant.quantizers.rtn import round_to_nearest
    from quant.scheme import Scheme

    folder = resolve("smollm2-135m-instruct-q4_1").folder
    corpus = load_corpus(str(shared_folder / "data" / "wikitext-2-raw-v1-test.parquet"))
    windows = evaluation_windows(tokenise(corpus, TextTokenizer.from_folder(folder)), count=WINDOWS, length=512)
    model = load_model(folder)
    baseline = window_losses(model, windows)
    assert WindowLosses(baseline.nats[:8], baseline.scored[:8]).perplexity == pytest.approx(30.6406, abs=1e-3)
    assert mean_loss(baseline, seed=0).standard_error == pytest.approx(0.0709, abs=0.003)

    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                module.weight.copy_(round_to_nearest(module.weight, Scheme.parse("int8-sym-g64-f32")).dequantise())
    paired = paired_difference(window_losses(model, windows), baseline, seed=0)
    assert paired.scored_tokens == WINDOWS * 511
    assert paired.ln_ratio == pytest.approx(-0.00047, abs=3e-5)
    assert paired.standard_error == pytest.approx(0.00069, rel=0.03)
    assert paired.interval is not None
    assert np.allclose([paired.interval.low, paired.interval.high], [-0.0018, 0.0008], atol=1e-4)
    assert paired.excludes_zero is False
