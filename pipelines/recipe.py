"""The recipe: which matrix is stored how, from the options of the command line or from a TOML file; checked before any work.

method = "awq"                      # optional; must agree with the command line

[[rule]]                            # the first rule that matches a module decides
match = "*.down_proj"               # a shell pattern over module names, or "re:" and a regular expression
bits = 8
group_size = "channel"              # a number, "channel" or "tensor"
symmetric = true
scale_dtype = "f16"

[[rule]]
match = "*.0.*"
keep = true                         # stays in float

[[rule]]
match = "*"
bits = 4
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from calib.methods import get_method
from formats.fates import Keep, Quantise, Rule
from quant.errors import RecipeError, SchemeError
from quant.scheme import Blocks, Scheme

DEFAULT_BITS, DEFAULT_GROUP = 4, 64


class RuleModel(BaseModel):
    """One ``[[rule]]`` of a recipe file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    match: str = Field(min_length=1)
    keep: bool = False
    bits: int | None = None
    group_size: int | Literal["channel", "tensor"] | None = None
    symmetric: bool | None = None
    scale_dtype: Literal["f16", "bf16", "f32"] | None = None

    def rule(self, quantizer: str) -> Rule:
        if self.match.startswith("re:"):
            try:
                re.compile(self.match[3:])
            except re.error as error:
                raise RecipeError(f"rule {self.match!r} is not a regular expression: {error}") from None
        if self.keep:
            given = [name for name in ("bits", "group_size", "symmetric", "scale_dtype") if getattr(self, name) is not None]
            if given:
                raise RecipeError(f"rule {self.match!r}: keep = true leaves no place for {', '.join(given)}")
            return Rule(self.match, Keep("kept in float by the recipe"))
        scheme = Scheme(
            DEFAULT_BITS if self.bits is None else self.bits,
            "zp" if self.symmetric is False else "sym",
            DEFAULT_GROUP if self.group_size is None else self.group_size,
            self.scale_dtype or "f16",
        )
        return Rule(self.match, Quantise(scheme, quantizer))


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


def load_recipe(path: Path, method: str) -> tuple[Rule, ...]:
    """Rules of a recipe file.

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
        raise RecipeError(
            f"{path}: {place}: {first['msg'].lower()} (known: match, keep, bits, group_size, symmetric, scale_dtype)"
        ) from None
    if found.method is not None and found.method != method:
        raise RecipeError(f"{path} is a recipe for {found.method!r}, but the command line asks for {method!r}")
    return tuple(rule.rule(get_method(method).quantizer) for rule in found.rule)
