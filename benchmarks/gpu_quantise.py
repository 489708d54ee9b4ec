"""Quantise a randomly initialised 1B Llama on a GPU with rtn, awq and gptq, check codes against the CPU's, and print times.

Made to end in under 8 minutes. The checkpoint is written once into a temporary folder; every method streams it through the real
driver into packed files. The CPU repeats two blocks of each method on the same calibration tokens: the share of equal codes is
printed, and less than 99 % of them is an error (sums in another order move a few weights that lie between two codes).
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch

from calib.blockwise import BlockwiseDriver
from calib.methods import get_method
from calib.quantise import Quantised, TensorSink, quantise_without_data
from formats.checkpoint import Checkpoint
from formats.engine_config import quantization_config
from formats.fates import Keep, Quantise, Rule, TensorPlan
from formats.planning import plan_fates
from formats.reader import Artefact
from formats.skeleton import Skeleton
from formats.writer import ShardedWriter
from quant.scheme import Scheme

METHODS = ("rtn", "awq", "gptq")
CHECKED_BLOCKS = 2
LEAST_EQUAL = 0.99


def make_model(folder: Path, hidden: int, layers: int, vocabulary: int) -> None:
    """A Llama of about 1.2 billion random parameters at the default sizes, stored as bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = max(hidden // 64, 1)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 4, 1),
        head_dim=64,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)


def quantise(source: Checkpoint, output: Path, method: str, rules: tuple[Rule, ...], ids: torch.Tensor, device: str) -> float:
    """Write the packed files of ``source`` into ``output``; the seconds that it took."""
    plans = plan_fates(source, rules)
    result = Quantised()
    output.mkdir(parents=True)
    begin = time.perf_counter()
    with ShardedWriter(output, [plan.stored for plan in plans], {"format": "pt"}) as writer:
        sink = TensorSink(writer, result, plans)
        if get_method(method).needs_calibration:
            driver = BlockwiseDriver(
                source, plans, sink, result, Skeleton(source.folder), method=get_method(method), device=device, clip=True
            )
            driver.run(ids, 4, lambda done, total: None)
        else:
            quantise_without_data(source, plans, sink, lambda done, total: None)
        writer.finish()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    write_config(source, output, plans)
    return seconds


def write_config(source: Checkpoint, output: Path, plans: tuple[TensorPlan, ...]) -> None:
    import json

    config = source.plain_config() | {"quantization_config": quantization_config(plans)}
    (output / "config.json").write_text(json.dumps(config))


def equal_codes(one: Path, two: Path) -> float:
    """Share of equal codes over the matrices that both folders hold quantised."""
    first, second = Artefact(one), Artefact(two)
    shared = sorted(set(first.modules()) & set(second.modules()))
    pairs = [(first.qtensor(module).codes, second.qtensor(module).codes) for module in shared]
    return sum(int((a == b).sum()) for a, b in pairs) / sum(a.numel() for a, _ in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda; cpu only shows that the script runs")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    options = parser.parse_args()
    if options.device != "cpu" and not torch.cuda.is_available():
        print("torch sees no CUDA device here: run this where there is one", file=sys.stderr)
        return 2
    scheme = Scheme.parse("int4-sym-g64-bf16")
    folder = Path(tempfile.mkdtemp(prefix="bitledger-gpu-"))
    failed = False
    try:
        make_model(folder / "model", options.hidden, options.layers, options.vocabulary)
        source = Checkpoint.open(folder / "model")
        print(f"model: {sum(info.elements for info in source.tensors.values()):,} parameters, device {options.device}")
        ids = torch.randint(0, options.vocabulary, (options.windows, options.length), generator=torch.Generator().manual_seed(1))
        first = re_blocks(CHECKED_BLOCKS)
        for method in METHODS:
            fate = Quantise(scheme, get_method(method).quantizer)
            seconds = quantise(source, folder / method, method, (Rule("*", fate),), ids, options.device)
            rules = (Rule(first, fate), Rule("*", Keep("checked on the first blocks only")))
            few = ids[:4]
            quantise(source, folder / f"{method}-device", method, rules, few, options.device)
            quantise(source, folder / f"{method}-cpu", method, rules, few, "cpu")
            share = equal_codes(folder / f"{method}-device", folder / f"{method}-cpu")
            failed |= share < LEAST_EQUAL
            print(f"{method}: {seconds:.1f} s, {share:.4%} of the codes of {CHECKED_BLOCKS} blocks equal the CPU's", flush=True)
            for name in (method, f"{method}-device", f"{method}-cpu"):
                shutil.rmtree(folder / name)
    finally:
        shutil.rmtree(folder)
    return int(failed)


def re_blocks(count: int) -> str:
    """Pattern of the modules of the first ``count`` blocks."""
    return rf"re:model\.layers\.({'|'.join(map(str, range(count)))})\..*"


if __name__ == "__main__":
    raise SystemExit(main())
