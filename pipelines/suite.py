"""The suites of an evaluation and the margins of its verdicts, from ``suites.toml``: nothing here is chosen after the figures."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Literal, cast

from pydantic import BaseModel, ConfigDict, Field

from quant.errors import UsageError

SuiteName = Literal["quick", "standard", "full"]
_FILE = Path(__file__).with_name("suites.toml")


class Margins(BaseModel):
    """How much worse the artefact may be, at the worse end of its interval, and still count as not inferior."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ln_perplexity_ratio: float = Field(gt=0)
    kl: float = Field(gt=0)
    task_accuracy: float = Field(gt=0)
    deployment_rate: float = Field(gt=0)


class Suite(BaseModel):
    """Sizes: windows of the language part, items of each deployment part and language (0: all)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    windows: int = Field(gt=0)
    noise_floor: bool
    deployment_items: int = Field(ge=0)


class _Suites(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    margins: Margins
    suite: dict[str, Suite]


def load_suite(name: str) -> tuple[SuiteName, Suite, Margins]:
    """The suite of that name and the margins of all. Raises UsageError with the names there are."""
    found = _Suites.model_validate(tomllib.loads(_FILE.read_text("utf-8")))
    if name not in found.suite:
        raise UsageError(f"no such suite: {name!r} (there are: {', '.join(found.suite)})")
    return cast(SuiteName, name), found.suite[name], found.margins
