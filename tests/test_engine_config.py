"""The configuration block against the reference reader's own schema and matching, and against the order in which vLLM matches."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from formats.checkpoint import Checkpoint
from formats.engine_config import quantization_config
from formats.fates import Keep, Quantise, Rule, TensorPlan
from formats.planning import plan_fates
from formats.skeleton import Skeleton
from quant.scheme import Scheme

G32, FINE = Quantise(Scheme(4, "sym", 32)), Quantise(Scheme(8, "sym", "channel"))
COARSE, OTHER = Quantise(Scheme(3, "zp", 64, "f32")), Quantise(Scheme(8, "zp", "tensor", "bf16"))
KEEP = Keep("recipe")
REST = Rule("*", G32)
RECIPES: dict[str, list[Rule]] = {
    "one scheme": [REST],
    "one scheme, zero point": [Rule("*", COARSE)],
    "one scheme, one per tensor": [Rule("*", OTHER)],
    "one scheme, one matrix kept": [Rule("*.0.self_attn.o_proj", KEEP), REST],
    "one scheme, a block kept": [Rule("*layers.1.*", KEEP), REST],
    "by kind": [Rule("*.down_proj", FINE), REST],
    "fused siblings differ": [Rule("*.q_proj", FINE), REST],
    "by block": [Rule("*layers.0.*", FINE), REST],
    "one matrix": [Rule("model.layers.1.mlp.down_proj", FINE), REST],
    "four schemes": [
        Rule("*.down_proj", FINE), Rule("*.0.self_attn.*", COARSE), Rule("*.o_proj", OTHER), Rule("*.1.mlp.up_proj", KEEP), REST,
    ],
}  # fmt: skip


def planned(folder: Path, rules: list[Rule]) -> tuple[tuple[TensorPlan, ...], dict[str, Any]]:
    plans = plan_fates(Checkpoint.open(folder), rules)
    return plans, quantization_config(plans)


def expected_arguments(scheme: Scheme) -> dict[str, Any]:
    group = isinstance(scheme.blocks, int)
    return {
        "num_bits": scheme.bits,
        "symmetric": scheme.symmetric,
        "strategy": "group" if group else scheme.blocks,
        "group_size": scheme.blocks if group else None,
        "type": "int",
        "dynamic": False,
    }


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("model", ["llama", "tied", "qwen2"])
def test_the_reference_reader_gives_every_module_the_scheme_of_its_plan(
    model: str, name: str, tiny_model: Callable[[str], Path]
) -> None:
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    plans, block = planned(tiny_model(model), RECIPES[name])
    engine = Skeleton(tiny_model(model)).model
    parsed = QuantizationConfig.model_validate(block)
    with torch.device("meta"):
        apply_quantization_config(engine, parsed)
    schemes = {plan.module: plan.fate.scheme for plan in plans if isinstance(plan.fate, Quantise)}
    for module_name, module in engine.named_modules():
        given = getattr(module, "quantization_scheme", None)
        assert (given is not None) == (module_name in schemes), module_name
        if given is not None:
            arguments = given.weights.model_dump(mode="json")
            wanted = expected_arguments(schemes[module_name])
            assert {key: arguments[key] for key in wanted} == wanted, module_name
            assert given.input_activations is None
            assert given.format == "pack-quantized"


@pytest.mark.parametrize("name", RECIPES)
def test_the_first_match_by_name_then_by_class_is_the_scheme_of_the_plan(name: str, tiny_model: Callable[[str], Path]) -> None:
    """vLLM's order; SGLang tries the class earlier, so a configuration of several groups must not name it at all."""
    plans, block = planned(tiny_model("llama"), RECIPES[name])
    groups = block["config_groups"]
    targets = [target for group in groups.values() for target in group["targets"]]
    assert targets == ["Linear"] if len(groups) == 1 else "Linear" not in targets
    for plan in plans:
        if len(plan.info.shape) != 2 or "embed" in plan.module:
            continue
        ignored = plan.module in block["ignore"]
        matching = [
            key
            for key, group in groups.items()
            for target in group["targets"]
            if target == "Linear" or re.match(target.removeprefix("re:"), plan.module)
        ]
        if isinstance(plan.fate, Quantise):
            assert not ignored
            assert len(matching) == 1, "disjoint: the order of the groups cannot matter"
            weights = groups[matching[0]]["weights"]
            wanted = {key: value for key, value in expected_arguments(plan.fate.scheme).items() if value is not None}
            assert {key: weights.get(key) for key in wanted} == wanted
        else:
            assert ignored


def test_one_kind_of_module_is_one_pattern_and_a_mixed_kind_is_named_one_by_one(tiny_model: Callable[[str], Path]) -> None:
    _, by_kind = planned(tiny_model("llama"), RECIPES["by kind"])
    assert [len(group["targets"]) for group in by_kind["config_groups"].values()] == [1, 6]
    _, one = planned(tiny_model("llama"), RECIPES["one matrix"])
    named = [group["targets"] for group in one["config_groups"].values() if group["weights"]["num_bits"] == 8]
    assert named == [[r"re:model\.layers\.1\.mlp\.down_proj$"]]


def test_block_1_is_not_block_10(tmp_path: Path) -> None:
    from tests.failure.damage import CONFIG, write_folder
    from tests.test_fates import llama

    folder = write_folder(tmp_path / "model", llama(layers=12), CONFIG)
    plans, block = planned(folder, [Rule("*.layers.1.*", FINE), REST])
    fine = {plan.module for plan in plans if plan.fate == FINE}
    assert {name.split(".")[2] for name in fine} == {"1"}
    for group in block["config_groups"].values():
        hit = {plan.module for plan in plans if any(re.match(target[3:], plan.module) for target in group["targets"])}
        assert hit == fine or not hit & fine


def test_r77_routers_are_ignored_and_experts_are_not(tiny_model: Callable[[str], Path]) -> None:
    plans, block = planned(tiny_model("moe"), [REST])
    assert block["ignore"] == ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    experts = [plan for plan in plans if ".experts." in plan.name]
    assert len(experts) == 48
    assert all(isinstance(plan.fate, Quantise) for plan in experts)


@pytest.mark.parametrize("name", RECIPES)
def test_what_engines_need_is_said_and_nothing_else(name: str, tiny_model: Callable[[str], Path]) -> None:
    """Keys that an older reader does not know are refused by it: only those of the release whose layout is followed."""
    _, block = planned(tiny_model("llama"), RECIPES[name])
    assert block["quant_method"] == "compressed-tensors"
    assert block["quantization_status"] == "compressed"
    assert block["format"] == "pack-quantized"
    assert list(block["config_groups"]) == [f"group_{index}" for index in range(len(block["config_groups"]))]
    for group in block["config_groups"].values():
        assert set(group) == {"targets", "format", "weights", "input_activations", "output_activations"}
        assert set(group["weights"]) <= {"num_bits", "type", "symmetric", "strategy", "group_size", "dynamic"}
