"""The recipe: which matrix is stored how, from the options of the command line or from a TOML file; checked before any work.

method = "gptq"                     # optional; must agree with the command line

[[rule]]                            # the first rule that matches a module decides
match = "*.down_proj"               # a shell pattern over module names, or "re:" and a regular expression
bits = 8                            # or all of a scheme by its name: scheme = "mxfp4", "e2m1-b32-e8m0.even"
group_size = [128, 64, 32]          # a number, "channel" or "tensor", or a list: the first that divides the columns
symmetric = true                    # or full_range = true: all codes, and scales of either sign
scale_dtype = "f16"
quantizer = "rtn"                   # another way to the codes than the method's
format = "dense"                    # how it is stored: see docs/numbers.md
activations = "token"               # inputs rounded when the model runs: "token", "tensor", "static" or "none"
order = "none"                      # the quantiser's own options, as on the command line; mse = true for the range search

[[rule]]
match = "lm_head"                   # embeddings and output heads are quantised only by a rule that names them
bits = 8
group_size = "channel"

[[rule]]
match = "*norm"
keep = true                         # stays in float,
dtype = "bf16"                      # in this type instead of the source's

[[rule]]
match = "*"                         # the rest of the decoder blocks' matrices
bits = 4

Presets are recipes shipped with the program: ``preset_names`` lists them.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from calib.methods import Method, get_method
from formats.codec import codec_names, default_codec, get_codec
from formats.fates import DATA_FREE, Keep, Quantise, Rule
from quant.activations import ActivationScheme
from quant.errors import RecipeError, SchemeError
from quant.quantizer import Option, quantizer_names
from quant.scheme import Blocks, Scheme, Zero

PRESETS = Path(__file__).parent / "presets"
_OPTIONS = ("order", "scale_policy", "damping", "asymmetric")
_PARTS_OF_A_SCHEME = ("bits", "group_size", "symmetric", "full_range", "scale_dtype")
_OF_A_SCHEME = ("scheme", *_PARTS_OF_A_SCHEME, "format", "activations", "quantizer", "mse", *_OPTIONS)


@dataclass(frozen=True, slots=True)
class Own:
    """What the command line says of every matrix alike, where a rule of a recipe does not say otherwise.

    Attributes:
        options: those of the method's quantiser.
        mse: a search of ranges without data.
        codec: how it is stored; None: what most engines read.
        activations: how inputs are rounded; None: they stay in float.
    """

    options: tuple[Option, ...] = ()
    mse: bool = False
    codec: str | None = None
    activations: ActivationScheme | None = None


def usual_activations(codec: str | None) -> ActivationScheme | None:
    """How inputs are rounded where nothing is said of them: per token in a layout that exists for rounded inputs only."""
    needed = codec is not None and get_codec(codec).input_refusal(None) is not None
    return ActivationScheme("token") if needed else None


def parse_activations(text: str) -> ActivationScheme | None:
    """``none``, or an activation scheme by its name. Raises SchemeError."""
    return None if text == "none" else ActivationScheme.parse(text)


class RuleModel(BaseModel):
    """One ``[[rule]]`` of a recipe file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    match: str = Field(min_length=1)
    keep: bool = False
    dtype: Literal["f16", "bf16", "f32"] | None = None
    scheme: str | None = None
    bits: int | None = None
    group_size: int | Literal["channel", "tensor"] | list[int | Literal["channel", "tensor"]] | None = None
    symmetric: bool | None = None
    full_range: bool | None = None
    scale_dtype: Literal["f16", "bf16", "f32"] | None = None
    format: str | None = None
    activations: str | None = None
    quantizer: str | None = None
    order: Literal["energy", "none"] | None = None
    scale_policy: Literal["static", "updated"] | None = None
    damping: float | None = Field(default=None, gt=0, lt=1)
    asymmetric: float | None = Field(default=None, ge=0, le=1)
    mse: bool | None = None

    def rule(self, method: Method, own: Own) -> Rule:
        """The rule; ``own`` holds where it does not say otherwise."""
        if self.match.startswith("re:"):
            try:
                re.compile(self.match[3:])
            except re.error as error:
                raise RecipeError(f"rule {self.match!r} is not a regular expression: {error}") from None
        if self.keep:
            given = [name for name in _OF_A_SCHEME if getattr(self, name) is not None]
            if given:
                raise RecipeError(f"rule {self.match!r}: keep = true leaves no place for {', '.join(given)}")
            return Rule(self.match, Keep("kept in float by the recipe", self.dtype.upper() if self.dtype else None))
        if self.dtype is not None:
            raise RecipeError(
                f"rule {self.match!r}: dtype is the type of what is kept; write keep = true, or scale_dtype for scales"
            )
        if self.quantizer is not None and self.quantizer not in quantizer_names():
            raise RecipeError(
                f"rule {self.match!r}: no such quantizer: {self.quantizer!r} (there are: {', '.join(quantizer_names())})"
            )
        if self.format is not None and self.format not in codec_names():
            raise RecipeError(f"rule {self.match!r}: no such format: {self.format!r} (there are: {', '.join(codec_names())})")
        fates = [self._fate(scheme, method.quantizer, own) for scheme in self._schemes(method)]
        return Rule(self.match, fates[0], tuple(fates[1:]))

    def _schemes(self, method: Method) -> list[Scheme]:
        """The scheme, and those for shapes that it does not fit."""
        parts = [name for name in _PARTS_OF_A_SCHEME if getattr(self, name) is not None]
        if self.scheme is not None and parts:
            raise RecipeError(f"rule {self.match!r}: scheme says all of a scheme and leaves no place for {', '.join(parts)}")
        named = self.scheme or (None if parts else method.scheme)
        if named is not None:
            return [Scheme.parse(named)]
        sizes = self.group_size if isinstance(self.group_size, list) else [self.group_size]
        if not sizes:
            raise RecipeError(f"rule {self.match!r}: group_size is an empty list")
        usual = Scheme.parse(method.usual)
        bits = usual.bits if self.bits is None else self.bits
        if self.full_range and self.symmetric is False:
            raise RecipeError(f"rule {self.match!r}: full_range is a kind of symmetric grid, symmetric = false denies it")
        zero: Zero = "full" if self.full_range else "zp" if self.symmetric is False else "sym"
        scale = self.scale_dtype or usual.scale
        return [Scheme(bits, zero, usual.blocks if size is None else size, scale) for size in sizes]

    def _fate(self, scheme: Scheme, method_quantizer: str, own: Own) -> Quantise:
        quantizer = self.quantizer or method_quantizer
        inherited = dict(own.options) if quantizer == method_quantizer else {}
        said = {name: value for name in _OPTIONS if (value := getattr(self, name)) is not None}
        if said and quantizer == DATA_FREE:
            raise RecipeError(f"rule {self.match!r}: {quantizer} has no option {', '.join(said)}")
        check_options(inherited | said, f"rule {self.match!r}: ")
        options = tuple(sorted((inherited | said).items()))
        mse = own.mse if self.mse is None else self.mse
        named = self.format or own.codec
        activations = own.activations if self.activations is None else parse_activations(self.activations)
        if self.activations is None and activations is None and self.format is not None:
            activations = usual_activations(self.format)
        return Quantise(scheme, quantizer, named or default_codec(scheme, activations), options, mse, activations)


class RecipeModel(BaseModel):
    """A recipe file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    method: str | None = None
    rule: list[RuleModel] = Field(min_length=1)


def parse_group_size(text: str) -> Blocks:
    """``channel``, ``tensor`` or a number. Raises SchemeError."""
    if text in ("channel", "tensor"):
        return cast(Blocks, text)
    try:
        return int(text)
    except ValueError:
        raise SchemeError(f"group size must be a number, 'channel' or 'tensor'; got {text!r}") from None


def check_options(options: Mapping[str, str | float | bool], where: str = "") -> None:
    """Raise RecipeError for options that contradict each other; what only the quantiser knows is checked when it is made."""
    if options.get("scale_policy") == "updated" and options.get("order") != "none":
        raise RecipeError(f"{where}scale policy updated takes groups as they stand in the matrix: it needs order none")


def preset_names() -> tuple[str, ...]:
    """Names of the shipped recipes."""
    return tuple(sorted(path.stem for path in PRESETS.glob("*.toml")))


def find_recipe(name: str) -> Path:
    """The file of a preset, or the path itself. Raises RecipeError with the presets there are."""
    if name in preset_names():
        return PRESETS / f"{name}.toml"
    if name.endswith(".toml") or "/" in name or Path(name).exists():
        return Path(name)
    close = difflib.get_close_matches(name, preset_names(), 1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise RecipeError(f"no such recipe: {name!r} ({hint}presets: {', '.join(preset_names())}; or the path of a .toml file)")


def load_recipe(path: Path, method: str, own: Own | None = None) -> tuple[Rule, ...]:
    """Rules of a recipe file; ``own`` holds where a rule does not say otherwise.

    Raises:
        RecipeError: no such file, not TOML, an unknown key or a value of the wrong kind, or another method than asked for.
    """
    try:
        with path.open("rb") as file:
            found = RecipeModel.model_validate(tomllib.load(file))
    except OSError as error:
        raise RecipeError(f"cannot read the recipe {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is not TOML: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(step) for step in first["loc"])
        known = ", ".join(RuleModel.model_fields)
        raise RecipeError(f"{path}: {place}: {first['msg'].lower()} (known: {known})") from None
    if found.method is not None and found.method != method:
        raise RecipeError(f"{path} is a recipe for {found.method!r}, but the command line asks for {method!r}")
    return tuple(rule.rule(get_method(method), own or Own()) for rule in found.rule)
