"""One decoder block of a tiny model, loaded and traced: many architectures, with the weights that make folding hard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from calib.capture import BlockInputs, BlockRunner
from calib.fold import fold_verified
from calib.graph import FeedGroup, trace_groups
from formats.checkpoint import Checkpoint
from formats.skeleton import Skeleton
from quant.quantizer import Note
from tests.conftest import QWEN2, SIZES

GEMMA = {**SIZES, "sliding_window": 32, "query_pre_attn_scalar": 16}
PHI3 = {**QWEN2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
OPT = {
    "vocab_size": 256, "hidden_size": 64, "ffn_dim": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128, "word_embed_proj_dim": 64,
}  # fmt: skip


def _random_norms(model: Any) -> None:
    """Norm weights as trained ones are: anywhere around 1 (or around 0, where the norm adds 1 itself)."""
    for name, parameter in model.named_parameters():
        if "norm" in name and name.endswith("weight"):
            parameter.mul_(torch.empty_like(parameter).uniform_(0.5, 2)).add_(torch.empty_like(parameter).uniform_(-0.3, 0.3))


def _biases(value: float | None) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        _random_norms(model)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.fill_(value) if value is not None else parameter.normal_()

    return change


def _dead_norm_channels(model: Any) -> None:
    _random_norms(model)
    for layer in model.model.layers:
        layer.input_layernorm.weight[[3, 40]] = 0.0


# name -> (transformers class prefix, arguments, dtype of the file, what is changed after the random initialisation)
VARIANTS: dict[str, tuple[str, dict[str, Any], str, Callable[[Any], None]]] = {
    "llama": ("Llama", SIZES, "float32", _random_norms),
    "llama, equal heads": ("Llama", {**SIZES, "num_key_value_heads": 4}, "float32", _random_norms),
    "llama, one kv head": ("Llama", {**SIZES, "num_key_value_heads": 1}, "float32", _random_norms),
    "llama, dead norm channels": ("Llama", SIZES, "float32", _dead_norm_channels),
    "llama, bfloat16": ("Llama", SIZES, "bfloat16", _random_norms),
    "qwen2, biases 5": ("Qwen2", QWEN2, "float32", _biases(5.0)),
    "qwen2, bfloat16": ("Qwen2", QWEN2, "bfloat16", _biases(None)),
    "gemma2": ("Gemma2", GEMMA, "float32", _random_norms),
    "gemma2, weights 0": ("Gemma2", GEMMA, "float32", lambda model: None),
    "gemma2, bfloat16": ("Gemma2", GEMMA, "bfloat16", _random_norms),
    "opt": ("OPT", OPT, "float32", _biases(None)),
    "phi3": ("Phi3", PHI3, "float32", _random_norms),
    "olmo2": ("Olmo2", QWEN2, "float32", _random_norms),
}
FOLDING = [name for name in VARIANTS if name not in ("phi3", "olmo2")]
IDS = torch.randint(0, 256, (3, 40), generator=torch.Generator().manual_seed(1))


@dataclass(frozen=True)
class Traced:
    """Block 0 of a model, loaded, with the hidden states that go into it and the groups found in it."""

    folder: Path
    runner: BlockRunner
    inputs: BlockInputs
    groups: tuple[FeedGroup, ...]
    weights: dict[str, Tensor]
    dtypes: dict[str, torch.dtype]
    prefix: str

    def apply(self, changed: Mapping[str, Tensor]) -> None:
        for name, value in changed.items():
            self.runner.skeleton.set(self.prefix + name, value)

    def output(self) -> Tensor:
        return self.runner.forward(0, self.inputs.sample(128), self.inputs)

    def fold(self, group: FeedGroup, factors: Tensor) -> tuple[Tensor | None, list[Note]]:
        with torch.no_grad():
            return fold_verified(self.weights, group, factors, self.dtypes, self.apply, self.output, "block 0")

    @classmethod
    def load(cls, folder: Path) -> Traced:
        skeleton, checkpoint = Skeleton(folder), Checkpoint.open(folder)
        runner = BlockRunner(skeleton, checkpoint.tensor)
        inputs = runner.start(IDS, 2)
        names, prefix = runner.block_parameters(0), f"{skeleton.blocks_name}.0."
        runner.load(names)
        groups = trace_groups(runner.block(0), lambda: runner.forward(0, inputs.sample(128), inputs))
        weights = {name.removeprefix(prefix): skeleton.get(name).data for name in names}
        dtypes = {name.removeprefix(prefix): checkpoint.tensor(name).dtype for name in names}
        return cls(folder, runner, inputs, groups, weights, dtypes, prefix)


def save_variant(name: str, folder: Path) -> Path:
    """The model ``name`` of ``VARIANTS`` as transformers saves it."""
    import transformers

    prefix, arguments, dtype, change = VARIANTS[name]
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}ForCausalLM")(getattr(transformers, f"{prefix}Config")(**arguments))
    with torch.no_grad():
        change(model)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder
