"""More calibration text without more data: windows that the float model writes itself, continuing pieces of the calibration text.

What is learned from calibration (rounding, scales) is compared with the float model's own outputs, so any text that the model
finds likely will do (as in LLM-QAT, Liu et al. 2023). Each window begins with a piece of a calibration window, another piece in
every round, and goes on by sampling at temperature 1 without the special tokens. Sampling has its own seeded generator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

PIECE = 64
TOGETHER = 32


def self_written(
    model: Any,
    ids: Tensor,
    count: int,
    *,
    banned: Sequence[int] = (),
    seed: int = 0,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Tensor:
    """``count`` windows ``[count, length]`` (int64) as long as the calibration windows ``ids`` ``[n, length]``.

    Args:
        model: the float model, with a ``cache``; in evaluation mode.
        banned: token ids that are never sampled.
    """
    length = ids.shape[1]
    piece = min(PIECE, max(length // 2, 1))
    places = max((length - piece) // piece, 1)
    generator = torch.Generator().manual_seed(seed)
    prompts = []
    for number in range(count):
        start = (number // len(ids)) % places * piece
        prompts.append(ids[number % len(ids), start : start + piece])
    total = -(-count // TOGETHER) * (length - piece)
    found, done = [], 0
    for first in range(0, count, TOGETHER):
        batch = torch.stack(prompts[first : first + TOGETHER])

        def step(_: int) -> None:
            nonlocal done
            done += 1
            report(done, total)

        found.append(_continued(model, batch, length, list(banned), generator, step))
    return torch.cat(found) if found else ids[:0]


@torch.no_grad()
def _continued(
    model: Any, prompts: Tensor, length: int, banned: list[int], generator: torch.Generator, step: Callable[[int], None]
) -> Tensor:
    tokens, fresh, cache = prompts, prompts, None
    while tokens.shape[1] < length:
        output = model(input_ids=fresh.to(model.device), cache=cache, use_cache=True)
        cache = output.cache
        logits = output.logits[:, -1].float().cpu()
        logits[:, banned] = float("-inf")
        fresh = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, fresh], dim=1)
        step(tokens.shape[1])
    return tokens
