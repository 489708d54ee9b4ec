"""Client of vLLM: prompt log-probabilities and a greedy continuation of given token ids, as one line of JSON.

Run by the Python of vLLM's own environment, so it imports nothing of this project:

    .venvs/vllm/bin/python tests/engines/vllm_logprobs.py FOLDER IDS.json OUT.json [--dtype float16] [--generate 8]

IDS.json is a list of token ids. OUT.json gets ``{"engine", "logprobs", "generated", "start_seconds"}``; ``logprobs[i]`` is
ln p(ids[i+1] | ids[..i]) in nats, so it has one entry fewer than there are ids.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

# Before vLLM is imported: no network, one process, a small cache, no pinning of threads to cores (other work may run on them).
# And no compiling: vLLM compiles a small kernel for prompt log-probabilities, which takes longer than all the rest here and
# changes no number.
for name, value in {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "2",
    "TORCHDYNAMO_DISABLE": "1",
}.items():
    os.environ.setdefault(name, value)


def main() -> None:
    parser = argparse.ArgumentParser(description="prompt log-probabilities from vLLM")
    parser.add_argument("folder")
    parser.add_argument("ids", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--generate", type=int, default=8)
    options = parser.parse_args()
    ids: list[int] = json.loads(options.ids.read_text())

    begin = time.monotonic()
    import vllm
    from vllm.inputs import TokensPrompt

    engine = vllm.LLM(
        model=options.folder,
        dtype=options.dtype,
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=len(ids) + options.generate + 1,
        max_num_seqs=1,
        seed=0,
    )
    started = time.monotonic() - begin
    wanted = vllm.SamplingParams(temperature=0.0, max_tokens=options.generate, prompt_logprobs=0, detokenize=False)
    answer = engine.generate([TokensPrompt(prompt_token_ids=ids)], wanted, use_tqdm=False)[0]
    # The first token has no prediction; every later entry maps token ids to their log-probability.
    logprobs = [entry[token].logprob for entry, token in zip(answer.prompt_logprobs[1:], ids[1:], strict=True)]
    result = {
        "engine": f"vllm {vllm.__version__}",
        "logprobs": logprobs,
        "generated": list(answer.outputs[0].token_ids),
        "start_seconds": round(started, 1),
    }
    options.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
