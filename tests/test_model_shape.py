"""Parameter and cache counts: reported cases, and transformers' own models as the oracle."""

from __future__ import annotations

from typing import Any

import pytest

from eval.capacity.bounds import prefill_flops
from eval.capacity.implications import implications
from eval.capacity.model_shape import FAMILIES, ModelShape
from quant.errors import SourceError
from tests.capacity_cases import CASE_BYTES, LLAMA_8B, LLAMA_70B, QWEN2_05B, REFERENCE


def test_r82_grouped_queries_share_the_cache() -> None:
    shape = ModelShape.from_config({**LLAMA_8B, "head_dim": 128})
    assert shape.kv_bytes_per_token() == 131_072
    assert shape.kv_bytes_per_token() * 8192 == 2**30


def test_r86_a_tied_table_counts_once_and_an_engine_copy_is_resident_only() -> None:
    tied = ModelShape.from_config(QWEN2_05B)
    untied = ModelShape.from_config({**QWEN2_05B, "tie_word_embeddings": False})
    assert (tied.n_params(), untied.n_params() - tied.n_params()) == (494_032_768, 136_134_656)
    assert f"{2 * 136_134_656 / 2**20:.1f}" == "259.7"
    assert tied.n_matmul() == untied.n_matmul() == tied.n_params()
    assert tied.resident_params() == tied.n_params()
    assert tied.resident_params(copies_tied_head=True) == untied.n_params()
    assert untied.resident_params(copies_tied_head=True) == untied.n_params()
    item = implications(
        tied,
        REFERENCE,
        weight_bytes=tied.uniform_weight_bytes(),
        resident_bytes=2 * tied.resident_params(copies_tied_head=True),
    )
    record = item.record()
    assert record["weight_resident_bytes"] - record["weight_file_bytes"] == 272_269_312
    assert item.free_bytes == 24_000_000_000 - 2_500_000_000 - 2 * untied.n_params()


def test_r87_size_does_not_depend_on_the_dtype_field() -> None:
    for fields in ({}, {"torch_dtype": "bfloat16"}, {"torch_dtype": "float32"}, {"dtype": "int8"}):
        shape = ModelShape.from_config({**LLAMA_70B, **fields})
        assert shape.n_params() == 70_553_706_496
        nbytes = shape.uniform_weight_bytes(16)
        assert (f"{nbytes / 1e9:.1f}", f"{nbytes / 2**30:.1f}") == ("141.1", "131.4")
        assert shape.uniform_weight_bytes(4) == 35_276_853_248


SWITCHES: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in FAMILIES),
    *((family, {"tie_word_embeddings": tied}) for family in ("llama", "gemma") for tied in (False, True)),
    *((family, {"attention_bias": True}) for family in ("llama", "qwen3", "gemma")),
    *((family, {"mlp_bias": True}) for family in ("llama", "granite")),
]


@pytest.mark.parametrize("family, extra", SWITCHES)
def test_parameters_equal_those_of_the_real_model(family: str, extra: dict[str, Any]) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 32, "intermediate_size": 96, "vocab_size": 128}
    config = AutoConfig.for_model(family, **sizes, **extra, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = ModelShape.from_config({"model_type": family, **sizes, **extra})
    assert shape.n_params() == sum(parameter.numel() for parameter in model.parameters())
    assert shape.notes == ()


def test_explicit_head_dim_is_used_and_unknown_keys_are_ignored() -> None:
    plain = ModelShape.from_config(LLAMA_8B)
    wide = ModelShape.from_config({**LLAMA_8B, "head_dim": 256, "some_new_key": {"a": 1}})
    assert (plain.head_dim, wide.head_dim) == (128, 256)
    assert wide.kv_bytes_per_token() == 2 * plain.kv_bytes_per_token()
    extra_attention = prefill_flops(wide, 100) - prefill_flops(plain, 100) - 2 * 100 * (wide.n_matmul() - plain.n_matmul())
    assert extra_attention == 2 * 32 * 4096 * 100**2


def test_without_kv_heads_every_query_head_has_its_own() -> None:
    config = {key: value for key, value in LLAMA_8B.items() if key != "num_key_value_heads"}
    assert ModelShape.from_config(config).kv_heads == 32


def test_the_tensors_overrule_the_config_on_tying() -> None:
    assert ModelShape.from_config(QWEN2_05B, tied=False).tied is False
    assert ModelShape.from_config(LLAMA_8B, tied=True).n_params() == ModelShape.from_config(LLAMA_8B).n_params() - 128256 * 4096


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"])
def test_a_missing_or_unusable_key_is_named(key: str) -> None:
    with pytest.raises(SourceError, match=f"no {key},"):
        ModelShape.from_config({name: value for name, value in LLAMA_8B.items() if name != key})
    for bad in (0, -1, 2.5, "32", True):
        with pytest.raises(SourceError, match=f"{key} = "):
            ModelShape.from_config({**LLAMA_8B, key: bad})


@pytest.mark.parametrize(
    "fields, part",
    [
        ({"num_local_experts": 8}, "num_local_experts = 8"),
        ({"n_routed_experts": 64}, "n_routed_experts = 64"),
        ({"kv_lora_rank": 512}, "kv_lora_rank"),
        ({"num_attention_heads": 30}, "30 heads do not divide"),
        ({"num_key_value_heads": 7}, "32 query heads cannot share 7"),
    ],
)
def test_models_that_the_counts_do_not_describe_are_refused(fields: dict[str, Any], part: str) -> None:
    with pytest.raises(SourceError, match=part):
        ModelShape.from_config({**LLAMA_8B, **fields})


def test_assumptions_about_the_model_are_noted_in_the_record() -> None:
    sliding = ModelShape.from_config({**LLAMA_8B, "model_type": "mistral", "sliding_window": 4096})
    assert sliding.sliding_window == 4096
    assert sliding.kv_bytes_per_token() == 131_072
    notes = implications(sliding, REFERENCE, weight_bytes=CASE_BYTES).record()["notes"]
    assert any("sliding window of 4096" in note for note in notes)
    unused = ModelShape.from_config({**LLAMA_8B, "sliding_window": 4096, "use_sliding_window": False})
    assert (unused.sliding_window, unused.notes) == (None, ())
    full = ModelShape.from_config({**LLAMA_8B, "sliding_window": 4096, "layer_types": ["full_attention"] * 32})
    assert full.sliding_window is None
    unknown = ModelShape.from_config({**LLAMA_8B, "model_type": "newcomer"})
    assert "newcomer" in unknown.notes[0]
