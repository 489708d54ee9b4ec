"""Routers and experts in the plan: known by place and size, kept, never met by a rule in silence."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from formats.fates import Keep, Quantise, Rule
from quant.errors import RecipeError
from tests.test_fates import G32, Tensors, everything, llama, plan


def moe(router: str, experts: str, count: int = 8) -> Tensors:
    found = llama()
    for layer, expert, name in itertools.product(range(2), range(count), ("gate_proj", "up_proj", "down_proj")):
        found[f"model.layers.{layer}.{experts}.{expert}.{name}.weight"] = ("F32", [64, 64])
    for layer in range(2):
        found[f"model.layers.{layer}.{router}.weight"] = ("F32", [count, 64])
    return found


@pytest.mark.parametrize(
    ("router", "experts", "key"),
    [
        ("mlp.gate", "mlp.experts", "num_experts"),
        ("block_sparse_moe.gate", "block_sparse_moe.experts", "num_local_experts"),
        ("feed_forward.router", "feed_forward.experts", "num_local_experts"),
        ("mlp.gate", "mlp.experts", "n_routed_experts"),
    ],
)
def test_r33_routers_are_known_by_their_place_and_size(router: str, experts: str, key: str, tmp_path: Path) -> None:
    found = plan(tmp_path, moe(router, experts), everything(), {key: 8})
    for layer in range(2):
        fate = found[f"model.layers.{layer}.{router}.weight"].fate
        assert isinstance(fate, Keep)
        assert "router" in fate.reason
    quantised = {name for name, each in found.items() if isinstance(each.fate, Quantise)}
    assert quantised == {name for name in moe(router, experts) if name.endswith("_proj.weight")}, "gate_proj is quantised"


def test_r33_a_matrix_called_gate_without_experts_is_no_router(tmp_path: Path) -> None:
    tensors = llama() | {"model.layers.0.mlp.gate.weight": ("F32", [8, 64])}
    assert isinstance(plan(tmp_path, tensors, everything())["model.layers.0.mlp.gate.weight"].fate, Quantise)


def test_r33_the_gate_of_a_shared_expert_is_kept_and_its_matrices_are_not(tmp_path: Path) -> None:
    shared: Tensors = {
        "model.layers.0.mlp.shared_expert_gate.weight": ("F32", [1, 64]),
        "model.layers.0.mlp.shared_expert.gate_proj.weight": ("F32", [64, 64]),
    }
    found = plan(tmp_path, moe("mlp.gate", "mlp.experts") | shared, everything(), {"num_experts": 8})
    assert isinstance(found["model.layers.0.mlp.shared_expert_gate.weight"].fate, Keep)
    assert isinstance(found["model.layers.0.mlp.shared_expert.gate_proj.weight"].fate, Quantise)


def test_r33_a_router_cannot_be_quantised_by_a_rule_that_meets_it(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"model\.layers\.0\.mlp\.gate\.weight \(router"):
        plan(tmp_path, moe("mlp.gate", "mlp.experts"), [Rule("*gate", G32), *everything()], {"num_experts": 8})
