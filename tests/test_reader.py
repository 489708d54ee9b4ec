"""What the real command wrote, read back three ways: our reader, transformers with compressed-tensors, the source rounded."""

from __future__ import annotations

import copy
import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from formats.checkpoint import Checkpoint
from formats.reader import Artefact, load_model
from quant.errors import CoverageError, SourceError
from quant.quantizers.rtn import round_to_nearest
from quant.scheme import Scheme
from tests.failure.damage import pack
from tests.tiny_runs import check_ledger, run, write_text

KINDS = {"--symmetric": "sym", "--full-range": "full", "--zero-point": "zp"}
IDS = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(5))
RECIPE = """
[[rule]]
match = "*.down_proj"
bits = 8
group_size = "channel"
[[rule]]
match = "*.0.self_attn.*"
bits = 3
group_size = 64
[[rule]]
match = "*.o_proj"
keep = true
[[rule]]
match = "*"
group_size = 32
"""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(IDS).logits
    return found


def transformers_logits(folder: Path, zero_point: bool = False) -> Tensor:
    """What the library computes. It cannot load packed zero points into a packed model (an upstream defect): decompress first."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    options = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if zero_point else {}
    return logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options))


@functools.cache
def float_model(source: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)


def rounded_logits(source: Path, scheme: Scheme) -> Tensor:
    """The float model with every matrix of its blocks rounded in memory: no file, no codec, no reader of ours."""
    model = copy.deepcopy(float_model(source))
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                module.weight.copy_(round_to_nearest(module.weight, scheme).dequantise())
    return logits(model)


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("blocks", ["32", "64", "channel", "tensor"])
@pytest.mark.parametrize("zero", ["--symmetric", "--zero-point"])
@pytest.mark.parametrize("bits", range(2, 9))
def test_three_readers_see_one_model_and_the_ledger_sums(
    bits: int, zero: str, blocks: str, tiny_model: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    """Scales in float32: the library rounds weights to the type of the scales where it decompresses while loading."""
    output, source = tmp_path / "out", tiny_model("llama")
    manifest = run("rtn", source, output, text, "--bits", str(bits), zero, "--group-size", blocks, "--scale-dtype", "f32")
    check_ledger(output, manifest)
    scheme = Scheme.parse(f"int{bits}-{KINDS[zero]}-{'g' * blocks.isdigit()}{blocks}-f32")
    assert {record.scheme for record in manifest.tensors if record.fate == "quantised"} == {str(scheme)}
    ours = logits(load_model(output))
    assert torch.equal(ours, rounded_logits(source, scheme))
    assert torch.equal(ours, transformers_logits(output, not scheme.symmetric))
    artefact, checkpoint = Artefact(output), Checkpoint.open(source)
    modules = sorted(artefact.modules())
    assert len(modules) == 14
    for module in modules:
        stored, expected = artefact.qtensor(module), round_to_nearest(checkpoint.tensor(f"{module}.weight"), scheme)
        assert stored.scheme == scheme
        assert torch.equal(stored.codes, expected.codes)
        assert torch.equal(stored.scales, expected.scales)
        assert stored.zeros is expected.zeros or torch.equal(stored.zeros, expected.zeros)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("scale", ["f16", "bf16"])
@pytest.mark.parametrize("zero", ["--symmetric", "--full-range", "--zero-point"])
def test_narrow_scales_are_read_as_they_are(
    zero: str, scale: str, tiny_model: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    output, source = tmp_path / "out", tiny_model("llama")
    run("rtn", source, output, text, zero, "--scale-dtype", scale)
    ours = logits(load_model(output))
    assert torch.equal(ours, rounded_logits(source, Scheme(4, KINDS[zero], 32, scale)))  # type: ignore[arg-type]
    # With a zero point the library decompresses into the type of the scales: 2^-11 or 2^-8 of each weight is its own.
    close = 0.0 if zero != "--zero-point" else {"f16": 1e-3, "bf16": 1e-2}[scale]
    torch.testing.assert_close(transformers_logits(output, zero == "--zero-point"), ours, rtol=0, atol=close)


@pytest.mark.parametrize(
    ("name", "method"), [*itertools.product(["tied", "qwen2", "bfloat16", "sharded", "llama"], ["rtn", "awq"]), ("ragged", "rtn")]
)
def test_transformers_computes_what_we_compute(
    name: str, method: str, tiny_model: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    run(method, tiny_model(name), output, text, "--group-size", "16", "--bits", "3")
    ours = logits(load_model(output))
    torch.testing.assert_close(transformers_logits(output), ours, rtol=0, atol=1e-6)
    plain = logits(load_model(tiny_model(name)))
    error = float((ours - plain).norm() / plain.norm())
    assert 0 < error < 0.6, "3 bits change a model, but leave it a likeness"


@pytest.mark.parametrize("method", ["rtn", "awq"])
def test_r30_biases_of_8_bit_weights_are_right(method: str, tmp_path: Path, text: Path) -> None:
    """Biases of 5 on queries, keys and values: dropped, doubled or misplaced ones would swamp 8-bit noise."""
    from tests.conftest import write_tiny_tokenizer
    from tests.numerics.blocks import save_variant

    source, output = save_variant("qwen2, biases 5", tmp_path / "model"), tmp_path / "out"
    write_tiny_tokenizer(source)
    run(method, source, output, text, "--bits", "8")
    plain, found = logits(load_model(source)), logits(load_model(output))
    assert float((found - plain).norm() / plain.norm()) < 0.02
    torch.testing.assert_close(transformers_logits(output), found, rtol=0, atol=1e-5)
    names = [name for name in Artefact(output).tensors if name.endswith("bias")]
    assert sorted(names) == sorted(name for name in Checkpoint.open(source).tensors if name.endswith("bias"))
    if method == "rtn":
        assert all(torch.equal(Artefact(output).tensor(name), Checkpoint.open(source).tensor(name)) for name in names)


@pytest.mark.parametrize("method", ["rtn", "awq"])
def test_gemma2_is_read_quantised_and_read_back(method: str, tmp_path: Path, text: Path) -> None:
    """Its attention has no fused form in the library, and its norms multiply by one plus their weight."""
    from tests.conftest import write_tiny_tokenizer
    from tests.numerics.blocks import save_variant

    source, output = save_variant("gemma2, bfloat16", tmp_path / "model"), tmp_path / "out"
    write_tiny_tokenizer(source)
    manifest = run(method, source, output, text, "--bits", "8")
    assert {record.fate for record in manifest.tensors} == {"quantised", "kept", *(["folded"] if method == "awq" else [])}
    plain, found = logits(load_model(source)), logits(load_model(output))
    assert float((found - plain).norm() / plain.norm()) < 0.02
    torch.testing.assert_close(transformers_logits(output), found, rtol=0, atol=1e-5)


def test_several_schemes_in_one_model(tiny_model: Callable[[str], Path], text: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    output = tmp_path / "out"
    manifest = run("rtn", tiny_model("llama"), output, text, "--recipe", str(tmp_path / "recipe.toml"), without=("--group-size",))
    schemes = {record.name: record.scheme for record in manifest.tensors if record.fate == "quantised"}
    assert schemes["model.layers.0.self_attn.o_proj.weight"] == "int3-sym-g64-f16", "the first match decides"
    assert schemes["model.layers.1.mlp.down_proj.weight"] == "int8-sym-channel-f16"
    assert "model.layers.1.self_attn.o_proj.weight" not in schemes
    artefact = Artefact(output)
    assert {f"{module}.weight": str(artefact.qtensor(module).scheme) for module in artefact.modules()} == schemes
    assert torch.equal(transformers_logits(output), logits(load_model(output)))


def test_a_group_that_names_a_module_goes_before_one_that_names_its_class(
    tiny_model: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    """As engines match, whatever the order of the groups: the file of somebody else may mix the two."""
    (tmp_path / "recipe.toml").write_text('[[rule]]\nmatch = "*.down_proj"\nbits = 8\n[[rule]]\nmatch = "*"\n')
    recipe = ["--recipe", str(tmp_path / "recipe.toml")]
    run("rtn", tiny_model("llama"), tmp_path / "out", text, *recipe, without=("--group-size",))
    expected = logits(load_model(tmp_path / "out"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    groups = sorted(config["quantization_config"]["config_groups"].values(), key=lambda group: group["weights"]["num_bits"])
    groups[0]["targets"] = ["Linear"]
    config["quantization_config"]["config_groups"] = {f"group_{index}": group for index, group in enumerate(groups)}
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    assert torch.equal(logits(load_model(tmp_path / "out")), expected)


def test_mixture_of_experts(tiny_model: Callable[[str], Path], text: Path, tmp_path: Path) -> None:
    """Experts are stored one by one and live fused: each is the rounding of its own source matrix, the router is the source's."""
    output, source = tmp_path / "out", tiny_model("moe")
    manifest = run("rtn", source, output, text, "--bits", "8")
    fates = {record.name: record.fate for record in manifest.tensors}
    assert sum(fate == "quantised" for fate in fates.values()) == 56
    assert fates["model.layers.0.mlp.gate.weight"] == "kept"
    artefact, checkpoint = Artefact(output), Checkpoint.open(source)
    for name in ("model.layers.1.mlp.experts.7.down_proj", "model.layers.0.mlp.experts.0.gate_proj"):
        expected = round_to_nearest(checkpoint.tensor(f"{name}.weight"), Scheme(8, "sym", 32))
        assert torch.equal(artefact.qtensor(name).codes, expected.codes)
    plain, found = logits(load_model(source)), logits(load_model(output))
    assert 0 < float((found - plain).norm() / plain.norm()) < 0.02


def test_r31_a_tied_head_is_stored_once_and_stays_tied(tiny_model: Callable[[str], Path], text: Path, tmp_path: Path) -> None:
    run("rtn", tiny_model("tied"), tmp_path / "out", text)
    assert "lm_head.weight" not in Artefact(tmp_path / "out").tensors
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is True
    model = load_model(tmp_path / "out")
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_a_float_checkpoint_reads_as_transformers_reads_it(tiny_model: Callable[[str], Path]) -> None:
    from transformers import AutoModelForCausalLM

    for name in ("llama", "tied", "qwen2", "bfloat16", "sharded", "moe"):
        theirs = AutoModelForCausalLM.from_pretrained(tiny_model(name), dtype=torch.float32)
        assert torch.equal(logits(load_model(tiny_model(name))), logits(theirs)), name


def test_a_missing_parameter_is_named(tiny_copy: Callable[[str], Path]) -> None:
    from safetensors.torch import load_file, save_file

    folder = tiny_copy("llama")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CoverageError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(folder)


def test_a_packed_matrix_that_no_group_describes_is_named(tmp_path: Path) -> None:
    header = {"a.weight_packed": {"dtype": "I32", "shape": [1], "data_offsets": [0, 4]}}
    (tmp_path / "model.safetensors").write_bytes(pack(header, bytes(4)))
    groups = {"group_0": {"targets": ["re:b$"], "format": "pack-quantized"}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"config_groups": groups}}))
    with pytest.raises(SourceError, match="a is stored packed, but no group"):
        Artefact(tmp_path).qtensor("a")
