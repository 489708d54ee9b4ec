"""Every bad input of ``python -m pipelines.run``: one line, exit code 2, at once, nothing written.

At once means before torch and its like are imported, which takes seconds: in these processes importing them is an error. That
holds on a busy machine too, where a clock says little; the seconds are checked loosely and printed (pytest -rP shows them).
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from formats.checkpoint import Checkpoint
from tests.failure.damage import poke, with_mount
from tests.tiny_runs import write_text

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("torch", "transformers", "datasets", "pandas", "matplotlib", "lm_eval", "accelerate", "gguf", "compressed_tensors")
LOOSE_S = 6.0


@dataclass(frozen=True)
class Bench:
    """A working folder with a good text and a copy of a model to be damaged, and a Python that refuses heavy imports."""

    place: Path
    model: Path
    text: Path
    blocked: Path

    def environment(self) -> dict[str, str]:
        paths = f"{self.blocked}{os.pathsep}{ROOT}"
        return {**os.environ, "PYTHONPATH": paths, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(self.blocked / "home")}

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "pipelines.run", *words]

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        begin = time.monotonic()
        done = subprocess.run(
            self.command(*words), cwd=self.place, env=self.environment(), capture_output=True, text=True, timeout=60, check=False
        )
        seconds = time.monotonic() - begin
        print(f"{seconds:.2f} s: {' '.join(words)}")
        assert seconds < LOOSE_S
        return done

    def words(self, *options: str, method: str = "rtn") -> list[str]:
        """A command line that works, with ``options`` in place of its own."""
        given = {
            "--model": str(self.model), "--corpus": str(self.text), "--output": "out", "--group-size": "32", "--window": "33",
            "--evaluation-windows": "3", "--calibration-windows": "8", "--cards": "none",
        }  # fmt: skip
        return [method, *(word for name, value in given.items() if name not in options for word in (name, value)), *options]

    def tree(self) -> dict[str, tuple[int, int]]:
        """Size and time of the last change of everything in the working folder."""
        found = {str(path.relative_to(self.place)): path.lstat() for path in sorted(self.place.rglob("*"))}
        return {name: (state.st_size, state.st_mtime_ns) for name, state in found.items()}


@pytest.fixture
def bench(tiny_model: Callable[[str], Path], tmp_path: Path) -> Bench:
    place, blocked = tmp_path / "place", tmp_path / "blocked"
    place.mkdir()
    for name in HEAVY:
        (blocked / name).mkdir(parents=True)
        (blocked / name / "__init__.py").write_text(f"raise ImportError('{name} is imported before the checks')\n")
    model = Path(shutil.copytree(tiny_model("sharded"), place / "model"))
    return Bench(place, model, write_text(place), blocked)


Case = Callable[[Bench], list[str]]


def options(*words: str, method: str = "rtn") -> Case:
    return lambda bench: bench.words(*words, method=method)


def shard(bench: Bench) -> Path:
    return sorted(bench.model.glob("model-*.safetensors"))[1]


def with_text(characters: int) -> Case:
    def case(bench: Bench) -> list[str]:
        bench.text.write_text("lazy dog " * 1000 if characters < 0 else ("quick fox " * 1000)[:characters])
        return bench.words(method="awq")

    return case


def with_cut_shard(bench: Bench) -> list[str]:
    os.truncate(shard(bench), shard(bench).stat().st_size - 1000)
    return bench.words()


def without_shard(bench: Bench) -> list[str]:
    shard(bench).unlink()
    return bench.words()


def with_bogus_key(bench: Bench) -> list[str]:
    index = bench.model / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    data["weight_map"]["model.nosuch.weight"] = shard(bench).name
    index.write_text(json.dumps(data))
    return bench.words()


def with_value(name: str, number: int, value: float) -> Case:
    def case(bench: Bench) -> list[str]:
        info = Checkpoint.open(bench.model).tensors[name]
        poke(bench.model / info.file, info.start + 4 * number, value)
        return bench.words(method="awq")

    return case


def with_pickle_only(bench: Bench) -> list[str]:
    for path in bench.model.glob("model*"):
        if path.suffix in (".safetensors", ".json"):
            path.unlink()
    (bench.model / "pytorch_model.bin").write_bytes(b"PK\x03\x04 not looked into")
    return bench.words()


def with_nonempty_output(bench: Bench) -> list[str]:
    (bench.place / "full").mkdir()
    (bench.place / "full" / "thesis.txt").write_text("do not touch")
    return bench.words("--output", "full")


def with_missing_recipe(bench: Bench) -> list[str]:
    return [word for word in bench.words("--recipe", "nosuch.toml") if word not in ("--group-size", "32")]


def with_other_recipe(text: str) -> Case:
    def case(bench: Bench) -> list[str]:
        (bench.place / "r.toml").write_text(text)
        return [word for word in bench.words("--recipe", "r.toml") if word not in ("--group-size", "32")]

    return case


CASES: dict[str, tuple[Case, str]] = {
    "unknown method": (options(method="gtpq"), "no such method: 'gtpq'"),
    "misspelt method": (options(method="rnt"), "did you mean 'rtn'?"),
    "unknown model": (options("--model", "smollm2-135n"), "smollm2-135m"),
    "misspelt path": (options("--model", "./modell"), "No such folder: "),
    "absolute path": (options("--model", "/no/such/folder"), "No such folder: /no/such/folder"),
    "a file as model": (lambda bench: bench.words("--model", str(bench.text)), "is a file"),
    "bits 9": (options("--bits", "9"), "bits must be 2 to 8, got 9"),
    "bits 1": (options("--bits", "1"), "bits must be 2 to 8, got 1"),
    "bits as text": (options("--bits", "four"), "--bits"),
    "full range with a zero point": (options("--full-range", "--zero-point"), "--full-range is a kind of symmetric grid"),
    "full range with a scheme": (options("--full-range", "--scheme", "mxfp4"), "--full-range: --scheme says all of a scheme"),
    "group 0": (options("--group-size", "0"), "group size must be 1 or more"),
    "group as text": (options("--group-size", "row"), "group size must be a number, 'channel' or 'tensor'"),
    "scale type": (options("--scale-dtype", "f8"), "--scale-dtype is one of f16, bf16, f32"),
    "unknown option": (options("--bit", "4"), "--bit"),
    "no windows": (options("--evaluation-windows", "0"), "--evaluation-windows"),
    "windows of one": (options("--window", "1"), "--window"),
    "unknown card": (options("--cards", "h10"), "h10"),
    "unknown device": (options("--device", "tpu"), "--device is cpu, cuda or cuda:N"),
    "no corpus": (options("--corpus", "nosuch.txt"), "nosuch.txt"),
    "empty corpus": (with_text(0), "text.txt"),
    "too short corpus": (with_text(300), "holds 300 tokens and 352 are needed"),
    "same text twice": (with_text(-1), "13-grams of the evaluation windows"),
    "overlapping windows": (options("--calibration-start", "50", method="awq"), "tokens 50 to 314) and evaluation windows"),
    "output is the source": (options("--output", "model", "--force"), "output model is the source folder itself"),
    "output inside the source": (options("--output", "model/out"), "lies inside the source folder"),
    "output above the source": (options("--output", "."), "output . is above the source folder"),
    "output is a file": (options("--output", "text.txt"), "is a file"),
    "output is not empty": (with_nonempty_output, "is not empty"),
    "truncated shard": (with_cut_shard, "model-00002-of-00003.safetensors"),
    "missing shard": (without_shard, "lacks model-00002-of-00003.safetensors"),
    "index disagrees": (with_bogus_key, "model.nosuch.weight is in no shard"),
    "NaN": (with_value("model.layers.1.self_attn.k_proj.weight", 3 * 64 + 5, float("nan")), "has nan at index [3, 5]"),
    "infinity in the head": (with_value("lm_head.weight", 64, float("inf")), "lm_head.weight has inf at index [1, 0]"),
    "NaN in a norm": (with_value("model.norm.weight", 7, float("nan")), "model.norm.weight has nan at index [7]"),
    "pickle": (with_pickle_only, "convert to safetensors"),
    "no recipe": (with_missing_recipe, "nosuch.toml: No such file"),
    "recipe with a wrong key": (with_other_recipe('[[rule]]\nmatch = "*"\nbit = 4\n'), "rule.0.bit"),
    "recipe with an idle pattern": (with_other_recipe('[[rule]]\nmatch = "x"\n[[rule]]\nmatch = "*"\n'), "'x': no matrix"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_line_at_once_and_nothing_is_written(name: str, bench: Bench) -> None:
    case, sentence = CASES[name]
    words = case(bench)
    before = bench.tree()
    done = bench.run(*words)
    errors = [line for line in done.stderr.splitlines() if not line.startswith("check values: ")]
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert len(errors) == 1, done.stderr
    assert errors[0].startswith("error: ")
    assert sentence in errors[0]
    assert bench.tree() == before


def test_several_problems_are_told_at_once(bench: Bench) -> None:
    with_cut_shard(bench)
    done = bench.run(
        *bench.words("--cards", "h10", "--corpus", "nosuch.txt", "--system-prompt", "none.txt", "--output", "text.txt")
    )
    first, *lines = done.stderr.splitlines()
    assert done.returncode == 2
    assert first == "error: 5 problems, nothing was done:"
    for words in ("h10", "nosuch.txt", "none.txt", "output text.txt is a file", "model-00002-of-00003.safetensors"):
        assert len([line for line in lines if words in line]) == 1, words


def test_every_matrix_that_does_not_fit_is_listed(bench: Bench) -> None:
    done = bench.run(*bench.words("--group-size", "48"))
    first, *lines = done.stderr.splitlines()
    assert done.returncode == 2
    assert first.startswith("error: 14 matrices cannot be stored as asked")
    assert len(lines) == 14


def test_a_hub_that_does_not_answer_is_told_within_five_seconds(bench: Bench) -> None:
    begin = time.monotonic()
    done = bench.run(*bench.words("--model", "nobody/nothing"))
    assert time.monotonic() - begin < 5
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "nobody/nothing" in done.stderr


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_no_space_left(dry: list[str], bench: Bench) -> None:
    before = bench.tree()
    place = bench.place / "small"
    run = shlex.join(bench.command(*bench.words("--output", str(place / "out"), *dry)))
    script = f"PYTHONPATH={bench.environment()['PYTHONPATH']} {run} 2>&1; echo exit code $?; ls -A {place}"
    shown = with_mount(place, ["-t", "tmpfs", "-o", "size=64k", "tmpfs"], ["sh", "-c", script]).splitlines()
    assert len(shown) == 2, shown
    assert shown[0].startswith(f"error: output {place / 'out'} needs ")
    assert f"GB but {place} has 0.000066 GB free" in shown[0]
    assert shown[1] == "exit code 2"
    (bench.place / "small").rmdir()
    assert bench.tree() == before


def test_help_needs_nothing_heavy(bench: Bench) -> None:
    done = bench.run("--help")
    assert done.returncode == 0
    for option in ("--bits", "--group-size", "--zero-point", "--corpus", "--cards", "--dry-run", "--force"):
        assert option in done.stdout


def test_a_dry_run_needs_nothing_heavy_and_writes_nothing(bench: Bench) -> None:
    before = bench.tree()
    done = bench.run(*bench.words("--dry-run", method="awq"))
    assert done.returncode == 0, done.stderr
    assert "no problems found; nothing was written" in done.stdout
    assert bench.tree() == before
