"""The second half of lab 4: outliers of activations, and W8A8 with and without SmoothQuant, exactly as the source text does it.

Beside them stands LLM.int8's mixed decomposition, which the text has no figure for.

The division by the smoothing factors stays explicit in front of every matrix (nothing is folded), so that all 210 are smoothed.
Statistics come from the lab's own calibration windows, two at a time; they see no evaluation token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from eval.lab4 import ActivationResult, ActivationRow, DecompositionResult, Lab4, OutlierFigures
from quant.scheme import Scheme

if TYPE_CHECKING:
    import torch

    from calib.windows import Windows
    from quant.mixed_decomposition import Decomposed

WEIGHTS = Scheme.parse("int8-sym-channel-f32")


def decoder_linears(model: Any) -> dict[str, torch.nn.Linear]:
    """All Linear modules but the output head, by name."""
    import torch

    return {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}


def largest_inputs(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Largest magnitude per input channel of every matrix over the windows ``[n, length]``."""
    import torch

    found: dict[str, torch.Tensor] = {}
    handles = []
    for name, layer in decoder_linears(model).items():

        def see(module: torch.nn.Module, args: tuple[Any, ...], name: str = name) -> None:
            largest = args[0].detach().reshape(-1, args[0].shape[-1]).abs().amax(0)
            found[name] = torch.maximum(found[name], largest) if name in found else largest

        handles.append(layer.register_forward_pre_hook(see))
    try:
        with torch.inference_mode():
            for batch in torch.split(ids, 2):
                model(batch, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return found


def outliers(model: Any, largest: Mapping[str, torch.Tensor]) -> OutlierFigures:
    """The lab's statistics: ratios of the largest to the (lower) median channel, of inputs and of weights."""
    import statistics

    ratios = {name: float(x.max() / x.median().clamp_min(1e-12)) for name, x in largest.items()}
    worst = max(ratios, key=ratios.__getitem__)
    columns = [layer.weight.detach().abs().amax(0) for layer in decoder_linears(model).values()]
    return OutlierFigures(
        worst_layer=worst,
        largest=float(largest[worst].max()),
        median=float(largest[worst].median()),
        ratio=ratios[worst],
        median_ratio=statistics.median(ratios.values()),
        worst_weight_ratio=max(float(column.max() / column.median()) for column in columns),
    )


def run_activation_rows(
    model: Any, lab: Lab4, windows: Windows, largest: Mapping[str, torch.Tensor], report: Callable[[int, int], None]
) -> Iterator[ActivationResult]:
    """Measure every row on ``model`` (float32, in memory), whose weights are put back at the end."""
    from eval.perplexity import window_losses

    layers = decoder_linears(model)
    originals = {name: layer.weight.detach().clone() for name, layer in layers.items()}
    for done, row in enumerate(lab.activation_row, start=1):
        handles = [_prepare(layers[name], originals[name], largest[name], row) for name in layers]
        try:
            perplexity = window_losses(model, windows).perplexity
        finally:
            for handle in handles:
                handle.remove()
            for name, original in originals.items():
                layers[name].weight.data.copy_(original)
        report(done, len(lab.activation_row))
        yield ActivationResult(row, perplexity)


def _prepare(layer: torch.nn.Linear, original: torch.Tensor, largest: torch.Tensor, row: ActivationRow) -> Any:
    """Round the smoothed matrix, and hook the smoothing and rounding of its input; returns the hook's handle."""
    import torch

    from quant.activations import ActivationScheme
    from quant.quantizers.rtn import round_to_nearest
    from quant.transforms.smoothquant import largest_columns, smooth_factors

    factors = torch.ones_like(largest)
    if row.alpha is not None:
        factors = smooth_factors(largest, largest_columns([original]), row.alpha)
    layer.weight.data.copy_(round_to_nearest(original * factors, WEIGHTS).dequantise())
    inputs = ActivationScheme("tensor", dynamic=True)

    def smooth_and_round(module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[torch.Tensor]:
        return (inputs.rounded(args[0] / factors),)

    return layer.register_forward_pre_hook(smooth_and_round)


def run_decomposition_rows(
    model: Any, lab: Lab4, windows: Windows, largest: Mapping[str, torch.Tensor], report: Callable[[int, int], None]
) -> Iterator[DecompositionResult]:
    """Measure mixed decomposition on ``model``, whose matrices are in place again at the end."""
    from eval.perplexity import window_losses
    from quant.mixed_decomposition import decompose, outlier_columns

    layers: dict[str, Any] = dict(decoder_linears(model))
    elements = sum(layer.weight.numel() for layer in layers.values())
    for done, row in enumerate(lab.decomposition_row, start=1):
        parts = {
            name: decompose(layer.weight.detach(), outlier_columns(largest[name], row.threshold))
            for name, layer in layers.items()
        }
        try:
            for name, layer in layers.items():
                layer.forward = _product_of(parts[name], layer.bias)
            perplexity = window_losses(model, windows).perplexity
        finally:
            for layer in layers.values():
                layer.__dict__.pop("forward", None)
        nbytes = sum(part.nbytes for part in parts.values())
        columns = sum(len(part.columns) + len(part.others) for part in parts.values())
        share = sum(len(part.columns) for part in parts.values()) / columns
        report(done, len(lab.decomposition_row))
        yield DecompositionResult(row, share, nbytes, 8 * nbytes / elements, perplexity)


def _product_of(part: Decomposed, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda inputs: part.product(inputs) if bias is None else part.product(inputs) + bias


def activation_misses(
    lab: Lab4,
    found: OutlierFigures,
    results: list[ActivationResult],
    decomposed: list[DecompositionResult],
    published: bool,
) -> list[str]:
    """Sentences on every figure of this half that is not as expected."""
    expected = lab.published_outliers if published else lab.embedded_outliers
    wrong = []
    if found.worst_layer != expected.worst_layer:
        wrong.append(f"the worst activations are in {found.worst_layer}, expected {expected.worst_layer}")
    for name, value in expected.model_dump(exclude={"worst_layer"}).items():
        measured = getattr(found, name)
        # The text prints the median with four digits only: a last digit is a larger share than the tolerance.
        if abs(measured / value - 1) > lab.outlier_tolerance and abs(measured - value) > 0.0051:
            wrong.append(f"outliers: {name} is {measured:.4f}, expected {value:.4f}")
    figures = [
        (r.row.label, r.perplexity, r.row.published if published else r.row.embedded, lab.activation_tolerance) for r in results
    ]
    figures += [
        (r.row.label, r.perplexity, None if published else r.row.embedded, lab.decomposition_tolerance) for r in decomposed
    ]
    for label, measured, value, tolerance in figures:
        if value is not None and abs(measured / value - 1) > tolerance:
            wrong.append(f"{label}: {measured:.4f}, expected {value:.4f}")
    return wrong
