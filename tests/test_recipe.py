"""Recipe files: what they say per pattern, and every way of getting one wrong, before any work."""

from __future__ import annotations

from pathlib import Path

import pytest

from formats.checkpoint import Checkpoint
from formats.fates import Keep, Quantise, Rule
from formats.planning import plan_fates
from pipelines.recipe import find_recipe, load_recipe, parse_group_size, preset_names
from quant.errors import BitledgerError, RecipeError, SchemeError
from quant.scheme import Scheme
from tests.failure.damage import write_folder
from tests.test_fates import llama

REST = '[[rule]]\nmatch = "*"\ngroup_size = 32\n'


def load(tmp_path: Path, text: str, method: str = "rtn") -> tuple[Rule, ...]:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    return load_recipe(path, method)


def plan(tmp_path: Path, text: str) -> dict[str, str]:
    """Module -> scheme, or "" for what is kept."""
    checkpoint = Checkpoint.open(write_folder(tmp_path / "model", llama()))
    found = plan_fates(checkpoint, load(tmp_path, text))
    return {each.module: str(each.fate.scheme) if isinstance(each.fate, Quantise) else "" for each in found}


def test_a_recipe_says_scheme_or_keep_per_pattern_and_the_first_match_decides(tmp_path: Path) -> None:
    found = plan(
        tmp_path,
        """
        method = "rtn"
        [[rule]]
        match = "*.0.mlp.*"
        keep = true
        [[rule]]
        match = "re:.*\\\\.(gate|up)_proj$"
        bits = 3
        group_size = "channel"
        symmetric = false
        scale_dtype = "f32"
        [[rule]]
        match = "*.down_proj"
        bits = 8
        group_size = "tensor"
        [[rule]]
        match = "*.o_proj"
        bits = 2
        full_range = true
        [[rule]]
        match = "*"
        """,
    )
    expected = {
        "model.layers.0.mlp.down_proj": "",
        "model.layers.0.mlp.up_proj": "",
        "model.layers.1.mlp.up_proj": "int3-zp-channel-f32",
        "model.layers.1.mlp.gate_proj": "int3-zp-channel-f32",
        "model.layers.1.mlp.down_proj": "int8-sym-tensor-f16",
        "model.layers.0.self_attn.q_proj": "int4-sym-g64-f16",  # the defaults of the command line
        "model.layers.1.self_attn.v_proj": "int4-sym-g64-f16",
        "model.layers.1.self_attn.o_proj": "int2-full-g64-f16",
        "lm_head": "",
    }
    assert {module: found[module] for module in expected} == expected


def test_a_kept_matrix_says_that_the_recipe_did_it(tmp_path: Path) -> None:
    rules = load(tmp_path, '[[rule]]\nmatch = "*.o_proj"\nkeep = true\n' + REST)
    assert rules == (
        Rule("*.o_proj", Keep("kept in float by the recipe")),
        Rule("*", Quantise(Scheme(4, "sym", 32))),
    )  # fmt: skip


WRONG = {
    "unknown key": ('[[rule]]\nmatch = "*"\nbit = 4\n', "rule.0.bit"),
    "unknown key at the top": ('name = "x"\n' + REST, "name"),
    "no rules": ("", "rule"),
    "empty rules": ("rule = []\n", "rule"),
    "no pattern": ("[[rule]]\nbits = 4\n", "rule.0.match"),
    "empty pattern": ('[[rule]]\nmatch = ""\n', "rule.0.match"),
    "bits as text": ('[[rule]]\nmatch = "*"\nbits = "4"\n', "rule.0.bits"),
    "bits as a fraction": ('[[rule]]\nmatch = "*"\nbits = 4.5\n', "rule.0.bits"),
    "bits as a truth": ('[[rule]]\nmatch = "*"\nbits = true\n', "rule.0.bits"),
    "bits 9": ('[[rule]]\nmatch = "*"\nbits = 9\n', "2 to 8, got 9"),
    "bits 1": ('[[rule]]\nmatch = "*"\nbits = 1\n', "2 to 8, got 1"),
    "bits 0": ('[[rule]]\nmatch = "*"\nbits = 0\n', "2 to 8, got 0"),
    "group 0": ('[[rule]]\nmatch = "*"\ngroup_size = 0\n', "got 0"),
    "group below 0": ('[[rule]]\nmatch = "*"\ngroup_size = -1\n', "got -1"),
    "group name": ('[[rule]]\nmatch = "*"\ngroup_size = "row"\n', "group_size"),
    "scale type": ('[[rule]]\nmatch = "*"\nscale_dtype = "f8"\n', "scale_dtype"),
    "keep and bits": ('[[rule]]\nmatch = "*.o_proj"\nkeep = true\nbits = 8\n' + REST, "leaves no place for bits"),
    "keep and group": ('[[rule]]\nmatch = "*.o_proj"\nkeep = true\ngroup_size = 8\n' + REST, "leaves no place for group_size"),
    "keep and zero point": ('[[rule]]\nmatch = "*"\nkeep = true\nsymmetric = false\n', "leaves no place for symmetric"),
    "keep and range": ('[[rule]]\nmatch = "*"\nkeep = true\nfull_range = true\n', "leaves no place for full_range"),
    "range and zero point": ('[[rule]]\nmatch = "*"\nsymmetric = false\nfull_range = true\n', "full_range is a kind"),
    "another method": ('method = "awq"\n' + REST, "asks for 'rtn'"),
    "no TOML": ("[[rule]\n", "not TOML"),
    "regular expression": ('[[rule]]\nmatch = "re:["\n' + REST, "not a regular expression"),
    "idle pattern": ('[[rule]]\nmatch = "*.nosuch"\n' + REST, "'*.nosuch': no matrix"),
    "two idle patterns": ('[[rule]]\nmatch = "a"\n[[rule]]\nmatch = "b"\n' + REST, "'a', 'b': no matrix"),
    "pattern after the rule for all": (REST + '[[rule]]\nmatch = "*.o_proj"\n', "'*.o_proj': no matrix"),
    "pattern twice": ('[[rule]]\nmatch = "*.o_proj"\nbits = 8\n' * 2 + REST, "'*.o_proj': no matrix"),
    "only vectors": ('[[rule]]\nmatch = "*layernorm"\nbits = 8\n' + REST, "'*layernorm': no matrix"),
    "unmatched matrices": ('[[rule]]\nmatch = "*.o_proj"\n', "no rule matches model.layers.0.mlp.down_proj.weight"),
    "router": ('[[rule]]\nmatch = "*.gate"\n' + REST, "'*.gate': no matrix"),
    "dtype of a scheme": ('[[rule]]\nmatch = "*.o_proj"\ndtype = "bf16"\n' + REST, "keep = true"),
    "storage type": ('[[rule]]\nmatch = "*norm"\nkeep = true\ndtype = "f8"\n' + REST, "dtype"),
    "quantizer": ('[[rule]]\nmatch = "*"\nquantizer = "gtpq"\n', "no such quantizer: 'gtpq' (there are: "),
    "keep and quantizer": ('[[rule]]\nmatch = "*"\nkeep = true\nquantizer = "rtn"\n', "no place for quantizer"),
    "option of another": ('[[rule]]\nmatch = "*"\norder = "none"\n', "rtn has no option order"),
    "no sizes": ('[[rule]]\nmatch = "*"\ngroup_size = []\n', "empty list"),
    "sizes as text": ('[[rule]]\nmatch = "*"\ngroup_size = ["64"]\n', "group_size"),
    "no damping": ('[[rule]]\nmatch = "*"\nquantizer = "gptq"\ndamping = 0.0\n', "damping"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_recipe_is_one_sentence_that_names_the_thing(case: str, tmp_path: Path) -> None:
    text, words = WRONG[case]
    with pytest.raises((RecipeError, SchemeError)) as caught:
        plan(tmp_path, text)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_problems_of_a_recipe_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        plan(tmp_path, '[[rule]]\nmatch = "*.nosuch"\n[[rule]]\nmatch = "projection"\n[[rule]]\nmatch = "*.o_proj"\n')
    for words in ("'*.nosuch', 'projection': no matrix", "no rule matches model.layers.0.mlp.down_proj.weight"):
        assert words in str(caught.value)


def test_a_keep_rule_may_name_what_is_kept_anyway(tmp_path: Path) -> None:
    assert plan(tmp_path, '[[rule]]\nmatch = "lm_head"\nkeep = true\n' + REST)["lm_head"] == ""


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path, "No such file"),
        (lambda path: path.parent, "directory"),
        (lambda path: path.write_bytes(b"\xff\xfe\x00") and path, "not TOML"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(make: object, words: str, tmp_path: Path) -> None:
    path = make(tmp_path / "recipe.toml")  # type: ignore[operator]
    with pytest.raises(RecipeError, match=words) as caught:
        load_recipe(path, "rtn")
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(("text", "blocks"), [("channel", "channel"), ("tensor", "tensor"), ("32", 32), ("1", 1), ("0", 0)])
def test_group_sizes_of_the_command_line(text: str, blocks: object) -> None:
    assert parse_group_size(text) == blocks


@pytest.mark.parametrize("text", ["", "g32", "32.0", "row", "Channel", "3 2"])
def test_other_group_sizes_are_refused(text: str) -> None:
    with pytest.raises(BitledgerError, match="group size must be a number, 'channel' or 'tensor'"):
        parse_group_size(text)


@pytest.mark.parametrize("bits", range(2, 9))
def test_a_scheme_and_its_name_are_one(bits: int) -> None:
    for zero in ("sym", "full", "zp", "fz"):
        for blocks in (1, 32, 576, "channel", "tensor"):
            for scale in ("f16", "bf16", "f32"):
                scheme = Scheme(bits, zero, blocks, scale)
                assert Scheme.parse(str(scheme)) == scheme
                assert scheme.bits_per_weight((8, 1152)) >= bits


@pytest.mark.parametrize(
    "text",
    [
        "",
        "int4",
        "int4-sym-g0-f16",
        "int9-sym-g32-f16",
        "int1-sym-g32-f16",
        "int4-sym-g32-f8",
        "INT4-sym-g32-f16",
        "int4-sym-g32-f16 ",
    ],
)
def test_what_is_no_scheme_is_refused(text: str) -> None:
    with pytest.raises(SchemeError):
        Scheme.parse(text)


def test_a_rule_may_name_its_own_quantiser_and_options(tmp_path: Path) -> None:
    text = '[[rule]]\nmatch = "*.o_proj"\nquantizer = "rtn"\n[[rule]]\nmatch = "*"\norder = "none"\ndamping = 0.05\n'
    rounded, rest = load(tmp_path, text, "gptq")
    assert rounded.fate == Quantise(Scheme(4, "sym", 64), "rtn")
    assert rest.fate == Quantise(Scheme(4, "sym", 64), "gptq", options=(("damping", 0.05), ("order", "none")))


def test_sizes_are_tried_in_their_order(tmp_path: Path) -> None:
    (rule,) = load(tmp_path, '[[rule]]\nmatch = "*"\ngroup_size = [128, 64, "channel"]\n')
    sizes = [fate.scheme.blocks for fate in (rule.fate, *rule.otherwise) if isinstance(fate, Quantise)]
    assert sizes == [128, 64, "channel"]


@pytest.mark.parametrize("name", preset_names())
def test_presets_are_recipes_that_fit_a_model(name: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_folder(tmp_path / "model", llama(hidden=576, intermediate=1536)))
    rules = load_recipe(find_recipe(name), "rtn")
    assert any(isinstance(each.fate, Quantise) for each in plan_fates(checkpoint, rules))


def test_the_seed_preset_is_the_seeds_case(tmp_path: Path) -> None:
    tensors = llama(hidden=576, intermediate=1536)
    checkpoint = Checkpoint.open(write_folder(tmp_path / "model", tensors))
    found = {each.module: each for each in plan_fates(checkpoint, load_recipe(find_recipe("seed-mixed"), "rtn"))}
    schemes = {name: str(each.fate.scheme) for name, each in found.items() if isinstance(each.fate, Quantise)}
    assert schemes["lm_head"] == schemes["model.embed_tokens"] == "int8-sym-channel-f16"
    assert schemes["model.layers.1.mlp.down_proj"] == "int4-sym-g128-f16"
    assert schemes["model.layers.1.mlp.up_proj"] == "int4-sym-g64-f16"
    assert {each.stored_dtype for name, each in found.items() if name.endswith("norm")} == {"BF16"}


def test_a_wrong_preset_name_lists_the_right_ones(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"no such recipe: 'seed-mxed' \(did you mean 'seed-mixed'\? presets: "):
        find_recipe("seed-mxed")
    assert find_recipe(str(tmp_path / "own.toml")) == tmp_path / "own.toml"
