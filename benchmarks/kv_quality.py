"""What a quantised cache costs: perplexity and KL with the cache in the loop at every position, written into ``docs/kvcache.md``.

Every format is measured on the same windows of 512 tokens and on windows of 4,096. Static scales are calibrated on other text.
No figure is typed by hand.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

from quant.kvscheme import KvScheme

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "kvcache.md"
FORMATS = ("int8", "int8-token", "int8-static", "fp8", "int4", "int4-channel")
LENGTHS = {512: 8, 4096: 2}
CALIBRATION = (32, 512, 200_000)


def rows(model: Any, tokens: Any, report: Any) -> list[dict[str, Any]]:
    """One row per format and window length. The float model runs once per window, its logits are kept for all formats."""
    import torch

    from calib.windows import evaluation_windows
    from eval.kv_quality import divergence_sums, loss_sums
    from eval.kvcache import WithCache, calibrate

    count, length, start = CALIBRATION
    ids = torch.from_numpy(tokens.ids[start : start + count * length].reshape(count, length).copy())
    evidence = calibrate(model, ids, batch=4)
    schemes = {name: KvScheme.parse(name) for name in FORMATS}
    cached = {name: WithCache(model, s, evidence.scales(s) if s.static else None) for name, s in schemes.items()}
    found = []
    for length, count in LENGTHS.items():
        windows = evaluation_windows(tokens, count=count, length=length, bos="none")
        sums: dict[str, np.ndarray] = {name: np.zeros(5) for name in FORMATS}  # nats, float nats, scored, KL, same best token
        for row in torch.from_numpy(windows.ids.copy()):
            with torch.inference_mode():
                plain = model(row[None], use_cache=False).logits[0]
                before, scored, _ = loss_sums(plain, row, 1)
                for name in FORMATS:
                    logits = cached[name](row[None]).logits[0]
                    nats, agreeing, _, _ = divergence_sums(plain, logits)
                    sums[name] += (loss_sums(logits, row, 1)[0], before, scored, nats, agreeing)
        for name, (after, before, scored, nats, agreeing) in sums.items():
            positions = count * length
            found.append(_row(model, name, length, count, math.exp(before / scored), math.exp(after / scored)))
            found[-1] |= {"kl_nats": nats / positions, "top1": agreeing / positions}
            report(found[-1])
    return found


def _row(model: Any, name: str, length: int, count: int, before: float, after: float) -> dict[str, Any]:
    config, scheme = model.config.get_text_config(), KvScheme.parse(name)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        "format": name,
        "scheme": str(scheme),
        "length": length,
        "windows": count,
        "bytes_per_token": scheme.bytes_per_token(config.num_hidden_layers, config.num_key_value_heads, head_dim),
        "perplexity_float": before,
        "perplexity": after,
    }


def page(model: str, found: list[dict[str, Any]]) -> str:
    lines = [
        "# Quality of a quantised cache",
        "",
        "This page is written by `make bench-kv`; nothing on it is typed by hand. Model "
        f"`{model}` in float with a quantised cache in the",
        "loop at every position, on the first windows of WikiText-2's raw test split. Static scales are calibrated on "
        f"{CALIBRATION[0]} x {CALIBRATION[1]} tokens",
        f"from token {CALIBRATION[2]:,}, at positions spread over the model's whole context: keys are cached after their",
        "rotation, so that the range of a channel depends on the position. Bytes per token count the codes and the scales that",
        "come with a token, over all layers.",
        "",
        "In an artefact (`run --kv-cache`) fp8 scales are weights named `k_scale` and `v_scale`, which vLLM and SGLang read. No",
        "engine reads any other format from a checkpoint: these stand under `bitledger_kv_cache` in `config.json`, with their",
        "scales in `kv_cache/scales.safetensors`, so that the weights load everywhere as they would without.",
        "",
        "| format | scheme | context | bytes per token | perplexity | against float | KL | top-1 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in found:
        change = r["perplexity"] / r["perplexity_float"] - 1
        lines.append(
            f"| `{r['format']}` | `{r['scheme']}` | {r['windows']} x {r['length']:,} | {r['bytes_per_token']:,} | "
            f"{r['perplexity']:.4f} (float {r['perplexity_float']:.4f}) | {change:+.3%} | {r['kl_nats']:.6f} | {r['top1']:.4f} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct-q4_1")
    parser.add_argument("--corpus", default="wikitext2", help="wikitext2, or a file of WikiText-2's raw test split")
    options = parser.parse_args()

    from calib.corpora import load_corpus
    from calib.tokenizer import TextTokenizer
    from calib.windows import tokenise
    from formats.reader import load_model
    from formats.sources import resolve

    source = resolve(options.model)
    tokens = tokenise(load_corpus(options.corpus), TextTokenizer.from_folder(source.folder))
    found = rows(load_model(source.folder), tokens, lambda row: print(row, file=sys.stderr, flush=True))
    PAGE.write_text(page(options.model, found), "utf-8")
    print(PAGE.read_text("utf-8"))


if __name__ == "__main__":
    main()
