"""Artefacts of the embedded model, made by the command that a user types, once per test run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.real_artefacts import quantise

Artefact = Callable[[str, str], Path]


@pytest.fixture(scope="session")
def artefact(tmp_path_factory: pytest.TempPathFactory) -> Artefact:
    """``artefact(method, "--symmetric" | "--zero-point")`` -> folder of the embedded model at 4 bits, groups of 64."""
    made: dict[tuple[str, str], Path] = {}

    def make(method: str, zero: str) -> Path:
        if (method, zero) not in made:
            folder = tmp_path_factory.mktemp("artefacts") / f"{method}{zero}"
            small = ("--corpus", "pydoc", "--window", "128", "--calibration-windows", "8", "--evaluation-windows", "2")
            made[method, zero] = quantise(folder, method, "--bits", "4", "--group-size", "64", zero, *small)
        return made[method, zero]

    return make
