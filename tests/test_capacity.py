"""Capacity arithmetic against the printed numbers of the source text: its lab 1 and its section 11."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from eval.capacity.bounds import decode_step, full_batch, prefill_flops, prefill_seconds
from eval.capacity.implications import Assumptions, Implication, implications
from eval.capacity.model_shape import ModelShape
from tests.capacity_cases import CASE, CASE_BYTES, REFERENCE, SMOLLM2_135M, SMOLLM2_360M, known, make_card

ROOT = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("BITLEDGER_SHARED", ROOT.parent / "shared"))
SEED_NUMBERS = SHARED / "reference" / "seed_numbers.json"

LAB1_CARDS = {
    "24GB-1.0": REFERENCE,
    "24GB-0.3": make_card(24, 0.3, 121),
    "48GB": make_card(48, 0.864, 362),
    "80GB-2.039": make_card(80, 2.039, 312),
    "80GB-3.35": make_card(80, 3.35, 989),
}
# The source text's lab 1 table as printed: free GB, batch, TTFT s, tokens/s alone, tokens/s at the full batch.
LAB1_TABLE = {
    "24GB-1.0": ("16.0", "18", "0.923", "160.3", "958.9"),
    "24GB-0.3": ("16.0", "18", "1.259", "48.1", "287.7"),
    "48GB": ("40.0", "45", "0.421", "138.5", "1005.2"),
    "80GB-2.039": ("72.0", "81", "0.488", "326.9", "2532.3"),
    "80GB-3.35": ("72.0", "81", "0.154", "537.1", "4160.6"),
}
# More of what it prints, by the ids of seed_numbers.json.
LITERAL = {
    "case.N": "9550729216",
    "case.N_matmul": "8927875072",
    "lab1.kv_bytes_per_token": "147456",
    "lab1.kv_bytes_per_token_int8": "73728",
    "lab1.kv_6000_GB": "0.884736",
    "lab1.bf16.B": "2",
    "lab1.bf16.solo_tok_s": "50.4",
    "lab1.int8.B": "13",
    "lab1.int8.solo_tok_s": "97.2",
    "lab1.ridge.80GB-3.35": "295.2",
    "lab1.floor.SmolLM2-135M": "11.15",
    "lab1.floor.SmolLM2-360M": "30.00",
    "econ.busy_s_per_request": "3.01",
    "econ.requests_per_h": "1,196",
    "econ.usd_per_M_busy": "0.42",
    **{
        f"lab1.card.{name}.{column}": printed
        for name, row in LAB1_TABLE.items()
        for column, printed in zip(("free_GB", "B", "TTFT_s", "solo_tok_s", "batch_tok_s"), row, strict=True)
    },
}
# Lab 1 entries that measure a CPU or convert units: arithmetic of other modules.
NOT_CAPACITY = {"case.file_bytes_GB", "units.8192sq_f32"}


def card_numbers(name: str, item: Implication) -> dict[str, float]:
    return {
        f"{name}.free_GB": known(item.free_bytes) / 1e9,
        f"{name}.B": known(item.batch),
        f"{name}.TTFT_s": known(item.prefill_s),
        f"{name}.solo_tok_s": known(item.output_tokens_per_s_alone),
        f"{name}.batch_tok_s": known(item.output_tokens_per_s_full_batch),
    }


def floor_ms(config: dict[str, Any]) -> float:
    """Milliseconds of one step when only float32 weights move, at the source text's measured 48.24 GB/s."""
    shape = ModelShape.from_config(config)
    step = decode_step(
        shape,
        batch=1,
        context_tokens=0,
        traffic_bytes=4 * shape.n_params(),
        kv_bytes_per_token=shape.kv_bytes_per_token(),
        bandwidth_bytes_per_s=48.24e9,
        dense_flops_per_s=None,
    )
    return step.seconds * 1e3


def our_numbers() -> dict[str, float]:
    """Our value for every entry of seed_numbers.json that this package computes, in the entry's unit."""
    reference = implications(CASE, REFERENCE, weight_bytes=CASE_BYTES)
    numbers: dict[str, float] = {
        "case.N": CASE.n_params(),
        "case.N_matmul": CASE.n_matmul(),
        "case.table_params_each": CASE.table_params(),
        "case.bf16_bytes_GB": CASE.uniform_weight_bytes(16) / 1e9,
        "case.uniform_4bit_GB": CASE.uniform_weight_bytes(4) / 1e9,
        "case.attention_flops_32768": prefill_flops(CASE, 32768) - 2 * CASE.n_matmul() * 32768,
        "lab1.kv_bytes_per_token": CASE.kv_bytes_per_token(),
        "lab1.kv_bytes_per_token_int8": CASE.kv_bytes_per_token(1),
        "lab1.kv_6000_GB": reference.kv_bytes_per_request / 1e9,
        "kv.32000_GB": CASE.kv_bytes_per_token() * 32000 / 1e9,
        "capacity.requests_bf16": full_batch(16_000_000_000, CASE.kv_bytes_per_token() * 6000),
        "capacity.requests_int8": full_batch(16_000_000_000, CASE.kv_bytes_per_token(1) * 6000),
        "cpu.prefill_0.5TFLOPs_s": prefill_seconds(CASE, 4000, dense_flops_per_s=0.5e12, mfu=1),
        "roofline.h100_ridge": known(LAB1_CARDS["80GB-3.35"].ridge_flops_per_byte()),
        "econ.solo_step_ms": known(reference.step_alone_s) * 1e3,
        "econ.step18_ms": known(reference.step_full_batch_s) * 1e3,
        "econ.decode_tok_s": known(reference.output_tokens_per_s_full_batch),
        "econ.busy_s_per_request": known(reference.busy_s_per_request),
        "econ.requests_per_h": known(reference.requests_per_busy_hour),
        "econ.tokens_per_h_M": known(reference.output_tokens_per_busy_hour) / 1e6,
        "econ.usd_per_M_busy": known(reference.cost_per_million_output_tokens),
        "lab1.floor.SmolLM2-135M": floor_ms(SMOLLM2_135M),
        "lab1.floor.SmolLM2-360M": floor_ms(SMOLLM2_360M),
    }
    for name, card in LAB1_CARDS.items():
        numbers[f"lab1.ridge.{name}"] = known(card.ridge_flops_per_byte())
        numbers |= card_numbers(f"lab1.card.{name}", implications(CASE, card, weight_bytes=CASE_BYTES))
    for name, nbytes in (("bf16", 2 * CASE.n_params()), ("int8", CASE.n_params())):
        rows = card_numbers(f"lab1.{name}", implications(CASE, REFERENCE, weight_bytes=nbytes))
        numbers |= {key: value for key, value in rows.items() if key.endswith((".B", ".solo_tok_s"))}
    return numbers


def assert_as_printed(name: str, ours: float, printed: str | int) -> None:
    """Equal to the printed precision; 1,196 is 3600 over an already rounded 3.01, so that row has a tolerance of 1."""
    text = str(printed).replace(",", "")
    if name == "econ.requests_per_h":
        assert abs(ours - float(text)) <= 1, (name, ours)
    elif "e" in text:
        assert f"{ours:.2e}".replace("e+", "e") == text, (name, ours)
    else:
        decimals = len(text.partition(".")[2])
        assert f"{ours:.{decimals}f}" == text, (name, ours)


def test_literal_rows_of_the_source_text() -> None:
    ours = our_numbers()
    for name, printed in LITERAL.items():
        assert_as_printed(name, ours[name], printed)


@pytest.mark.skipif(not SEED_NUMBERS.is_file(), reason=f"no {SEED_NUMBERS.name} beside the repository")
def test_every_entry_of_seed_numbers_that_this_package_computes() -> None:
    entries = {entry["id"]: entry for entry in json.loads(SEED_NUMBERS.read_text())["entries"]}
    ours = our_numbers()
    for name, value in ours.items():
        assert_as_printed(name, value, entries[name]["expected"])
    exact_lab1 = {name for name, entry in entries.items() if entry["section"] == "lab1" and entry["kind"] == "exact"}
    assert exact_lab1 - NOT_CAPACITY == exact_lab1 & ours.keys()


def test_parameters_of_the_source_texts_models() -> None:
    counts = [ModelShape.from_config(config).n_params() for config in (SMOLLM2_135M, SMOLLM2_360M)]
    assert counts == [134_515_008, 361_821_120]


def test_a_full_batch_is_never_negative() -> None:
    assert [full_batch(free, 10) for free in (-1, -(10**12), 0, 9, 10, 29)] == [0, 0, 0, 0, 1, 2]


def test_prefill_takes_31_percent_of_the_busy_time() -> None:
    item = implications(CASE, REFERENCE, weight_bytes=CASE_BYTES)
    assert f"{known(item.prefill_s) / known(item.busy_s_per_request):.0%}" == "31%"


def test_one_byte_cache_with_scales_holds_35_requests() -> None:
    item = implications(
        CASE,
        REFERENCE,
        weight_bytes=CASE_BYTES,
        assumptions=Assumptions(kv_bytes_per_value=1, kv_scale_bytes_per_vector=2),
    )
    assert (item.kv_bytes_per_token, item.batch) == (74_880, 35)
