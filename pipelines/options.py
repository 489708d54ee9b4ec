"""Options of the run command that need more than a type: checked against each other before anything is read or imported."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import typer

from calib.methods import get_method
from formats.codec import default_codec, get_codec
from formats.fates import Quantise, Rule
from formats.sizing import SizeTarget
from pipelines.recipe import check_options, find_recipe, load_recipe, parse_group_size
from quant.errors import UsageError
from quant.quantizer import Option
from quant.scheme import SCALE_BYTES, ScaleType, Scheme

_PARTS_OF_A_SCHEME = ("bits", "group_size", "symmetric", "scale_dtype")


def was_given(context: typer.Context, name: str) -> bool:
    """Whether an option was written on the command line."""
    return getattr(context.get_parameter_source(name), "name", "DEFAULT") != "DEFAULT"


@dataclass(frozen=True, slots=True)
class Own:
    """What the command line says of every matrix alike: the quantiser's options, a search of ranges without data, the format."""

    options: tuple[Option, ...]
    mse: bool
    codec: str | None = None


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
    storage = context.params["storage"]
    return Own(tuple(sorted(found.items())), mse, None if storage is None else get_codec(storage).name)


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
        codec = own.codec or get_method(method).codec or default_codec(scheme)
        rules = (Rule("*", Quantise(scheme, get_method(method).quantizer, codec, own.options, own.mse)),)
    _check_integers(rules, method, target=any(context.params[name] is not None for name in ("target_bpw", "target_bytes")))
    return rules


def _given(context: typer.Context, *names: str) -> str:
    """Those of these options that were written on the command line, as they are written there."""
    return ", ".join("--" + name.replace("_", "-") for name in names if was_given(context, name))


def _recipe_rules(context: typer.Context, method: str, recipe: str, own: Own) -> tuple[Rule, ...]:
    flags = _given(context, *_PARTS_OF_A_SCHEME, "scheme")
    if flags:
        raise UsageError(f"{flags} cannot go with --recipe, which says the same per pattern: put it into {recipe}")
    return load_recipe(find_recipe(recipe), method, own.options, own.mse, own.codec or get_method(method).codec)


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
    return Scheme(bits, "sym" if symmetric else "zp", parse_group_size(group_size), scales)


def _check_integers(rules: tuple[Rule, ...], method: str, *, target: bool) -> None:
    """Raise UsageError where a float scheme meets what only works out integers."""
    schemes = [rule.fate.scheme for rule in rules if isinstance(rule.fate, Quantise) and not rule.fate.scheme.integer]
    if schemes and get_method(method).learned:
        raise UsageError(f"{method} learns integer codes, and {schemes[0]} is a float scheme: use rtn, awq, gptq or awq+gptq")
    if schemes and target:
        raise UsageError(f"a size target allocates widths of integers, and {schemes[0]} is a float scheme: leave one of them out")


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


def smoothing_share(context: typer.Context, method: str, text: str) -> float | None:
    """The alpha of smoothing, or None where it is searched. Raises UsageError for no share, or a method that does not smooth."""
    if was_given(context, "alpha") and get_method(method).transform != "smoothquant":
        raise UsageError(f"--alpha: {method} does not smooth; it is an option of smoothquant and smoothquant+gptq")
    if text == "search":
        return None
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found <= 1:
        raise UsageError(f"--alpha is a share from 0 to 1 or 'search', not {text!r}")
    return found


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
    single = fate.scheme if recipe is None and isinstance(fate, Quantise) else None
    what = str(single) if single is not None else Path(recipe or "recipe").stem
    return Path("artifacts") / f"{stem}-{method}-{what}"
