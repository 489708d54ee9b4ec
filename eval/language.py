"""How an artefact models language beside its reference: losses, both divergences, agreement and overlap on the same windows.

One pass: each batch of windows goes through both models, its figures are taken position by position (``eval.positions``) and only
sums and one number per position are kept. Every mean has a bootstrap interval over whole windows. The yardstick is the reference
itself computed in bfloat16: what serving it in 16 bits would change anyway.
"""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from eval.measurement import Measurement, ln_ratio_measurement, perplexity_measurement, window_inputs, window_settings
from eval.perplexity import WindowLosses
from eval.positions import PositionFigures, position_figures
from eval.result import PartResult
from eval.stats import bootstrap_ratio, mean_loss, paired_difference, ratio_standard_error

if TYPE_CHECKING:
    from calib.tokenizer import TextTokenizer
    from calib.windows import Windows
    from eval.pair import Pair

Progress = Callable[[int, int], None]

PART = "language"
PERCENTILES = (1.0, 5.0, 50.0, 90.0, 95.0, 99.0, 99.9)
BUCKETS = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
FLOOR_WINDOWS = 4
_MEANS = ("kl", "reverse_kl", "top1", "acceptance_overlap")


@dataclass(frozen=True, slots=True)
class LanguageRows:
    """``windows`` has a row per window, ``kl`` and ``confidence`` one number per finite position of all windows, in order.

    ``window_of`` is the window of each of them.
    """

    windows: pd.DataFrame
    kl: NDArray[np.float64]
    confidence: NDArray[np.float64]
    same: NDArray[np.bool_]
    window_of: NDArray[np.int64]


@torch.inference_mode()
def compare_windows(
    reference: Any, artefact: Any, windows: Windows, *, batch: int = 4, progress: Progress | None = None
) -> LanguageRows:
    """Run both models over every window (a short tail too), ``batch`` windows at a time.

    Args:
        reference, artefact: called as ``model(ids [b, t], use_cache=False).logits``, in evaluation mode.
    """
    pieces = [windows.ids[start : start + batch] for start in range(0, len(windows.ids), batch)]
    pieces += [] if windows.tail is None else [windows.tail[None, :]]
    total, done = sum(len(piece) for piece in pieces), 0
    rows: list[dict[str, float]] = []
    kept: list[PositionFigures] = []
    for piece in pieces:
        ids = torch.tensor(piece, dtype=torch.int64, device=_device(artefact))
        ours = artefact(ids, use_cache=False).logits
        wanted = reference(ids.to(_device(reference)), use_cache=False).logits.to(ours.device)
        for one, other, row in zip(wanted, ours, ids, strict=True):
            found = position_figures(one, other, row, windows.first_scored)
            rows.append(_sums(found))
            kept.append(found)
            done += 1
        if progress is not None:
            progress(done, total)
    finite = [found.finite for found in kept]
    return LanguageRows(
        pd.DataFrame(rows),
        _pooled([found.kl for found in kept], finite).astype(np.float64),
        _pooled([found.confidence for found in kept], finite).astype(np.float64),
        _pooled([found.same for found in kept], finite).astype(np.bool_),
        np.repeat(np.arange(len(kept)), [int(mask.sum()) for mask in finite]),
    )


def _device(model: Any) -> torch.device:
    found: torch.device = next(iter(model.parameters()), torch.empty(0)).device
    return found


def _pooled(values: Sequence[torch.Tensor], finite: Sequence[torch.Tensor]) -> NDArray[Any]:
    return torch.cat([value[mask] for value, mask in zip(values, finite, strict=True)]).numpy()


def _sums(found: PositionFigures) -> dict[str, float]:
    """One row: sums over the positions of a window that are finite, and how many are not."""
    row: dict[str, float] = {"scored_predictions": len(found.reference_nats)}
    for side, nats in (("reference", found.reference_nats), ("artefact", found.artefact_nats)):
        good = torch.isfinite(nats)
        row[f"{side}_nats"] = float(nats[good].sum(dtype=torch.float64))
        row[f"{side}_nonfinite"] = int((~good).sum())
    finite = found.finite
    row |= {"positions": int(finite.sum()), "nonfinite_positions": int((~finite).sum())}
    for name, values in (("kl", found.kl), ("reverse_kl", found.reverse_kl), ("acceptance_overlap", found.overlap)):
        row[name] = float(values[finite].sum(dtype=torch.float64))
    return row | {"top1": int(found.same[finite].sum())}


def scored_bytes(tokenizer: TextTokenizer, windows: Windows) -> NDArray[np.int64]:
    """UTF-8 bytes of the text whose tokens each window scores ``[n]``."""
    found = []
    for piece in [*windows.ids, *(() if windows.tail is None else (windows.tail,))]:
        whole, before = (len(tokenizer.decode(ids).encode()) for ids in (piece, piece[: windows.first_scored]))
        found.append(whole - before)
    return np.array(found, dtype=np.int64)


def measure_language(pair: Pair, windows: Windows, *, floor: bool = True, progress: Progress | None = None) -> PartResult:
    """The part ``language`` on ``windows``.

    Args:
        floor: also measure the reference in bfloat16 on the first windows, as the yardstick.
    """
    started = time.monotonic()
    rows = compare_windows(pair.reference, pair.artefact, windows, batch=pair.batch, progress=progress)
    frame = rows.windows
    before, after = (_losses(frame, side, windows) for side in ("reference", "artefact"))
    mean = [mean_loss(losses, seed=pair.seed) for losses in (after, before)]
    paired = paired_difference(after, before, seed=pair.seed)
    found = [
        perplexity_measurement(after, mean[0], windows=windows, subject=pair.subject),
        perplexity_measurement(before, mean[1], windows=windows, subject=pair.baseline, name="perplexity_reference"),
        ln_ratio_measurement(paired, windows=windows, subject=pair.subject, baseline=pair.baseline),
    ]
    sizes = scored_bytes(pair.tokenizer, windows)
    frame.insert(0, "window", np.arange(len(frame)))
    frame["scored_bytes"] = sizes
    base = _Base(pair, windows, before.scored_tokens)
    found.append(base.bits_per_byte("bits_per_byte", after, sizes))
    found.append(replace(base.bits_per_byte("bits_per_byte_reference", before, sizes), subject=pair.baseline))
    found += [base.mean(name, frame[name].to_numpy(np.float64), frame["positions"].to_numpy(np.int64)) for name in _MEANS]
    found += base.percentiles(rows) + base.buckets(rows)
    bad = int(frame["nonfinite_positions"].sum())
    found.append(base.count("nonfinite_positions", bad, len(frame)))
    if floor:
        found.append(_noise_floor(base))
    return PartResult(PART, tuple(found), frame, pair.subject, time.monotonic() - started, {"reference": pair.reference_name})


def _losses(frame: pd.DataFrame, side: str, windows: Windows) -> WindowLosses:
    counts = frame[f"{side}_nonfinite"].to_numpy(np.int64)
    nats, scored = frame[f"{side}_nats"].to_numpy(np.float64), frame["scored_predictions"].to_numpy(np.int64)
    return WindowLosses(nats, scored, int(counts.sum()), windows.digest, counts)


@dataclass(frozen=True, slots=True)
class _Base:
    """What all measurements of the part have in common."""

    pair: Pair
    windows: Windows
    scored: int

    def mean(
        self,
        name: str,
        sums: NDArray[np.float64],
        weights: NDArray[np.int64],
        unit: str | None = None,
        settings: Mapping[str, str] | None = None,
        scale: float = 1.0,
    ) -> Measurement:
        """``scale * sum(sums) / sum(weights)`` with its error and interval over windows; windows without weight say nothing."""
        unit = unit or ("nats/token" if name.startswith(("kl", "reverse_kl", "noise")) else "1")
        some = weights > 0
        sums, weights = sums[some] * scale, weights[some]
        n, total = len(sums), int(weights.sum())
        value = float(sums.sum()) / total if total else math.nan
        several = n > 1
        return Measurement(
            name=name,
            value=value,
            unit=unit,
            n=n,
            interval=bootstrap_ratio(sums, weights, seed=self.pair.seed) if several else None,
            standard_error=ratio_standard_error(sums, weights) if several else None,
            inputs=window_inputs(self.windows) | self.pair.inputs(),
            subject=self.pair.subject,
            settings={
                **window_settings(self.windows, self.scored),
                "positions": "every position of every window",
                **(settings or {}),
            },
            flag=None if total else "there is no position with a finite figure",
        )

    def bits_per_byte(self, name: str, losses: WindowLosses, sizes: NDArray[np.int64]) -> Measurement:
        found = self.mean(name, losses.nats, sizes, "bits/byte", scale=1 / math.log(2))
        text = {"normaliser": f"{int(sizes.sum())} UTF-8 bytes of the scored text", "positions": "scored predictions"}
        if losses.nonfinite:
            return replace(found, value=math.inf, interval=None, standard_error=None, flag=losses.flag)
        return replace(found, settings={**found.settings, **text})

    def count(self, name: str, value: int, n: int) -> Measurement:
        found = self.mean(name, np.array([float(value)]), np.array([1]))
        return replace(found, n=n)

    def percentiles(self, rows: LanguageRows) -> list[Measurement]:
        """KL percentiles and the largest, over all finite positions; tails have no interval here."""
        if not len(rows.kl):
            return []
        named = {f"kl_p{level:g}": float(np.percentile(rows.kl, level)) for level in PERCENTILES}
        named["kl_max"] = float(rows.kl.max())
        return [
            replace(self.mean(name, np.array([value]), np.array([1])), n=len(rows.windows), settings=self._over(len(rows.kl)))
            for name, value in named.items()
        ]

    def _over(self, positions: int) -> dict[str, str]:
        return window_settings(self.windows, self.scored) | {"positions": f"{positions} positions with a finite divergence"}

    def buckets(self, rows: LanguageRows) -> list[Measurement]:
        """KL and agreement where the reference's largest probability lies in a range: quantisation hurts where it is unsure."""
        found = []
        count = len(rows.windows)
        for low, high in itertools.pairwise(BUCKETS):
            inside: NDArray[np.bool_] = (rows.confidence >= low) & ((rows.confidence < high) | (high == BUCKETS[-1]))
            weights = np.bincount(rows.window_of[inside], minlength=count)
            if not inside.any():
                continue
            settings = {"positions": f"reference's largest probability from {low:g} to {high:g}"}
            for name, values in (("kl", rows.kl), ("top1", rows.same.astype(np.float64))):
                sums = np.bincount(rows.window_of[inside], weights=values[inside], minlength=count).astype(np.float64)
                found.append(self.mean(f"{name}_confidence_{low:g}_{high:g}", sums, weights, settings=settings))
        return found


def _noise_floor(base: _Base) -> Measurement:
    """KL of the reference from itself in bfloat16 on the first windows."""
    some = replace(base.windows, ids=base.windows.ids[:FLOOR_WINDOWS], tail=None)
    rounded = copy.deepcopy(base.pair.reference).to(torch.bfloat16)
    frame = compare_windows(base.pair.reference, rounded, some, batch=1).windows
    settings = {"positions": f"every position of the first {len(some.ids)} windows", "artefact": "the reference in bfloat16"}
    sums, weights = frame["kl"].to_numpy(np.float64), frame["positions"].to_numpy(np.int64)
    return replace(base.mean("noise_floor_kl", sums, weights, settings=settings), subject=base.pair.baseline)
