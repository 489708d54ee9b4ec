"""The policy of a gate: a TOML file with one ``[[bound]]`` for every figure that an artefact must keep.

name = "release"                        # of the verdict in the manifest; without it the file's name

[[bound]]
name = "ln_perplexity_ratio"            # a measurement; part = "" (or none) is the run's own
at_most = 0.005                         # or at_least; exactly one of them

[[bound]]
name = "kl"
part = "language"                       # a part of python -m pipelines.evaluate
at_most = 0.02
judge = "high"                          # "value", "low" or "high" end of the interval; without it the worse end
level = 0.95                            # least level of the interval
minimum_n = 24                          # least number of windows or items
windows = "e791c25fb69b"                # digest of the windows, or its first 12 digits or more
accepted_flag = "exactly zero"          # a flag with this text does not fail the bound; any other does

[[bound]]
name = "json_valid"                     # not more than 2 points worse than another artefact
part = "deployment"
at_least = -0.02
against = "../z/manifest.json"          # relative to this file

Policies shipped with the program go by name: ``policy_names`` lists them.
"""

from __future__ import annotations

import difflib
import hashlib
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from eval.gates import Bound
from quant.errors import UsageError

POLICIES = Path(__file__).parent / "policies"


@dataclass(frozen=True, slots=True)
class Policy:
    """Bounds under a name, and the SHA-256 of the file that they came from."""

    name: str
    sha256: str
    bounds: tuple[Bound, ...]


class _BoundModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    name: str = Field(min_length=1)
    part: str = ""
    at_most: float | None = None
    at_least: float | None = None
    judge: Literal["value", "low", "high"] | None = None
    level: float = Field(default=0.95, gt=0, lt=1)
    minimum_n: int = Field(default=1, ge=1)
    windows: str | None = Field(default=None, pattern="^[0-9a-f]{12,64}$")
    accepted_flag: str | None = Field(default=None, min_length=1)
    against: str | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _one_bound(self) -> _BoundModel:
        if (self.at_most is None) == (self.at_least is None):
            raise ValueError("needs exactly one of at_most and at_least (write two bounds for both)")
        return self


class _PolicyModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str | None = Field(default=None, min_length=1)
    bound: list[_BoundModel] = Field(min_length=1)


def policy_names() -> tuple[str, ...]:
    """Names of the shipped policies."""
    return tuple(sorted(path.stem for path in POLICIES.glob("*.toml")))


def find_policy(name: str) -> Path:
    """The file of a shipped policy, or the path itself. Raises UsageError with the policies there are."""
    if name in policy_names():
        return POLICIES / f"{name}.toml"
    if name.endswith(".toml") or "/" in name or Path(name).exists():
        return Path(name)
    close = difflib.get_close_matches(name, policy_names(), 1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise UsageError(f"no such policy: {name!r} ({hint}shipped: {', '.join(policy_names())}; or the path of a .toml file)")


def load_policy(path: Path) -> Policy:
    """The policy in the TOML file ``path``.

    Raises:
        UsageError: no such file, not TOML, an unknown key or a value of the wrong kind, or the same bound twice.
    """
    try:
        data = path.read_bytes()
        found = _PolicyModel.model_validate(tomllib.loads(data.decode()))
    except OSError as error:
        raise UsageError(f"cannot read the policy {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from None
    except ValidationError as error:
        raise UsageError(f"{path}: {_sentence(error)}") from None
    bounds = tuple(
        Bound(**{**bound.model_dump(), "against": None if bound.against is None else path.parent / bound.against})
        for bound in found.bound
    )
    for bound in bounds:
        if bounds.count(bound) > 1:
            raise UsageError(f"{path}: the same bound on {bound.title} stands there twice")
    return Policy(found.name or path.stem, hashlib.sha256(data).hexdigest(), bounds)


def _sentence(error: ValidationError) -> str:
    """The first problem: its place (bounds counted from 1), what it is, and the keys that are known there."""
    first = error.errors()[0]
    place = ".".join(str(step + 1) if isinstance(step, int) else step for step in first["loc"])
    model = _BoundModel if len(first["loc"]) > 1 else _PolicyModel
    what = "no such key" if first["type"] == "extra_forbidden" else first["msg"].removeprefix("Value error, ").lower()
    return f"{place}: {what} (known: {', '.join(model.model_fields)})"
