"""vLLM on CPU reads our files: an independent check of bit order, scales, zero points and config, on the real model.

vLLM computes in float16 with its own int4 kernel, ours is float32 from the same bytes: what is left is float16 rounding.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.engines.conftest import Artefact, prompt_ids
from tests.real_artefacts import ROOT

PYTHON = Path(os.environ.get("BITLEDGER_VLLM_PYTHON", ROOT / ".venvs" / "vllm" / "bin" / "python"))
MEAN_NATS, MAX_NATS = 0.02, 0.12

pytestmark = pytest.mark.engine


@pytest.mark.skipif(not PYTHON.exists(), reason=f"no vLLM environment at {PYTHON} (make test-engines builds it)")
@pytest.mark.parametrize(
    ("method", "zero"),
    [
        ("rtn", "--symmetric"),
        ("rtn", "--full-range"),
        ("awq", "--zero-point"),
        ("rtn", "head"),
        ("smoothquant", "token"),
        ("smoothquant", "static"),
    ],
)
def test_vllm_computes_what_our_reader_computes(method: str, zero: str, artefact: Artefact, tmp_path: Path) -> None:
    import torch

    from formats.reader import load_model

    folder = artefact(method, zero)
    ids = prompt_ids(folder)
    (tmp_path / "ids.json").write_text(json.dumps(ids))
    client = [PYTHON, ROOT / "tests" / "engines" / "vllm_logprobs.py", folder, tmp_path / "ids.json", tmp_path / "out.json"]
    done = subprocess.run(client, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    answer = json.loads((tmp_path / "out.json").read_text())

    with torch.inference_mode():
        logits = load_model(folder, dtype="float32")(torch.tensor([ids])).logits[0]
    ours = torch.log_softmax(logits.double(), dim=-1)  # [256, vocabulary]
    expected = ours[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    apart = (torch.tensor(answer["logprobs"], dtype=torch.float64) - expected).abs()
    print(f"{answer['engine']}, {method} {zero}: mean {apart.mean():.4f}, max {apart.max():.4f} nats apart")
    assert apart.mean() < MEAN_NATS
    assert apart.max() < MAX_NATS
    # vLLM's first greedy token is our best one, or as good as it within the same rounding.
    assert ours[-1].max() - ours[-1, answer["generated"][0]] < MAX_NATS
