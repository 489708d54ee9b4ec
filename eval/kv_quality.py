"""What a quantised cache costs, judged on logits and losses with the cache in the loop at every position.

How well keys are reconstructed says little: one family whose key bias is huge in a few layers loses everything at an error that
others do not notice (llama.cpp#21385). So nothing here looks at keys; layers are blamed by what they do to the logits when they
alone are quantised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from eval.divergence import Divergence
from eval.kvcache import StaticScales, WithCache
from eval.measurement import Measurement, ln_ratio_measurement, perplexity_measurement, window_inputs, window_settings
from eval.perplexity import WindowLosses
from eval.stats import mean_loss, paired_difference
from quant.kvscheme import KvScheme

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from calib.windows import Windows

Progress = Callable[[int, int], None]

BLAME_TOKENS = 128
CHUNK = 512  # positions whose log-softmax is in memory at once
# Above either, a run warns: half a per cent of perplexity is what an int8 cache is held to.
MOST_LN_RATIO, MOST_NATS = 0.005, 0.02


@dataclass(frozen=True, slots=True)
class KvQuality:
    """Losses with the quantised cache, its divergence from the float model, and from the same weights with a float cache."""

    losses: WindowLosses
    from_float: Divergence
    from_artefact: Divergence


@torch.inference_mode()
def measure_cache(reference: Any, model: Any, cached: WithCache, windows: Windows, progress: Progress | None = None) -> KvQuality:
    """Run ``reference`` (float), ``model`` (the artefact, float cache) and ``cached`` (its quantised cache) over every window.

    A short tail counts. All three return ``.logits``; one window at a time is in memory.
    """
    pieces: list[NDArray[np.int64]] = [*windows.ids] + ([] if windows.tail is None else [windows.tail])
    device = next(model.parameters()).device
    losses: list[tuple[float, int, int]] = []
    apart: tuple[list[tuple[float, int, int, int]], ...] = ([], [])
    for done, piece in enumerate(pieces, start=1):
        ids = torch.tensor(piece, dtype=torch.int64, device=device)[None]
        found = cached(ids).logits[0]
        losses.append(loss_sums(found, ids[0], windows.first_scored))
        for sums, other in zip(apart, (reference, model), strict=True):
            sums.append(divergence_sums(other(ids, use_cache=False).logits[0], found))
        if progress is not None:
            progress(done, len(pieces))
    nats, scored, nonfinite = (np.array(column) for column in zip(*losses, strict=True))
    lost = WindowLosses(nats, scored, int(nonfinite.sum()), windows.digest, nonfinite)
    return KvQuality(lost, *(_gathered(sums) for sums in apart))


def loss_sums(logits: Tensor, ids: Tensor, first_scored: int) -> tuple[float, int, int]:
    """Summed nats of predicting ``ids [length]`` from ``first_scored`` on, predictions, and those without a finite loss."""
    each = functional.cross_entropy(logits[first_scored - 1 : -1].float(), ids[first_scored:], reduction="none")
    finite = torch.isfinite(each)
    return float(each[finite].sum(dtype=torch.float64)), each.numel(), each.numel() - int(finite.sum())


def divergence_sums(wanted: Tensor, found: Tensor) -> tuple[float, int, int, int]:
    """Summed KL(wanted || found) in nats, positions of the same best token, positions, and those without a finite divergence."""
    nats, agreeing, bad = 0.0, 0, 0
    for p_logits, q_logits in zip(torch.split(wanted, CHUNK), torch.split(found, CHUNK), strict=True):
        p, q = p_logits.float().log_softmax(-1), q_logits.float().log_softmax(-1)
        each = (p.exp() * (p - q)).sum(-1, dtype=torch.float64)
        finite = torch.isfinite(each)
        nats += float(each[finite].sum())
        agreeing += int((p.argmax(-1) == q.argmax(-1)).sum())
        bad += int((~finite).sum())
    return nats, agreeing, len(wanted), bad


def _gathered(sums: Sequence[tuple[float, int, int, int]]) -> Divergence:
    nats, agreeing, positions, bad = (np.array(column) for column in zip(*sums, strict=True))
    return Divergence(nats, agreeing, positions, int(bad.sum()))


@torch.inference_mode()
def blamed_layers(model: Any, scheme: KvScheme, scales: StaticScales | None, ids: Tensor) -> dict[int, float]:
    """Mean KL(float cache || cache of one quantised layer) in nats per layer on ``ids [1, length]``, the worst first."""
    plain = model(ids, use_cache=False).logits[0]
    count = int(model.config.get_text_config().num_hidden_layers)
    found = {}
    for layer in range(count):
        nats, _, positions, bad = divergence_sums(plain, WithCache(model, scheme, scales, only=frozenset({layer}))(ids).logits[0])
        found[layer] = nats / positions if not bad else float("inf")
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def cache_warning(quality: KvQuality, after: WindowLosses, scheme: KvScheme, blame: Callable[[], dict[int, float]]) -> str | None:
    """A sentence where the cache costs more than an int8 cache should, with the layers that cost most; else None.

    ``blame`` is called only then: it runs the model once per layer.
    """
    ratio = quality.losses.mean_nats - after.mean_nats
    divergence = quality.from_artefact
    if ratio <= MOST_LN_RATIO and divergence.mean_nats <= MOST_NATS and not divergence.nonfinite and not quality.losses.nonfinite:
        return None
    each = blame()
    total = sum(each.values())
    worst = {layer: nats for layer, nats in list(each.items())[:8] if nats > 2 * total / max(len(each), 1)}
    shown = ", ".join(f"{layer} ({nats:.4f})" for layer, nats in (worst or dict(list(each.items())[:3])).items())
    way = ""
    if scheme.keys == "token":
        way = "; keys with a scale per channel (--kv-cache int8) are not hurt by channels that are huge in every token"
    return (
        f"the cache as {scheme} costs {divergence.mean_nats:.4g} nats of KL per token and changes the mean loss by {ratio:+.4g} "
        f"nats against the same weights with a float cache; layers that cost most when quantised alone (nats on {BLAME_TOKENS} "
        f"tokens): {shown}{way}"
    )


def cache_measurements(
    quality: KvQuality,
    after: WindowLosses,
    scheme: KvScheme,
    windows: Windows,
    subject: Mapping[str, str],
    baseline: Mapping[str, str],
    seed: int,
) -> list[Measurement]:
    """Perplexity with the cache, its paired difference to the same weights with a float cache, and both divergences.

    Args:
        after: losses of the artefact with a float cache.
        subject: files of the artefact, scales included, name to SHA-256.
        baseline: weight files of the float model.
    """
    losses = quality.losses
    found = [
        perplexity_measurement(losses, mean_loss(losses, seed=seed), windows=windows, subject=subject, name="perplexity_kv"),
        ln_ratio_measurement(
            paired_difference(losses, after, seed=seed),
            windows=windows,
            subject=subject,
            baseline=subject,
            name="ln_perplexity_ratio_kv",
        ),
    ]
    pairs = (("kv", "float model", quality.from_float), ("kv_cache", "same weights, float cache", quality.from_artefact))
    for name, against, divergence in pairs:
        inputs = {**window_inputs(windows), **{f"baseline {file}": digest for file, digest in baseline.items()}}
        settings = {**window_settings(windows, int(divergence.positions.sum())), "first_scored": "0", "against": against}
        flag = f"{divergence.nonfinite} positions without a finite divergence" if divergence.nonfinite else None
        figures = (("kl", "nats/token", divergence.nats), ("top1", "1", divergence.agreeing.astype(np.float64)))
        for kind, unit, sums in figures:
            estimate = mean_loss(WindowLosses(sums, divergence.positions), seed=seed)
            found.append(
                Measurement(
                    name=f"{kind}_{name}",
                    value=divergence.mean_nats if kind == "kl" else divergence.top1,
                    unit=unit,
                    n=estimate.windows,
                    interval=estimate.interval,
                    inputs=inputs,
                    subject=subject,
                    settings=settings,
                    standard_error=estimate.standard_error,
                    flag=flag,
                )
            )
    return [_with_scheme(each, scheme) for each in found]


def _with_scheme(measurement: Measurement, scheme: KvScheme) -> Measurement:
    return replace(measurement, settings={**measurement.settings, "kv_cache": str(scheme)})
