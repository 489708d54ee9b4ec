"""Whole runs of the real command on tiny models, in this process: arguments, checks, job, summary; and the sum of the bytes."""

from __future__ import annotations

import random
import string
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

from formats.checkpoint import read_header
from formats.manifest import Manifest

MATRIX_PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape")
WINDOW = 33
DEFAULTS = {
    "--group-size": "32",
    "--window": str(WINDOW),
    "--evaluation-windows": "3",
    "--calibration-windows": "8",
    "--cards": "none",
}


def write_text(folder: Path, characters: int = 4000) -> Path:
    """A text file of random words; the tiny tokenizer makes one token of each character."""
    letters = random.Random(0).choices(string.ascii_lowercase + "   ", k=characters - 1)
    path = folder / "text.txt"
    path.write_text("".join(letters) + "\n")
    return path


def run(
    method: str, model: Path, output: Path, text: Path, *options: str, without: tuple[str, ...] = (), picture: bool = False
) -> Manifest:
    """``python -m pipelines.run`` with small defaults; ``options`` override them, ``without`` leaves some out.

    Without ``picture`` an empty file stands in for the report's picture: drawing it takes half of the time of a tiny run.
    """
    from typer.main import get_command

    import pipelines.job
    from pipelines.run import app

    given = {"--model": str(model), "--output": str(output), "--corpus": str(text), **DEFAULTS}
    words = [word for name, value in given.items() if name not in (*options, *without) for word in (name, value)]
    command: Any = get_command(app)
    with nullcontext() if picture else patch.object(pipelines.job, "run_plot", lambda manifest, rows: b""):
        command.main(args=[method, *words, *options], standalone_mode=False)
    return Manifest.load(output / "manifest.json")


def weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def check_ledger(folder: Path, manifest: Manifest) -> None:
    """Every line sums to its file's size, and its parts are those of the file's own header."""
    lines = {line.file: line for line in manifest.ledger}
    assert sorted(lines) == [path.name for path in weight_files(folder)]
    for path in weight_files(folder):
        line, size = lines[path.name], path.stat().st_size
        tensors, metadata, header_bytes = read_header(path, path.name)
        by_suffix = dict.fromkeys((*MATRIX_PARTS, "weight_global_scale", "kept"), 0)
        for name, info in tensors.items():
            suffix = "weight_packed" if info.dtype == "I8" and name.endswith(".weight") else name.rpartition(".")[2]
            by_suffix[suffix if suffix in by_suffix else "kept"] += info.nbytes
        assert line.total_bytes == size == header_bytes + sum(by_suffix.values())
        scales = by_suffix["weight_scale"] + by_suffix["weight_global_scale"]
        assert (line.codes_bytes, line.scales_bytes) == (by_suffix["weight_packed"], scales)
        assert (line.zeros_bytes, line.shape_bytes) == (by_suffix["weight_zero_point"], by_suffix["weight_shape"])
        assert (line.kept_bytes, line.header_bytes) == (by_suffix["kept"], header_bytes)
        assert metadata["format"] == "pt"
        assert list(metadata) == sorted(metadata)
        assert int(metadata["bitledger.codes_bytes"]) == sum(each.codes_bytes for each in manifest.ledger)
    total = sum(line.codes_bytes + line.scales_bytes + line.zeros_bytes for line in manifest.ledger)
    bits = manifest.bits_per_weight
    assert bits.quantised == 8 * total / bits.quantised_elements
    assert bits.whole_file == 8 * sum(path.stat().st_size for path in weight_files(folder)) / bits.all_elements
