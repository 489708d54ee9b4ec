"""What bytes mean on a card: bounds, memory readings, what does not fit, prices, and ranges."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.capacity.cards import load_cards
from eval.capacity.implications import Assumptions, implications
from quant.errors import UsageError
from tests.capacity_cases import CASE, CASE_BYTES, DOLLAR, REFERENCE, known, make_card

ROOT = Path(__file__).resolve().parents[1]


def test_the_step_is_bound_by_memory_or_by_compute() -> None:
    memory = implications(CASE, REFERENCE, weight_bytes=CASE_BYTES)
    assert (memory.step_alone_bound, memory.step_full_batch_bound) == ("memory", "memory")
    assert known(memory.step_alone_s) == pytest.approx(6.23728e-3, rel=1e-12)
    compute = implications(CASE, make_card(80, 2.0, 10), weight_bytes=CASE_BYTES)
    assert (compute.step_alone_bound, compute.step_full_batch_bound) == ("memory", "compute")
    flops = 2 * CASE.n_matmul() * 81 + 4 * 36 * 4096 * 81 * 5000
    assert known(compute.step_full_batch_s) == pytest.approx(flops / 10e12, rel=1e-12)


def test_traffic_counts_for_the_step_and_not_for_the_capacity() -> None:
    whole = implications(CASE, REFERENCE, weight_bytes=CASE_BYTES)
    without_table = implications(CASE, REFERENCE, weight_bytes=CASE_BYTES, traffic_bytes=CASE_BYTES - 622_854_144)
    assert without_table.batch == whole.batch
    saved_s = known(whole.step_alone_s) - known(without_table.step_alone_s)
    assert saved_s == pytest.approx(622_854_144 / 1e12, rel=1e-9)


def test_fewer_stored_bits_do_not_speed_up_prefill() -> None:
    small, large = (implications(CASE, make_card(80), weight_bytes=CASE.uniform_weight_bytes(bits)) for bits in (4, 16))
    assert small.prefill_s == large.prefill_s
    assert known(small.step_alone_s) < known(large.step_alone_s)
    assert any("dense bf16 rate" in note for note in small.notes)


def test_operand_format_chooses_the_dense_rate() -> None:
    (h100,) = load_cards("h100-sxm5-80gb")
    bf16 = implications(CASE, h100, weight_bytes=CASE_BYTES)
    int8 = implications(CASE, h100, weight_bytes=CASE_BYTES, assumptions=Assumptions(operand_format="int8"))
    assert known(bf16.prefill_s) / known(int8.prefill_s) == pytest.approx(1978.9 / 989.4)
    assert any("activations are int8" in note for note in int8.notes)
    fp4 = implications(CASE, h100, weight_bytes=CASE_BYTES, assumptions=Assumptions(operand_format="fp4"))
    assert (fp4.prefill_s, fp4.cost_per_million_output_tokens, fp4.fits) == (None, None, True)
    assert fp4.reason == "H100 SXM5 80GB states no dense fp4 rate: no prefill time, so no cost"


def test_memory_bases_differ_and_a_missing_reading_is_said() -> None:
    (h100,) = load_cards("h100-sxm5-80gb")
    expected = {"label-decimal": 80_000_000_000, "label-binary": 85_899_345_920, "reported": 85_520_809_984}
    for basis, nbytes in expected.items():
        item = implications(CASE, h100, weight_bytes=CASE_BYTES, assumptions=Assumptions(memory_basis=basis))  # type: ignore[arg-type]
        assert item.memory_bytes == nbytes
        assert item.free_bytes == nbytes - CASE_BYTES - 2_500_000_000
    silent = implications(CASE, REFERENCE, weight_bytes=CASE_BYTES, assumptions=Assumptions(memory_basis="reported"))
    assert (silent.fits, silent.batch) == (None, None)
    assert "no memory reported by a driver" in str(silent.reason)
    assert known(silent.step_alone_s) == pytest.approx(6.23728e-3, rel=1e-12)


def test_a_model_that_does_not_fit_says_why_and_by_how_much() -> None:
    item = implications(CASE, make_card(16, price=DOLLAR), weight_bytes=2 * CASE.n_params())
    assert (item.fits, item.batch) == (False, 0)
    assert item.free_bytes == 16_000_000_000 - 2_500_000_000 - 19_101_458_432
    assert item.short_by_bytes == 19_101_458_432 + 2_500_000_000 + 884_736_000 - 16_000_000_000
    assert f"by {item.short_by_bytes:,} bytes" in str(item.reason)
    assert item.step_alone_s is item.prefill_s is item.busy_s_per_request is item.cost_per_million_output_tokens is None


def test_room_for_the_weights_but_not_for_one_request_does_not_fit() -> None:
    barely = (CASE_BYTES + 2_500_000_000 + 884_736_000) / 1e9
    fits = implications(CASE, make_card(barely), weight_bytes=CASE_BYTES)
    short = implications(CASE, make_card(barely), weight_bytes=CASE_BYTES + 1)
    assert (fits.fits, fits.batch, fits.short_by_bytes) == (True, 1, 0)
    assert (short.fits, short.batch, short.short_by_bytes) == (False, 0, 1)
    assert fits.step_alone_s == fits.step_full_batch_s


def test_cards_without_memory_or_rate_give_what_can_be_known() -> None:
    (cpu,) = load_cards("cpu-2ch-ddr5-5600")
    item = implications(CASE, cpu, weight_bytes=CASE_BYTES)
    assert f"{known(item.output_tokens_per_s_alone):.1f}" == "14.4"
    assert item.step_alone_bound == "memory, compute rate unknown"
    assert (item.fits, item.batch, item.prefill_s, item.step_full_batch_s) == (None, None, None, None)
    assert "states no memory" in str(item.reason)


def test_no_price_no_cost_and_a_given_price_overrides() -> None:
    free = implications(CASE, make_card(), weight_bytes=CASE_BYTES)
    assert (free.price, free.cost_per_million_output_tokens) == (None, None)
    assert free.reason == "no price per hour is known, so there is no cost"
    own = implications(CASE, REFERENCE, weight_bytes=CASE_BYTES)
    given_price = Assumptions(price_per_hour=3.0, price_currency="EUR", price_date=date(2026, 12, 1))
    given_item = implications(CASE, REFERENCE, weight_bytes=CASE_BYTES, assumptions=given_price)
    assert known(given_item.cost_per_million_output_tokens) == pytest.approx(3 * known(own.cost_per_million_output_tokens))
    record = given_item.record()
    assert record["price"] == {
        "per_hour": 3.0,
        "currency": "EUR",
        "sources": ["given"],
        "date": "2026-12-01",
        "assumed": False,
    }
    assert record["assumptions"]["price_date"] == "2026-12-01"
    assert own.record()["price"]["assumed"] is True


def test_one_output_token_costs_the_prefill_alone() -> None:
    item = implications(CASE, REFERENCE, weight_bytes=CASE_BYTES, assumptions=Assumptions(output_tokens=1))
    assert item.busy_s_per_request == item.prefill_s


@pytest.mark.parametrize(
    "fields, part",
    [
        ({"prompt_tokens": 0}, "prompt_tokens"),
        ({"output_tokens": 0}, "output_tokens"),
        ({"overhead_bytes": -1}, "overhead_bytes"),
        ({"kv_bytes_per_value": 0}, "kv_bytes_per_value"),
        ({"kv_scale_bytes_per_vector": float("nan")}, "kv_scale_bytes_per_vector"),
        ({"mfu_prefill": 0}, "mfu_prefill"),
        ({"mfu_prefill": 50}, "mfu_prefill"),
        ({"price_per_hour": -1.0}, "price_per_hour"),
        ({"price_per_hour": float("inf")}, "price_per_hour"),
        ({"memory_basis": "gb"}, "label-decimal"),
        ({"operand_format": "int3"}, "bf16"),
    ],
)
def test_assumptions_out_of_range_are_named(fields: dict[str, Any], part: str) -> None:
    with pytest.raises(UsageError, match=part):
        Assumptions(**fields)


@pytest.mark.parametrize("name", ["weight_bytes", "traffic_bytes", "resident_bytes"])
def test_byte_counts_below_one_are_named(name: str) -> None:
    counts: dict[str, Any] = {"weight_bytes": CASE_BYTES, name: 0}
    with pytest.raises(UsageError, match=name):
        implications(CASE, REFERENCE, **counts)


@settings(max_examples=200, deadline=None)
@given(
    weight_bytes=st.integers(1, 10**12),
    memory_gb=st.one_of(st.none(), st.floats(0.1, 1000)),
    bf16_tflops=st.one_of(st.none(), st.floats(0.1, 10_000)),
    prompt=st.integers(1, 200_000),
    output=st.integers(1, 200_000),
    price=st.one_of(st.none(), st.floats(0, 1000)),
)
def test_any_input_gives_a_sound_record(
    weight_bytes: int, memory_gb: float | None, bf16_tflops: float | None, prompt: int, output: int, price: float | None
) -> None:
    assumptions = Assumptions(prompt_tokens=prompt, output_tokens=output, price_per_hour=price)
    item = implications(CASE, make_card(memory_gb, 1.0, bf16_tflops), weight_bytes=weight_bytes, assumptions=assumptions)
    record = json.loads(json.dumps(item.record(), allow_nan=False))
    assert (record["reason"] is None) == (record["cost_per_million_output_tokens"] is not None)
    if item.batch is not None:
        used = weight_bytes + assumptions.overhead_bytes + item.batch * item.kv_bytes_per_request
        assert item.batch >= 0
        assert used + item.kv_bytes_per_request > known(item.memory_bytes)  # one more request never fits
        assert (used <= known(item.memory_bytes)) == (item.batch > 0 or known(item.free_bytes) >= 0)
        assert item.fits is (item.batch > 0) is (item.short_by_bytes == 0)
    for name, value in record.items():
        if name.endswith(("_s", "_alone", "_busy_hour")) and value is not None:
            assert value > 0, name


def test_importing_capacity_imports_nothing_heavy() -> None:
    code = "import sys, eval.capacity.implications; print(sorted({'torch', 'transformers', 'pandas'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
