"""Arrows between packages go one way, and nothing heavy is imported before a command's checks."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.cli import find_commands

ROOT = Path(__file__).resolve().parents[1]
ORDER = ("quant", "formats", "calib", "eval", "pipelines")
ABOVE = {package: {*ORDER[place + 1 :], "tests", "benchmarks"} for place, package in enumerate(ORDER)}
HEAVY = {"torch", "transformers", "datasets", "pandas", "pyarrow", "matplotlib", "lm_eval", "gguf", "accelerate"}
COMMANDS = ["pipelines.cli", *(f"pipelines.{name.replace('-', '_')}" for name in find_commands())]


def imports(path: Path) -> set[str]:
    """Top-level names of everything that the file imports anywhere, also inside functions."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return {name.split(".")[0] for name in plain | {node.module or "." for node in nodes if isinstance(node, ast.ImportFrom)}}


@pytest.mark.parametrize("package", ORDER)
def test_no_package_imports_one_above_it(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    arrows = {str(file.relative_to(ROOT)): sorted(imports(file) & ABOVE[package]) for file in files}
    assert {file: above for file, above in arrows.items() if above} == {}


@pytest.mark.parametrize("module", COMMANDS)
def test_a_command_is_imported_without_anything_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == [], f"import these inside functions: python -X importtime -c 'import {module}' shows who does"
