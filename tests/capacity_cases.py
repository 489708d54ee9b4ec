"""Model configs and cards that several capacity tests share."""

from __future__ import annotations

from datetime import date
from typing import Any

from eval.capacity.cards import Card, Figure, Price
from eval.capacity.model_shape import ModelShape

CASE = ModelShape(36, 4096, 32, 8, 128, 15360, 152064, tied=False)
CASE_BYTES = 5_500_000_000
LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
SMOLLM2_135M = {
    **LLAMA_8B,
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
SMOLLM2_360M = {
    **SMOLLM2_135M,
    "num_hidden_layers": 32,
    "hidden_size": 960,
    "num_attention_heads": 15,
    "num_key_value_heads": 5,
    "intermediate_size": 2560,
}
QWEN2_05B = {
    **LLAMA_8B,
    "model_type": "qwen2",
    "num_hidden_layers": 24,
    "hidden_size": 896,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
LLAMA_70B = {**LLAMA_8B, "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64, "intermediate_size": 28672}


def make_card(
    memory_gb: float | None = 24, tb_per_s: float = 1.0, bf16_tflops: float | None = 165, price: Price | None = None
) -> Card:
    def figure(value: float) -> Figure:
        return Figure(value, ("own",), date(2026, 10, 5))

    return Card(
        slug="card",
        name="Card",
        bandwidth=figure(tb_per_s * 1e12),
        memory_label=None if memory_gb is None else figure(memory_gb),
        memory_reported=None,
        dense_tflops={} if bf16_tflops is None else {"bf16": figure(bf16_tflops)},
        fp16_accumulate_tflops={},
        tdp_w=None,
        price=price,
        compute_capability=None,
        native_formats=(),
        official="",
        sources=(),
        notes="",
    )


DOLLAR = Price(1.0, "USD", ("seed",), date(2026, 10, 5), assumed=True)
REFERENCE = make_card(price=DOLLAR)


def known(value: float | None) -> float:
    assert value is not None
    return value
