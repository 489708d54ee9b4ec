"""Is the baseline itself sound? A quantised model judged against a broken one looks fine.

Two signs are beyond doubt: predictions without a finite loss, and a loss clearly above that of guessing every token alike. A loss
above what mere token frequencies of the very text give is only told: small random models and foreign scripts are like that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eval.perplexity import WindowLosses

MOST_OF_GUESSING = 1.25
"""Times ln(vocabulary): a random model loses little more than ln(vocabulary), a confidently wrong one far more."""


def broken_baseline(losses: WindowLosses, vocabulary: int) -> str | None:
    """One sentence on why figures against this model would mean nothing, or None."""
    if losses.nonfinite:
        return f"the float baseline is broken: {losses.flag}; mend the checkpoint, or its tokenizer"
    limit = MOST_OF_GUESSING * math.log(vocabulary)
    if losses.mean_nats > limit:
        return (
            f"the float baseline is broken: it loses {losses.mean_nats:.4g} nats per prediction, and guessing all {vocabulary:,} "
            f"tokens alike loses {math.log(vocabulary):.4g}; mend the checkpoint, or its tokenizer"
        )
    return None


def first_nonfinite(model: Any, ids: NDArray[np.int64]) -> str | None:
    """Name of the innermost module whose output is the first that is not finite on one window ``ids [length]``, or None."""
    import torch

    found: list[str] = []

    def look(name: str) -> Callable[..., None]:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if not found and isinstance(first, torch.Tensor) and not bool(torch.isfinite(first).all()):
                found.append(name)

        return hook

    handles = [module.register_forward_hook(look(name)) for name, module in model.named_modules() if name]
    device = next(iter(model.parameters())).device
    try:
        with torch.inference_mode():
            model(torch.tensor(ids[None, :], dtype=torch.int64, device=device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def poor_baseline(losses: WindowLosses, ids: NDArray[np.int64]) -> str | None:
    """A warning where the model knows less of ``ids`` than how often each token stands in them, or None.

    The frequencies are those of the measured text itself, so that no honest model without context does better.
    """
    _, counts = np.unique(ids, return_counts=True)
    share = counts / counts.sum()
    entropy = float(-(share * np.log(share)).sum())
    if losses.nonfinite or losses.mean_nats <= entropy:
        return None
    return (
        f"the float baseline loses {losses.mean_nats:.4g} nats per prediction, more than the frequencies of the tokens alone "
        f"({entropy:.4g}): check that model, tokenizer and text belong together"
    )
