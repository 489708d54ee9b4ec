"""The fate of every tensor from headers alone: no tensor here has a value, most have no bytes that anybody reads."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from formats.checkpoint import Checkpoint
from formats.codec import get_codec
from formats.engine_config import output_config
from formats.fates import Alias, Keep, Quantise, Rule, TensorPlan
from formats.planning import plan_fates, plan_notes
from quant.errors import RecipeError, SchemeError, SourceError
from quant.scheme import Scheme
from tests.failure.damage import CONFIG, poke, write_folder

Tensors = dict[str, tuple[str, list[int]]]
G32 = Quantise(Scheme(4, "sym", 32))
BY_NAME = {"q_proj": [64, 64], "k_proj": [32, 64], "v_proj": [32, 64], "o_proj": [64, 64]}


def everything(fate: Quantise | Keep = G32) -> list[Rule]:
    return [Rule("*", fate)]


def llama(layers: int = 2, hidden: int = 64, intermediate: int = 128) -> Tensors:
    found: Tensors = {
        "lm_head.weight": ("F32", [256, hidden]),
        "model.embed_tokens.weight": ("F32", [256, hidden]),
        "model.norm.weight": ("F32", [hidden]),
    }
    for layer in range(layers):
        place = f"model.layers.{layer}"
        for name, shape in BY_NAME.items():
            found[f"{place}.self_attn.{name}.weight"] = ("F32", [shape[0], hidden])
        for name in ("gate_proj", "up_proj"):
            found[f"{place}.mlp.{name}.weight"] = ("F32", [intermediate, hidden])
        found[f"{place}.mlp.down_proj.weight"] = ("F32", [hidden, intermediate])
        found[f"{place}.input_layernorm.weight"] = ("F32", [hidden])
    return found


def plan(tmp_path: Path, tensors: Tensors, rules: list[Rule], config: dict[str, Any] | None = None) -> dict[str, TensorPlan]:
    folder = write_folder(tmp_path / "model", tensors, CONFIG | (config or {}))
    return {found.name: found for found in plan_fates(Checkpoint.open(folder), rules)}


def test_matrices_of_blocks_are_quantised_and_all_else_is_kept_with_a_reason(tmp_path: Path) -> None:
    found = plan(tmp_path, llama(), everything())
    quantised = {name for name, each in found.items() if isinstance(each.fate, Quantise)}
    assert quantised == {name for name in llama() if name.endswith("_proj.weight")}
    for name, each in found.items():
        if name not in quantised:
            assert isinstance(each.fate, Keep)
            assert each.fate.reason
            assert [(spec.name, spec.dtype, spec.shape, spec.role) for spec in each.stored] == [
                (name, "F32", tuple(llama()[name][1]), "kept")
            ]


def test_what_is_stored_is_what_the_codec_lays_out(tmp_path: Path) -> None:
    """R22: the scheme asked for is the scheme stored, for every matrix; no shape gets another one by itself."""
    for number, (bits, zero) in enumerate(itertools.product(range(2, 9), ("sym", "zp"))):
        scheme = Scheme(bits, zero, 32)  # type: ignore[arg-type]
        for name, each in plan(tmp_path / str(number), llama(), everything(Quantise(scheme))).items():
            if name.endswith("_proj.weight"):
                assert each.fate == Quantise(scheme)
                layout = get_codec("pack-quantized").layout(scheme, each.matrix_shape)
                stem = name.removesuffix("weight")
                assert [(spec.name, spec.dtype, spec.shape, spec.role) for spec in each.stored] == [
                    (stem + part.suffix, part.dtype, part.shape, part.role) for part in layout
                ]


def test_blocks_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    names = [name for name in plan(tmp_path, llama(layers=12), everything()) if "layers" in name]
    assert [int(name.split(".")[2]) for name in names] == sorted(int(name.split(".")[2]) for name in names)


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "reason"),
    [
        ("model.layers.0.self_attn.q_proj.bias", "F32", [64], "not a matrix"),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", "F32", [8], "not a matrix"),
        ("model.layers.0.mlp.experts.gate_up_proj", "F32", [8, 64, 64], "a 3-dimensional tensor"),
        ("model.layers.0.scale", "F32", [], "not a matrix"),
        ("model.layers.0.table", "F32", [4, 4], "a 2-dimensional tensor"),
        ("model.layers.0.mask", "BOOL", [4, 4], "BOOL is no float type"),
        ("model.layers.0.counts", "I64", [4], "I64 is no float type"),
        ("model.projection.weight", "F32", [64, 64], "outside the decoder blocks"),
    ],
)
def test_what_no_scheme_speaks_of_is_kept(name: str, dtype: str, shape: list[int], reason: str, tmp_path: Path) -> None:
    fate = plan(tmp_path, llama() | {name: (dtype, shape)}, everything())[name].fate
    assert isinstance(fate, Keep)
    assert reason in fate.reason


@pytest.mark.parametrize("group", [32, 96, 128])
def test_r20_every_matrix_that_does_not_divide_is_named_with_shape_and_ways_out(group: int, tmp_path: Path) -> None:
    """80 columns against 32; 64 columns are fewer than a group of 96 or 128. Nothing else is named."""
    tensors = llama(intermediate=80)
    offending = {name: shape for name, (_, shape) in tensors.items() if name.endswith("_proj.weight") and shape[1] % group}
    with pytest.raises(SchemeError) as caught:
        plan(tmp_path, tensors, everything(Quantise(Scheme(4, "sym", group))))
    first, *lines = str(caught.value).split("\n")
    assert first.startswith(f"{len(offending)} matrices cannot be stored as asked")
    for way in ("--group-size", "'channel'", "keep = true"):
        assert way in first
    assert len(lines) == len(offending)
    for name, shape in offending.items():
        named = [line for line in lines if line.strip().startswith(f"{name.removesuffix('.weight')} {shape} ")]
        assert len(named) == 1, name
        assert f"its {shape[1]} input columns are no multiple of the group size {group}" in named[0]


def test_r20_576_columns_and_groups_of_128(tmp_path: Path) -> None:
    tensors = llama(hidden=576, intermediate=1536)
    with pytest.raises(SchemeError) as caught:
        plan(tmp_path / "a", tensors, everything(Quantise(Scheme(4, "sym", 128))))
    assert str(caught.value).startswith("12 matrices")  # all but down_proj, whose 1536 columns are 12 groups
    assert "down_proj" not in str(caught.value)
    for number, way in enumerate((32, 64, 96, "channel", "tensor")):
        plan(tmp_path / str(number), tensors, everything(Quantise(Scheme(4, "sym", way))))  # type: ignore[arg-type]
    mixed = [Rule("*.down_proj", Quantise(Scheme(4, "sym", 128))), Rule("*", Quantise(Scheme(4, "sym", 64)))]
    plan(tmp_path / "mixed", tensors, mixed)


def test_a_floating_zero_point_is_not_stored(tmp_path: Path) -> None:
    with pytest.raises(SchemeError, match="floating zero point is not stored"):
        plan(tmp_path, llama(), everything(Quantise(Scheme(4, "fz", 32))))


TIED = {"tie_word_embeddings": True}


def test_r31_and_r32_a_tied_head_that_is_stored_twice_is_stored_once(tmp_path: Path) -> None:
    found = plan(tmp_path, llama(), everything(), TIED)
    assert found["lm_head.weight"].fate == Alias("model.embed_tokens.weight")
    assert found["lm_head.weight"].stored == ()
    assert isinstance(found["model.embed_tokens.weight"].fate, Keep)


def test_r31_a_tied_head_that_is_not_stored_needs_nothing(tmp_path: Path) -> None:
    tensors = {name: value for name, value in llama().items() if name != "lm_head.weight"}
    assert not any(isinstance(each.fate, Alias) for each in plan(tmp_path, tensors, everything(), TIED).values())


def test_r31_an_untied_head_is_a_tensor_of_its_own(tmp_path: Path) -> None:
    assert isinstance(plan(tmp_path, llama(), everything(), {"tie_word_embeddings": False})["lm_head.weight"].fate, Keep)


def test_r32_a_tied_head_with_other_values_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", llama(), CONFIG | TIED)
    head = Checkpoint.open(folder).tensors["lm_head.weight"]
    poke(folder / head.file, head.start + 40, 1.5)
    with pytest.raises(SourceError, match=r"lm_head\.weight and model\.embed_tokens\.weight are stored with different values"):
        plan_fates(Checkpoint.open(folder), everything())


EIGHT = Quantise(Scheme(8, "sym", "channel"))
HEAD, TABLE, BOTH = "lm_head", "model.embed_tokens", "re:.*(lm_head|embed_tokens)$"
ONCE = {name: value for name, value in llama().items() if name != "lm_head.weight"}


@pytest.mark.parametrize("tensors", [llama(), ONCE], ids=["stored twice", "stored once"])
@pytest.mark.parametrize("pattern", [HEAD, TABLE, BOTH])
def test_r31_r32_a_tied_table_is_one_quantised_table_or_an_explicit_pair(pattern: str, tensors: Tensors, tmp_path: Path) -> None:
    """R31: (b), (c) untied explicitly where one half is quantised; R32: quantised once where both are."""
    folder = write_folder(tmp_path / "model", tensors, CONFIG | TIED)
    checkpoint = Checkpoint.open(folder)
    plans = plan_fates(checkpoint, [Rule(pattern, EIGHT), *everything()])
    found = {each.name: each for each in plans}
    table, head = found["model.embed_tokens.weight"], found["lm_head.weight"]
    config = output_config(checkpoint.config, plans)
    assert len(plans) == len(llama())
    if pattern == BOTH:
        assert (table.fate, head.fate, head.stored) == (EIGHT, Alias(table.name), ())
        assert config["tie_word_embeddings"] is True
        assert not plan_notes(plans)
        return
    assert (table.fate == EIGHT, head.fate == EIGHT) == (pattern == TABLE, pattern == HEAD)
    assert isinstance(table.fate if pattern == HEAD else head.fate, Keep)
    assert head.source_name == ("model.embed_tokens.weight" if tensors is ONCE else "lm_head.weight")
    assert head.info.shape == table.info.shape
    assert config["tie_word_embeddings"] is False
    assert [kind for kind, _ in plan_notes(plans)] == ["untied"]


def test_r32_two_schemes_for_one_tied_table_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"embed_tokens\.weight and lm_head\.weight are one tied table"):
        plan(tmp_path, llama(), [Rule(HEAD, EIGHT), Rule(TABLE, G32), *everything()], TIED)


@pytest.mark.parametrize("pattern", [HEAD, TABLE, BOTH])
def test_untied_tables_are_quantised_when_a_rule_names_them(pattern: str, tmp_path: Path) -> None:
    found = plan(tmp_path, llama(), [Rule(pattern, EIGHT), *everything()], {"tie_word_embeddings": False})
    named = {HEAD: {HEAD}, TABLE: {TABLE}, BOTH: {HEAD, TABLE}}[pattern]
    assert {each.module for each in found.values() if each.fate == EIGHT} == named


@pytest.mark.parametrize("pattern", ["*", "re:.*", "re:"])
def test_a_rule_for_everything_names_no_table(pattern: str, tmp_path: Path) -> None:
    for config in (TIED, {"tie_word_embeddings": False}):
        found = plan(tmp_path / str(config), llama(), [Rule(pattern, G32)], config)
        assert isinstance(found["model.embed_tokens.weight"].fate, Keep)
        assert not isinstance(found["lm_head.weight"].fate, Quantise)


def test_tables_are_rounded_without_data_whatever_the_quantiser_and_say_so(tmp_path: Path) -> None:
    clever = Quantise(Scheme(8, "sym", 32), "gptq", options=(("damping", 0.1),))
    folder = write_folder(tmp_path / "model", llama(), CONFIG | {"tie_word_embeddings": False})
    plans = plan_fates(Checkpoint.open(folder), [Rule(BOTH, clever), Rule("*", clever)])
    for each in plans:
        if isinstance(each.fate, Quantise):
            assert (each.fate.quantizer, bool(each.fate.options)) == (
                ("rtn", False) if "layers" not in each.name else ("gptq", True)
            )
    sentence = "rounded to nearest, not by gptq: calibration gathers nothing for embeddings and output heads"
    assert plan_notes(plans) == (("data-free", f"lm_head.weight and 1 more: {sentence}"),)


@pytest.mark.parametrize("width", [64, 96, 576, 80, 33])
def test_the_first_size_that_divides_the_columns_is_used_and_another_than_the_first_is_noted(width: int, tmp_path: Path) -> None:
    """576 columns are no multiple of 128: groups of 64. 33 columns fit none of the sizes, which is refused."""
    first, *others = (Quantise(Scheme(4, "sym", size)) for size in (128, 64, 32, 16))
    folder = write_folder(tmp_path / "model", llama(hidden=width, intermediate=256))
    rules = [Rule("*", first, tuple(others))]
    if width == 33:
        with pytest.raises(SchemeError, match="33 input columns are no multiple of the group size 128"):
            plan_fates(Checkpoint.open(folder), rules)
        return
    plans = plan_fates(Checkpoint.open(folder), rules)
    expected = {64: 64, 96: 32, 576: 64, 80: 16}[width]
    for each in plans:
        if isinstance(each.fate, Quantise):
            assert each.fate.scheme.blocks == (128 if "down" in each.name else expected)
            assert bool(each.notes) == ("down" not in each.name)
    ((_, text),) = plan_notes(plans)
    assert text == (
        f"model.layers.0.mlp.gate_proj.weight and 11 more: stored as int4-sym-g{expected}-f16, not int4-sym-g128-f16: "
        f"its {width} input columns are no multiple of the group size 128"
    )


def test_a_keep_rule_may_choose_the_type_that_is_stored(tmp_path: Path) -> None:
    tensors = llama() | {"model.layers.0.counts": ("I64", [4])}
    found = plan(tmp_path, tensors, [Rule("re:.*(norm|counts)$", Keep("recipe", "BF16")), *everything()])
    for name, each in found.items():
        if not isinstance(each.fate, Quantise):
            assert each.stored[0].dtype == ("BF16" if name.endswith("norm.weight") else tensors[name][0])
            assert each.stored[0].shape == each.info.shape


def test_transposed_families_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"gpt2 model, whose matrices are stored transposed \(Conv1D\)"):
        plan(tmp_path, {"h.0.attn.c_attn.weight": ("F32", [64, 192])}, everything(), {"model_type": "gpt2"})


@pytest.mark.parametrize("rules", [everything(), everything(Keep("recipe"))], ids=["no matrices", "all kept"])
def test_nothing_to_quantise_is_an_error(rules: list[Rule], tmp_path: Path) -> None:
    tensors = llama() if isinstance(rules[0].fate, Keep) else {"model.norm.weight": ("F32", [64])}
    with pytest.raises((SourceError, RecipeError)):
        plan(tmp_path, tensors, rules)
