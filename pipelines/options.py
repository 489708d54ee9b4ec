"""Options of the run command that need more than a type: checked against each other before anything is read or imported."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

import typer

from calib.conventions import Convention
from calib.methods import Smoothing, get_method
from formats.codec import default_codec, get_codec
from formats.fates import Quantise, Rule
from formats.sizing import SizeTarget
from pipelines.recipe import Own, check_options, find_recipe, load_recipe, parse_activations, parse_group_size, usual_activations
from quant.errors import UsageError
from quant.scheme import SCALE_BYTES, ScaleType, Scheme, Zero

_PARTS_OF_A_SCHEME = ("bits", "group_size", "symmetric", "full_range", "scale_dtype")


def was_given(context: typer.Context, name: str) -> bool:
    """Whether an option was written on the command line."""
    return getattr(context.get_parameter_source(name), "name", "DEFAULT") != "DEFAULT"


def check_numbers(params: Mapping[str, Any], scoring: Convention) -> None:
    """Raise UsageError for a count of the run command that is out of its range."""
    for name in ("calibration_windows", "batch", "learn_iterations", "shard_bytes"):
        if params[name] < 1:
            raise UsageError(f"--{name.replace('_', '-')} is too small: {params[name]}")
    if scoring.window < 2:
        raise UsageError(f"--window is too small: {scoring.window}")
    if params["self_written"] < 0:
        raise UsageError(f"--self-written takes a number of windows, 0 or more, not {params['self_written']}")
    if params["tune"] < 0:
        raise UsageError(f"--tune takes a number of steps, 0 or more, not {params['tune']}")
    if params["tune"] and params["calibration_windows"] < 2:
        raise UsageError("--tune holds a calibration window back to judge its steps: --calibration-windows must be 2 or more")
    if params["seed"] < 0:
        raise UsageError(f"--seed is 0 or more, not {params['seed']}")


def own_options(context: typer.Context, method: str, **given: str | float | None) -> Own:
    """What was given for every matrix alike, checked. Raises UsageError for options of gptq where the method has none."""
    mse = bool(context.params["mse"])
    if mse and context.params["clip"] and was_given(context, "clip"):
        raise UsageError("--mse and --clip choose the same ranges in two ways: give one of them")
    found = {name: value for name, value in given.items() if value is not None}
    flags = ", ".join("--" + name.replace("_", "-") for name in found)
    if found and get_method(method).quantizer != "gptq":
        raise UsageError(f"{flags}: {method} does not make its codes with gptq, which this is an option of")
    for name, known in (("order", ("energy", "none")), ("scale_policy", ("static", "updated"))):
        if name in found:
            _choice("--" + name.replace("_", "-"), str(found[name]), known)
    if not 0 < float(found.get("damping", 0.5)) < 1:
        raise UsageError(f"--damping is a share above 0 and below 1, not {found['damping']}")
    if not 0 <= float(found.get("asymmetric", 0)) <= 1:
        raise UsageError(f"--asymmetric is a share from 0 to 1, not {found['asymmetric']}")
    check_options(found)
    storage, activations = context.params["storage"], context.params["activations"]
    codec = None if storage is None else get_codec(storage).name
    usual = get_method(method).activations
    said = usual_activations(codec) if usual is None else parse_activations(usual)
    inputs = said if activations is None else parse_activations(str(activations))
    return Own(tuple(sorted(found.items())), mse, codec, inputs)


def smoothing_of(method: str, alpha: str | None, percentile: float | None) -> Smoothing:
    """Settings of SmoothQuant. Raises UsageError for values out of range, and where the method does not smooth."""
    given = {"--alpha": alpha, "--percentile": percentile}
    flags = ", ".join(name for name, value in given.items() if value is not None)
    if flags and get_method(method).transform != "smoothquant":
        raise UsageError(f"{flags}: {method} does not smooth activations; use smoothquant or smoothquant+gptq")
    found = None
    if alpha not in (None, "search"):
        try:
            found = float(str(alpha))
        except ValueError:
            raise UsageError(f"--alpha is 'search' or a number from 0 to 1, not {alpha!r}") from None
        if not 0 <= found <= 1:
            raise UsageError(f"--alpha is 'search' or a number from 0 to 1, not {alpha}")
    if percentile is not None and not 0 < percentile <= 100:
        raise UsageError(f"--percentile is above 0 and at most 100, not {percentile:g}")
    return Smoothing(found, 100.0 if percentile is None else percentile)


def clips(context: typer.Context, method: str) -> bool:
    """Whether clipping is searched: where it was asked for, and by default for all methods but SmoothQuant's.

    At 8 bits there is next to nothing to gain, and the search would take longer than all the rest.
    """
    usual = get_method(method).transform != "smoothquant" or was_given(context, "clip")
    return bool(context.params["clip"]) and usual and not context.params["mse"]


def rules_of(
    context: typer.Context,
    method: str,
    bits: int,
    group_size: str,
    symmetric: bool,
    scale_dtype: str,
    recipe: str | None,
    own: Own,
) -> tuple[Rule, ...]:
    """One rule for everything from the options, or those of the recipe; both at once would contradict each other."""
    if recipe is not None:
        rules = _recipe_rules(context, method, recipe, own)
    else:
        scheme = _scheme(context, method, bits, group_size, symmetric, scale_dtype)
        codec = own.codec or default_codec(scheme, own.activations)
        rules = (Rule("*", Quantise(scheme, get_method(method).quantizer, codec, own.options, own.mse, own.activations)),)
    target = any(context.params[name] is not None for name in ("target_bpw", "target_bytes"))
    _check_integers(rules, method, target=target)
    _check_inputs(rules, method, target=target, tune=bool(context.params["tune"]))
    return rules


def _given(context: typer.Context, *names: str) -> str:
    """Those of these options that were written on the command line, as they are written there."""
    return ", ".join("--" + name.replace("_", "-") for name in names if was_given(context, name))


def _recipe_rules(context: typer.Context, method: str, recipe: str, own: Own) -> tuple[Rule, ...]:
    flags = _given(context, *_PARTS_OF_A_SCHEME, "scheme")
    if flags:
        raise UsageError(f"{flags} cannot go with --recipe, which says the same per pattern: put it into {recipe}")
    return load_recipe(find_recipe(recipe), method, own)


def _scheme(context: typer.Context, method: str, bits: int, group_size: str, symmetric: bool, scale_dtype: str) -> Scheme:
    """The method's own scheme, the one that was named, or the one of the four options."""
    named, asked = get_method(method).scheme, context.params["scheme"]
    flags = _given(context, *_PARTS_OF_A_SCHEME)
    if named is not None and (flags or asked is not None):
        raise UsageError(f"{flags or '--scheme'} cannot go with {method}, which names its own scheme: use rtn with it")
    if asked is not None and flags:
        raise UsageError(f"{flags}: --scheme says all of a scheme, nothing else of it can be given")
    if asked is not None or named is not None:
        return Scheme.parse(str(asked or named))
    scales = cast(ScaleType, _choice("--scale-dtype", scale_dtype, tuple(SCALE_BYTES)))
    usual = Scheme.parse(get_method(method).usual)
    blocks = parse_group_size(group_size) if was_given(context, "group_size") else usual.blocks
    if context.params["full_range"] and not symmetric:
        raise UsageError("--full-range is a kind of symmetric grid: it cannot go with --zero-point")
    zero: Zero = "full" if context.params["full_range"] else "sym" if symmetric else "zp"
    return Scheme(bits if was_given(context, "bits") else usual.bits, zero, blocks, scales)


def _check_integers(rules: tuple[Rule, ...], method: str, *, target: bool) -> None:
    """Raise UsageError where a float scheme meets what only works out integers."""
    schemes = [rule.fate.scheme for rule in rules if isinstance(rule.fate, Quantise) and not rule.fate.scheme.integer]
    if schemes and get_method(method).learned:
        raise UsageError(f"{method} learns integer codes, and {schemes[0]} is a float scheme: use rtn, awq, gptq or awq+gptq")
    if schemes and target:
        raise UsageError(f"a size target allocates widths of integers, and {schemes[0]} is a float scheme: leave one of them out")


def _check_inputs(rules: tuple[Rule, ...], method: str, *, target: bool, tune: bool) -> None:
    """Raise UsageError where rounded inputs meet what only knows float ones, or SmoothQuant has no inputs to smooth for."""
    fates = [rule.fate for rule in rules if isinstance(rule.fate, Quantise)]
    rounded = [str(fate.activations) for fate in fates if fate.activations is not None]
    if get_method(method).transform == "smoothquant" and not rounded:
        raise UsageError(f"{method} moves the range of inputs that are rounded: give --activations, or use awq")
    asymmetric = any(name == "asymmetric" and value for fate in fates for name, value in fate.options)
    ways = {"a size target": target, "--tune": tune, "learned rounding": get_method(method).learned, "--asymmetric": asymmetric}
    wanted = [way for way, asked in ways.items() if asked]
    if rounded and wanted:
        raise UsageError(f"{wanted[0]} does not know of rounded inputs ({rounded[0]}) yet: leave one of the two out")


def size_target(context: typer.Context, bits_per_weight: float | None, file_bytes: int | None) -> SizeTarget | None:
    """The size to be met, if one was given; the width is then not the user's to choose."""
    if bits_per_weight is None and file_bytes is None:
        return None
    if bits_per_weight is not None and file_bytes is not None:
        raise UsageError("--target-bpw and --target-bytes say the same in two ways: give one of them")
    if was_given(context, "bits"):
        raise UsageError("--bits cannot go with a size target, which chooses the width of every matrix")
    if not (bits_per_weight or file_bytes or 0) > 0:
        raise UsageError(f"a size target is above 0, not {bits_per_weight if file_bytes is None else file_bytes}")
    return SizeTarget(bits_per_weight, file_bytes)


def window_count(text: str) -> int | Literal["all"]:
    if text == "all":
        return "all"
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"--evaluation-windows is a number above 0 or 'all', not {text!r}")
    return int(text)


def _choice(option: str, value: str, known: tuple[str, ...]) -> Any:
    if value not in known:
        raise UsageError(f"{option} is one of {', '.join(known)}; got {value!r}")
    return value


def device_name(text: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise UsageError(f"--device is cpu, cuda or cuda:N; got {text!r}")
    if text != "cpu":
        import torch

        if not torch.cuda.is_available():
            raise UsageError(f"--device {text}: torch sees no CUDA device here; use --device cpu")
    return text


def default_output(model: str, method: str, rules: tuple[Rule, ...], recipe: str | None) -> Path:
    stem = Path(model.partition("@")[0].rstrip("/")).name or "model"
    fate = rules[0].fate
    single = str(fate).replace(" ", "-") if recipe is None and isinstance(fate, Quantise) else None
    what = single or Path(recipe or "recipe").stem
    return Path("artifacts") / f"{stem}-{method}-{what}"
