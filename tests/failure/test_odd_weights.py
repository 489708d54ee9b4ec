"""Weights that are finite and strange: huge, dead, overflowing on the way, or no parameters at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quant.errors import BitledgerError, NonFiniteTensor, SchemeError, SourceError
from tests.tiny_runs import run, write_text


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


def changed(source: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """The tensors of a copied model, changed and saved again."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    return source


@pytest.mark.parametrize("method", ["rtn", "awq"])
def test_tensors_that_are_no_parameters_are_carried_along(
    method: str, tiny_copy: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    """Older Llama checkpoints store the rotary frequencies of every block."""

    def add(tensors: dict[str, Tensor]) -> None:
        for block in range(2):
            tensors[f"model.layers.{block}.self_attn.rotary_emb.inv_freq"] = torch.arange(8.0)

    manifest = run(method, changed(tiny_copy("llama"), add), tmp_path / "out", text)
    fates = {record.name: record.fate for record in manifest.tensors}
    assert fates["model.layers.1.self_attn.rotary_emb.inv_freq"] == "kept"
    assert all(measurement.value is not None for measurement in manifest.measurements)


@pytest.mark.parametrize("method", ["rtn", "awq"])
def test_r32_a_tied_head_that_the_source_stores_twice_is_stored_once(
    method: str, tiny_copy: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    def double(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    manifest = run(method, changed(tiny_copy("tied"), double), tmp_path / "out", text)
    record = next(record for record in manifest.tensors if record.name == "lm_head.weight")
    assert (record.fate, record.alias_of, record.parts) == ("alias", "model.embed_tokens.weight", [])
    assert all(measurement.value is not None for measurement in manifest.measurements)


@pytest.mark.parametrize("zero", ["--symmetric", "--zero-point"])
def test_r12_dead_columns_and_channels_leave_awq_unharmed(
    zero: str, tiny_copy: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    def kill(tensors: dict[str, Tensor]) -> None:
        for name in ("q_proj", "k_proj", "v_proj"):
            tensors[f"model.layers.0.self_attn.{name}.weight"][:, 3] = 0
        tensors["model.layers.1.input_layernorm.weight"][5] = 0
        tensors["model.layers.1.mlp.up_proj.weight"][7] = 0
        tensors["model.layers.0.mlp.down_proj.weight"].zero_()

    manifest = run("awq", changed(tiny_copy("llama"), kill), tmp_path / "out", text, zero)
    errors = [record.relative_error for record in manifest.tensors if record.fate == "quantised"]
    assert max(error for error in errors if error is not None) < 0.2
    values = {measurement.name: measurement.value for measurement in manifest.measurements}
    assert values["ln_perplexity_ratio"] is not None
    assert abs(values["ln_perplexity_ratio"]) < 0.1


@pytest.mark.parametrize("method", ["rtn", "awq"])
def test_r03_a_scale_that_overflows_names_the_tensor_and_nothing_is_written(
    method: str, tiny_copy: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    def grow(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.self_attn.k_proj.weight"][3, 5] = 1e6

    source = changed(tiny_copy("llama"), grow)
    with pytest.raises(SchemeError, match=r"model\.layers\.1\.self_attn\.k_proj\.weight.*overflows f16; store scales as bf16"):
        run(method, source, tmp_path / "out", text)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
    manifest = run(method, source, tmp_path / "out", text, "--scale-dtype", "bf16")
    assert all(record.relative_error is None or record.relative_error < 1 for record in manifest.tensors)


def test_weights_whose_squares_overflow_have_an_error_all_the_same(
    tiny_copy: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    def grow(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.mlp.down_proj.weight"] *= 1e36

    manifest = run("rtn", changed(tiny_copy("llama"), grow), tmp_path / "out", text, "--scale-dtype", "f32")
    found = next(record for record in manifest.tensors if record.name == "model.layers.0.mlp.down_proj.weight")
    assert found.relative_error is not None
    assert 0.01 < found.relative_error < 0.2


@pytest.mark.parametrize(
    ("model", "options", "kind"), [("moe", ["--tune", "2"], SourceError), ("gpt2", [], SourceError), ("ragged", [], SchemeError)]
)
def test_awq_refuses_what_it_cannot_run_and_writes_nothing(
    model: str, options: list[str], kind: type[BitledgerError], tiny_model: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    with pytest.raises(kind):
        run("awq", tiny_model(model), tmp_path / "out", text, *options)
    assert list(tmp_path.iterdir()) == []


def test_r17_hidden_states_that_overflow_stop_awq(tiny_copy: Callable[[str], Path], text: Path, tmp_path: Path) -> None:
    def grow(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"] *= 1e38

    with pytest.raises(NonFiniteTensor, match=r"model\.layers\.1\.mlp\.down_proj"):
        run("awq", changed(tiny_copy("llama"), grow), tmp_path / "out", text, "--scale-dtype", "f32")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
