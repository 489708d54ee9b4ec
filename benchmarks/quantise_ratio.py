"""Wall time of methods over one float forward pass of the calibration tokens, in one run, and their peak memory.

Each command runs in a process of its own, imports, reading, hashing and writing included, evaluation not. The forward pass
(decoder only, float32, the same batches) is timed before, between and after, and its median is the denominator, so that a
machine whose speed drifts hurts both alike. Aims: rtn and the number formats at most 1.5, smoothquant 4, awq 6, gptq 7,
awq+gptq 10.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

AIMS = {"rtn": 1.5, "mxfp4": 1.5, "mxfp8": 1.5, "nvfp4": 1.5, "smoothquant": 4.0, "awq": 6.0, "gptq": 7.0, "awq+gptq": 10.0}
_EVALUATION = ("evaluate float", "evaluate artefact")


def forward_seconds(model: str, corpus: str, count: int, length: int, batch: int) -> float:
    """Seconds of one float32 pass of ``count`` calibration windows through the decoder."""
    import torch

    from calib.corpora import load_corpus
    from calib.tokenizer import TextTokenizer
    from calib.windows import calibration_windows, tokenise
    from formats.reader import load_model
    from formats.sources import resolve

    source = resolve(model)
    tokens = tokenise(load_corpus(corpus), TextTokenizer.from_folder(source.folder))
    ids = torch.from_numpy(calibration_windows(tokens, count=count, length=length).ids.copy())
    decoder = load_model(source.folder).get_decoder()
    with torch.inference_mode():
        decoder(ids[:1], use_cache=False)
        begin = time.perf_counter()
        for chunk in torch.split(ids, batch):
            decoder(chunk, use_cache=False)
    return time.perf_counter() - begin


def timed_forward(arguments: list[str]) -> float:
    done = subprocess.run(
        [sys.executable, "-m", __spec__.name, "--forward", *arguments], capture_output=True, text=True, check=True
    )
    return float(done.stdout.strip().splitlines()[-1])


def timed_run(method: str, model: str, corpus: str, count: int, length: int, batch: int) -> tuple[float, dict[str, Any]]:
    """(seconds without evaluation, manifest) of one run in its own process."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "pipelines.run",
            method,
            "--model",
            model,
            "--corpus",
            corpus,
            "--json",
            "--cards",
            "none",
        ]
        command += [
            "--calibration-windows",
            str(count),
            "--window",
            str(length),
            "--batch",
            str(batch),
            "--evaluation-windows",
            "1",
        ]
        begin = time.perf_counter()
        done = subprocess.run([*command, "--output", str(Path(folder) / "out")], stdout=subprocess.PIPE, text=True, check=True)
        wall = time.perf_counter() - begin
    manifest: dict[str, Any] = json.loads(done.stdout)
    return wall - sum(manifest["run"]["seconds"][stage] for stage in _EVALUATION), manifest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct-q4_1")
    parser.add_argument("--corpus", default="pydoc")
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--methods", nargs="+", choices=AIMS, default=list(AIMS))
    parser.add_argument("--forward", action="store_true", help="only time one forward pass and print its seconds")
    options = parser.parse_args()
    if options.forward:
        print(forward_seconds(options.model, options.corpus, options.windows, options.length, options.batch))
        return
    shared = [
        "--model",
        options.model,
        "--corpus",
        options.corpus,
        "--windows",
        str(options.windows),
        "--length",
        str(options.length),
    ]
    shared += ["--batch", str(options.batch)]
    forwards = [timed_forward(shared)]
    runs = {}
    for method in options.methods:
        runs[method] = timed_run(method, options.model, options.corpus, options.windows, options.length, options.batch)
        forwards.append(timed_forward(shared))
    unit = statistics.median(forwards)
    times = ", ".join(f"{seconds:.1f}" for seconds in forwards)
    print(f"float forward pass of {options.windows} x {options.length} tokens: {times} s, median {unit:.1f} s")
    for method, (seconds, manifest) in runs.items():
        size = sum(file["nbytes"] for file in manifest["source"]["files"] if file["name"].endswith(".safetensors"))
        peak, quantising = manifest["run"]["peak_rss_bytes"], manifest["run"]["quantise_peak_rss_bytes"]
        print(
            f"{method}: {seconds:.1f} s = {seconds / unit:.2f} forward passes (aim {AIMS[method]}); peak memory "
            f"{quantising / 1e9:.2f} GB while quantising, {peak / 1e9:.2f} GB with evaluation, checkpoint {size / 1e9:.2f} GB"
        )


if __name__ == "__main__":
    main()
