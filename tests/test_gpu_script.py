"""The GPU benchmark runs whole on the CPU at a small size, so that it is ready where there is a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_script_runs_and_compares_codes() -> None:
    sizes = {"--device": "cpu", "--hidden": 128, "--layers": 3, "--vocabulary": 300, "--windows": 4, "--length": 64}
    words = [str(word) for pair in sizes.items() for word in pair]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_quantise", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    lines = done.stdout.strip().splitlines()
    assert [line.partition(":")[0] for line in lines[1:]] == ["rtn", "awq", "gptq"]
    assert all("100.0000% of the codes" in line for line in lines[1:])
