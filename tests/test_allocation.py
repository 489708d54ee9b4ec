"""Allocation of bits against brute force, and sensitivities against a direct measurement."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from calib.capture import BlockRunner
from calib.sensitivity import measure_units
from formats.checkpoint import Checkpoint
from formats.fates import Quantise, Rule
from formats.planning import plan_fates
from formats.reader import load_model
from formats.sizing import WIDTHS, best_uniform, matrix_bytes, units_of
from formats.skeleton import Skeleton
from quant.allocation import Choice, Unit, allocate, hull
from quant.errors import UsageError
from quant.quantizers.rtn import round_to_nearest
from quant.scheme import Scheme
from tests.tiny_runs import check_ledger, run, write_text

IDS = torch.randint(0, 256, (4, 24), generator=torch.Generator().manual_seed(0))


def units(count: int, seed: int) -> list[Unit]:
    """Units with convex choices: error falls by four per bit, as rounding error does."""
    rng = random.Random(seed)
    found = []
    for index in range(count):
        size, error = rng.choice([100, 200, 300]), rng.uniform(1, 50)
        choices = tuple(Choice(Scheme(bits), size * bits, error / 4**bits) for bits in (2, 3, 4, 6))
        found.append(Unit((f"m{index}",), choices))
    return found


def cost(made: list[Unit], chosen: tuple[Choice, ...]) -> tuple[int, float]:
    return sum(c.nbytes for c in chosen), sum(c.error for c in chosen)


@pytest.mark.parametrize("seed", range(20))
def test_the_error_is_near_that_of_the_best_of_all_allocations(seed: int) -> None:
    made = units(5, seed)
    everything = list(itertools.product(*(unit.choices for unit in made)))
    low, high = (f(cost(made, chosen)[0] for chosen in everything) for f in (min, max))
    for share in (0.1, 0.5, 0.9, 1.0):
        budget = int(low + share * (high - low))
        best = min(error for size, error in (cost(made, chosen) for chosen in everything) if size <= budget)
        found = allocate(made, budget)
        chosen = tuple(next(c for c in unit.choices if c.scheme == found[unit.modules[0]]) for unit in made)
        size, error = cost(made, chosen)
        assert size <= budget
        assert error <= 1.6 * best + 1e-12  # one upgrade at the most is missing
        uniform = [cost(made, tuple(u.choices[k] for u in made)) for k in range(4)]
        assert all(error <= e + 1e-12 for s, e in uniform if s <= budget)


def test_a_budget_that_holds_nothing_says_what_would() -> None:
    with pytest.raises(UsageError, match="smallest schemes"):
        allocate(units(3, 0), 10)


def test_the_hull_is_convex_and_drops_what_costs_more_and_errs_more() -> None:
    choices = [Choice(Scheme(b), n, e) for b, n, e in ((2, 10, 9.0), (3, 20, 8.9), (4, 30, 1.0), (5, 40, 2.0), (6, 50, 0.9))]
    assert [choice.nbytes for choice in hull(choices)] == [10, 30, 50]


def test_modules_of_a_unit_get_one_scheme() -> None:
    made = [Unit(("q", "k"), (Choice(Scheme(2), 10, 5.0), Choice(Scheme(4), 20, 1.0)))]
    assert allocate(made, 25) == {"q": Scheme(4), "k": Scheme(4)}


def test_units_are_what_engines_fuse_and_errors_are_those_of_the_block(tiny_model: Callable[[str], Path]) -> None:
    folder = tiny_model("qwen2")
    source = Checkpoint.open(folder)
    plans = plan_fates(source, (Rule("*", Quantise(Scheme(4, blocks=32))),))
    assert sorted(len(unit) for unit in units_of(plans)) == [1, 1, 1, 1, 2, 2, 3, 3]
    found = measure_units(BlockRunner(Skeleton(folder), source.tensor), plans, IDS, 2, lambda done, total: None)
    assert sorted(m for unit in found for m in unit.modules) == sorted(p.module for p in plans if isinstance(p.fate, Quantise))
    unit = next(u for u in found if u.modules == ("model.layers.1.mlp.down_proj",))
    model = load_model(folder)
    with torch.no_grad():
        states = model(IDS, output_hidden_states=True, use_cache=False).hidden_states[1]
        blocks = model.model.layers
        position = torch.arange(24)[None]
        rotary = model.model.rotary_emb(states, position)
        mask = torch.full((24, 24), float("-inf")).triu(1)[None, None]
        plain = blocks[1](states, attention_mask=mask, position_embeddings=rotary)
        linear = blocks[1].mlp.down_proj
        original = linear.weight.clone()
        for choice in unit.choices:
            linear.weight.copy_(round_to_nearest(original, choice.scheme).dequantise())
            other = blocks[1](states, attention_mask=mask, position_embeddings=rotary)
            error = ((other - plain).square().sum(-1) / plain.square().sum(-1)).mean()
            assert choice.error == pytest.approx(float(error), rel=1e-3)
    plan = next(p for p in plans if p.module == unit.modules[0])
    assert [c.nbytes for c in unit.choices] == [matrix_bytes(plan, Scheme(bits, blocks=32)) for bits in WIDTHS]
    assert matrix_bytes(plan, Scheme(4, blocks=32)) == 64 * 128 // 2 + 64 * 4 * 2


def test_the_best_uniform_plan_uses_the_budget_with_one_scheme(tiny_model: Callable[[str], Path]) -> None:
    plans = plan_fates(Checkpoint.open(tiny_model("ragged")), (Rule("*", Quantise(Scheme(4, blocks="channel"))),))
    for bits in (2.5, 3.6, 4.6, 9.0):
        elements = sum(plan.info.elements for plan in plans if isinstance(plan.fate, Quantise))
        found = [plan for plan in best_uniform(plans, int(bits * elements / 8)) if isinstance(plan.fate, Quantise)]
        assert len({plan.fate.scheme for plan in found if isinstance(plan.fate, Quantise)}) == 1
        assert 8 * sum(matrix_bytes(plan) for plan in found) / elements <= bits
    assert isinstance(found[0].fate, Quantise)
    assert found[0].fate.scheme == Scheme(8, blocks="channel")  # 80 columns are no multiple of 32


@pytest.mark.parametrize(("option", "value"), [("--target-bpw", "3.8"), ("--target-bytes", "190000")])
def test_a_run_meets_its_target_and_says_what_beat_what(
    tiny_model: Callable[[str], Path], tmp_path: Path, option: str, value: str
) -> None:
    made = [run("rtn", tiny_model("llama"), tmp_path / n, write_text(tmp_path), option, value) for n in ("one", "two")]
    manifest = made[0]
    check_ledger(tmp_path / "one", manifest)
    (note,) = (note for note in manifest.notes if note.kind == "size-target")
    assert "allocated" in note.text
    assert "uniform" in note.text
    assert "kept" in note.text
    assert manifest.bits_per_weight.quantised is not None
    if option == "--target-bpw":
        assert 3.0 < manifest.bits_per_weight.quantised <= 3.8
    else:
        assert 150_000 < sum(file.nbytes for file in manifest.files if file.role == "weights") <= 190_000
    assert not list((tmp_path / "one").glob(".trial*"))
    weights = [[file.sha256 for file in m.files if file.role in ("weights", "config")] for m in made]
    assert weights[0] == weights[1]
    uniform = "which is kept" in note.text
    schemes = {record.scheme for record in manifest.tensors if record.fate == "quantised"}
    assert (len(schemes) == 1) == uniform


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--target-bpw", "1.5"), "leaves"),
        (("--target-bytes", "1000"), "leaves"),
        (("--target-bpw", "3", "--target-bytes", "10"), "two ways"),
        (("--target-bpw", "3", "--bits", "4"), "--bits cannot go with"),
        (("--target-bpw", "-1"), "above 0"),
    ],
)
def test_a_target_that_makes_no_sense_is_refused(
    tiny_model: Callable[[str], Path], tmp_path: Path, options: tuple[str, ...], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        run("rtn", tiny_model("llama"), tmp_path / "out", write_text(tmp_path), *options)
    assert not (tmp_path / "out").exists()
