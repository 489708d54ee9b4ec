"""Lab 4 of the source text, computed again: fake quantisation of all decoder linears, and perplexity on fixed windows.

Fake means that weights are rounded and given back as float32: damage without packing. Scales stay float32 and the zero point is
the text's floating one, so that the numbers are the text's. The published figures live in ``lab4.toml``.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from quant.scheme import Scheme

if TYPE_CHECKING:
    import torch

    from calib.windows import Windows


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LabRow(_Strict):
    """A row of the lab: its scheme, and what was published and measured before, where it was."""

    label: str
    scheme: str
    published: tuple[float, float, float, float] | None = None
    embedded: float | None = None
    magnitude_only: bool = False


class ActivationRow(_Strict):
    """A row with rounded activations: ``alpha`` of SmoothQuant, or none; int8 weights per channel, int8 inputs per batch."""

    label: str
    alpha: float | None = None
    published: float
    embedded: float | None = None


class DecompositionRow(_Strict):
    """A row of LLM.int8, which the text only names: columns that reach the threshold in calibration stay in 16 bits."""

    label: str
    threshold: float
    embedded: float | None = None


class OutlierFigures(_Strict):
    """Largest input channel against the median one: of the worst layer, over all layers, and of the weights."""

    worst_layer: str
    largest: float = Field(gt=0)
    median: float = Field(gt=0)
    ratio: float = Field(gt=0)
    median_ratio: float = Field(gt=0)
    worst_weight_ratio: float = Field(gt=0)


class Lab4(_Strict):
    """The lab's fixed inputs and figures; see ``lab4.toml``."""

    published_model: str
    published_float: float
    embedded_model: str
    embedded_float: float
    windows: int
    window_tokens: int
    float_tolerance: float
    published_tolerance: float
    embedded_tolerance: float
    calibration_start: int
    calibration_windows: int
    outlier_tolerance: float
    activation_tolerance: float
    decomposition_tolerance: float
    published_outliers: OutlierFigures
    embedded_outliers: OutlierFigures
    row: tuple[LabRow, ...]
    activation_row: tuple[ActivationRow, ...]
    decomposition_row: tuple[DecompositionRow, ...]


@dataclass(frozen=True, slots=True)
class LabResult:
    """One measured row: bits per weight and bytes by the text's accounting, mean relative error, perplexity."""

    row: LabRow
    bits_per_weight: float
    nbytes: float
    mean_relative_error: float
    perplexity: float


@dataclass(frozen=True, slots=True)
class ActivationResult:
    """A measured row with rounded activations."""

    row: ActivationRow
    perplexity: float


@dataclass(frozen=True, slots=True)
class DecompositionResult:
    """A measured row of LLM.int8, with the share of input columns in 16 bits and its exact bytes."""

    row: DecompositionRow
    outlier_share: float
    nbytes: int
    bits_per_weight: float
    perplexity: float


def load_lab4() -> Lab4:
    return Lab4.model_validate(tomllib.loads(Path(__file__).with_name("lab4.toml").read_text("utf-8")))


def text_bytes(scheme: Scheme, shape: tuple[int, int]) -> float:
    """Bytes of one matrix by the text's accounting: dense codes, 2 bytes a scale, 2 more where there is a zero point."""
    rows, columns = scheme.block_grid(shape)
    return shape[0] * shape[1] * scheme.bits / 8 + rows * columns * (2 if scheme.symmetric else 4)


def run_lab4(model: Any, lab: Lab4, windows: Windows, report: Callable[[int, int], None]) -> Iterator[LabResult]:
    """Measure every row on ``model`` (float32, in memory), whose weights are put back at the end.

    Args:
        report: called with (rows done, rows in all).
    """
    import torch

    from eval.perplexity import window_losses

    layers = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and name != "lm_head"}
    originals = {name: module.weight.detach().clone() for name, module in layers.items()}
    try:
        for done, row in enumerate(lab.row, start=1):
            scheme = Scheme.parse(row.scheme)
            error = sum(_replace(layers[name], original, scheme) for name, original in originals.items()) / len(originals)
            nbytes = sum(text_bytes(scheme, (w.shape[0], w.shape[1])) for w in originals.values())
            bits = 8 * nbytes / sum(w.numel() for w in originals.values())
            perplexity = window_losses(model, windows).perplexity
            report(done, len(lab.row))
            yield LabResult(row, bits, nbytes, error, perplexity)
    finally:
        with torch.no_grad():
            for name, original in originals.items():
                layers[name].weight.copy_(original)


def _replace(layer: torch.nn.Module, original: torch.Tensor, scheme: Scheme) -> float:
    """Put the rounded matrix into the layer; returns ||W - Q|| / ||W||."""
    import torch

    from quant.quantizers.rtn import round_to_nearest

    rounded = round_to_nearest(original, scheme).dequantise()
    with torch.no_grad():
        layer.get_parameter("weight").copy_(rounded)
    return float((original - rounded).norm() / original.norm())


def misses(lab: Lab4, baseline: float, results: list[LabResult], published: bool) -> list[str]:
    """Sentences on every figure that is not as expected: the published ones on the published model, else the embedded ones."""
    expected = lab.published_float if published else lab.embedded_float
    found = (
        [] if abs(baseline - expected) <= lab.float_tolerance else [f"float perplexity {baseline:.4f}, expected {expected:.4f}"]
    )
    for result in results:
        row = result.row
        if published and row.published is not None:
            bits, megabytes, error, perplexity = row.published
            right = f"{result.bits_per_weight:.3f}" == f"{bits:.3f}" and f"{result.nbytes / 1e6:.2f}" == f"{megabytes:.2f}"
            right &= abs(result.mean_relative_error - error) <= 1.0e-4
            close = abs(math.log(result.perplexity / perplexity))
            right &= close <= (math.log(10) if row.magnitude_only else lab.published_tolerance)
            if not right:
                found.append(f"{row.label}: {result.perplexity:.4f}, published {perplexity:.4f}")
        elif not published and row.embedded is not None and abs(result.perplexity - row.embedded) > lab.embedded_tolerance:
            found.append(f"{row.label}: {result.perplexity:.4f}, expected {row.embedded:.4f}")
    return found
