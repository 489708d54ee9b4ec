"""Quality at equal bits: every method on the same calibration and evaluation windows, as one table in ``docs/quality.md``.

Each row of ``quality.toml`` is one run of the real command in a process of its own; its artefact is read back from its files and
its KL(float || quantised) measured on windows that no run has seen. What was measured is kept in a JSON file, so that one row
can be measured again (``--only``) and the page written from all. No figure is typed by hand.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from formats.manifest import Manifest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "quality.md"
EVALUATION = ("evaluate float", "evaluate artefact")


def run_row(bench: dict[str, Any], row: dict[str, Any], corpus: str, folder: Path) -> Manifest:
    """Quantise as the row says into ``folder``; progress goes to standard error."""
    command = [sys.executable, "-m", "pipelines.run", *row["command"]]
    options = {
        "--model": bench["model"],
        "--corpus": corpus,
        "--window": bench["window"],
        "--calibration-windows": bench["calibration_windows"],
        "--calibration-start": bench["calibration_start"],
        "--evaluation-windows": bench["evaluation_windows"],
        "--cards": "none",
        "--output": folder,
    }
    command += [str(word) for pair in options.items() for word in pair]
    subprocess.run([*command, "--force", "--json"], check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    return Manifest.load(folder / "manifest.json")


def measure(bench: dict[str, Any], corpus: str, folder: Path) -> tuple[float, float]:
    """(mean KL in nats, share of equal best tokens) of the artefact in ``folder`` against its float model."""
    from calib.corpora import load_corpus
    from calib.tokenizer import TextTokenizer
    from calib.windows import evaluation_windows, tokenise
    from eval.divergence import window_divergence
    from formats.reader import load_model
    from formats.sources import resolve

    source = resolve(bench["model"])
    start, count, length = bench["divergence_start"], bench["divergence_windows"], bench["window"]
    tokens = tokenise(load_corpus(corpus), TextTokenizer.from_folder(source.folder), at_least=start + count * length)
    windows = evaluation_windows(tokens, count=count, length=length, start=start, bos="none")
    found = window_divergence(load_model(source.folder), load_model(folder), windows)
    return found.mean_nats, found.top1


def result(row: dict[str, Any], manifest: Manifest, divergence: float, top1: float) -> dict[str, Any]:
    values = {found.name: found.value for found in manifest.measurements}
    seconds = sum(spent for stage, spent in manifest.run.seconds.items() if stage not in EVALUATION)
    return {
        "label": row["label"],
        "command": row["command"],
        "bits_per_weight": manifest.bits_per_weight.quantised,
        "perplexity_float": values["perplexity_float"],
        "perplexity": values["perplexity"],
        "kl_nats": divergence,
        "top1": top1,
        "quantise_seconds": seconds,
        "quantise_peak_rss_bytes": manifest.run.quantise_peak_rss_bytes,
        "weights": {file.name: file.sha256 for file in manifest.files if file.role == "weights"},
    }


def introduction(bench: dict[str, Any]) -> list[str]:
    length = bench["window"]
    return [
        f"Model `{bench['model']}`, all matrices of the decoder blocks quantised, embedding and head in float.",
        f"Text: WikiText-2's raw test split. Calibration: {bench['calibration_windows']} x {length} tokens from token",
        f"{bench['calibration_start']:,}. Perplexity: the first {bench['evaluation_windows']} x {length} tokens.",
        "KL is the mean of KL(float || quantised) in nats and top-1 the share of equal best tokens, both over",
        f"{bench['divergence_windows']} x {length} tokens from token {bench['divergence_start']:,}.",
        "Bits per weight are as stored: codes, scales and zero points.",
        "Seconds are those of reading, calibrating, quantising and writing, without evaluation.",
        "",
        "The weights of this model come from a Q4_1 file: they lie on a block-32 affine grid of 4 bits, so that schemes like it",
        "look better here than on other models.",
        "",
    ]


def page(bench: dict[str, Any], results: list[dict[str, Any]]) -> str:
    """The page as Markdown."""
    import torch
    import transformers

    lines = [
        "# Quality at equal bits",
        "",
        "This page is written by `make bench-quality`; nothing on it is typed by hand.",
        "",
        *introduction(bench),
        "| method | bits per weight | perplexity | KL | top-1 | seconds | peak GB |",
        "|---|---|---|---|---|---|---|",
        f"| float | 32 | {results[0]['perplexity_float']:.4f} | 0 | 1 | | |",
    ]
    lines += [
        f"| {r['label']} | {r['bits_per_weight']:.3f} | {r['perplexity']:.3f} | {r['kl_nats']:.4f} | {r['top1']:.3f} "
        f"| {r['quantise_seconds']:.0f} | {r['quantise_peak_rss_bytes'] / 1e9:.2f} |"
        for r in results
    ]
    lines += ["", "Commands (`python -m pipelines.run ...`) and the first of each artefact's weight files:", ""]
    lines += [f"* {r['label']}: `{' '.join(r['command'])}`, SHA-256 `{next(iter(r['weights'].values()))[:16]}`" for r in results]
    machine = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    lines += ["", f"Measured on {machine}, transformers {transformers.__version__}.", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", help="wikitext2, or a file of WikiText-2's raw test split")
    parser.add_argument("--only", help="measure only rows whose label contains this")
    parser.add_argument("--again", action="store_true", help="measure rows again that are already in the results")
    parser.add_argument("--results", type=Path, default=ROOT / "artifacts" / "quality" / "results.json")
    options = parser.parse_args()
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    bench, rows = table["bench"], table["row"]
    corpus = options.corpus or bench["corpus"]
    known = json.loads(options.results.read_text("utf-8")) if options.results.is_file() else {}
    for row in rows:
        wanted = options.only is None or options.only in row["label"]
        if not wanted or (row["label"] in known and known[row["label"]]["command"] == row["command"] and not options.again):
            continue
        print(f"row: {row['label']}", file=sys.stderr, flush=True)
        folder = options.results.parent / "artefact"
        manifest = run_row(bench, row, corpus, folder)
        known[row["label"]] = result(row, manifest, *measure(bench, corpus, folder))
        options.results.parent.mkdir(parents=True, exist_ok=True)
        options.results.write_text(json.dumps(known, indent=1), "utf-8")
    measured = [known[row["label"]] for row in rows if row["label"] in known]
    if measured:
        PAGE.write_text(page(bench, measured), "utf-8")
        print(PAGE.read_text("utf-8"))


if __name__ == "__main__":
    main()
