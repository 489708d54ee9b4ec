"""Artefacts of the embedded model, made by the command that a user types, once per test run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.real_artefacts import quantise

Artefact = Callable[[str, str], Path]


@pytest.fixture(scope="session")
def artefact(tmp_path_factory: pytest.TempPathFactory) -> Artefact:
    """``artefact(method, way)`` -> folder of the embedded model at 4 bits, groups of 64.

    ``way`` is ``--symmetric``, ``--zero-point``, or ``head``: the tied output head at 4 bits too, the embedding in float.
    """
    made: dict[tuple[str, str], Path] = {}

    def make(method: str, zero: str) -> Path:
        if (method, zero) not in made:
            folder = tmp_path_factory.mktemp("artefacts") / f"{method}{zero}"
            small = ("--corpus", "pydoc", "--window", "128", "--calibration-windows", "8", "--evaluation-windows", "2")
            scheme: tuple[str, ...] = ("--bits", "4", "--group-size", "64", zero)
            if zero == "head":
                recipe = folder.with_suffix(".toml")
                recipe.write_text('[[rule]]\nmatch = "lm_head"\n[[rule]]\nmatch = "*"\n')
                scheme = ("--recipe", str(recipe))
            made[method, zero] = quantise(folder, method, *scheme, *small)
        return made[method, zero]

    return make
