"""W8A8: rounded inputs against an independent computation, smoothing that helps, files that transformers reads alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from formats.codec import get_codec
from formats.reader import Artefact, load_model
from quant.activations import ActivationScheme
from quant.errors import BitledgerError, SchemeError
from quant.transforms.smoothquant import largest_columns, smooth_factors
from tests.tiny_runs import check_ledger, run, write_text

IDS = torch.randint(0, 256, (3, 24), generator=torch.Generator().manual_seed(0))
NAMES = ("a8-token-dynamic", "a8-tensor-dynamic", "a8-tensor-static")


@pytest.fixture
def outlier_model(tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
    """A tiny Llama whose norms blow two channels up, as large models do by themselves."""
    import shutil

    from transformers import AutoModelForCausalLM

    folder = Path(shutil.copytree(tiny_model("llama"), tmp_path / "outliers"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight[3] = 60
            layer.post_attention_layernorm.weight[5] = 60
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_the_name_is_the_identity(name: str) -> None:
    assert str(ActivationScheme.parse(name)) == name


@pytest.mark.parametrize("name", ["a8", "a4-token-dynamic", "a8-token-static", ""])
def test_what_is_no_activation_scheme_is_refused(name: str) -> None:
    with pytest.raises(SchemeError):
        ActivationScheme.parse(name)


def test_inputs_are_rounded_as_numpy_does() -> None:
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    wide = x.numpy()
    token = np.abs(wide).max(-1, keepdims=True) / np.float32(127)
    assert np.allclose(ActivationScheme.parse(NAMES[0]).rounded(x).numpy(), np.rint(wide / token) * token, atol=1e-6)
    tensor = np.abs(wide).max() / np.float32(127)
    assert np.allclose(ActivationScheme.parse(NAMES[1]).rounded(x).numpy(), np.rint(wide / tensor) * tensor, atol=1e-6)
    static = ActivationScheme.parse(NAMES[2])
    codes = np.clip(np.rint(wide / 0.01), -127, 127)
    assert np.allclose(static.rounded(x, torch.tensor([0.01])).numpy(), codes * 0.01, atol=1e-6)
    with pytest.raises(SchemeError, match="calibrated"):
        static.rounded(x)
    assert not ActivationScheme().rounded(torch.zeros(2, 4)).any()


def test_factors_follow_the_paper_and_change_nothing_in_exact_arithmetic() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(9, 16, generator=generator, dtype=torch.float64) for _ in range(2))
    s = smooth_factors(x.abs().amax(0), largest_columns([w]), 0.7).double()
    assert torch.allclose(s, x.abs().amax(0) ** 0.7 / w.abs().amax(0) ** 0.3, rtol=1e-5)
    assert torch.allclose((x / s) @ (w * s).T, x @ w.T)
    dead = smooth_factors(torch.zeros(4), torch.zeros(4), 0.5)
    assert bool(torch.isfinite(dead).all())
    assert bool((dead > 0).all())


def simulated(folder: Path) -> Any:
    """The artefact's model with inputs rounded by hand, from its codes and scales alone."""
    artefact, model = Artefact(folder), load_model(folder)
    for module in artefact.modules():
        layer = model.get_submodule(module)
        layer._forward_pre_hooks.clear()
        codes, scales = artefact.tensor(f"{module}.weight"), artefact.tensor(f"{module}.weight_scale")

        def forward(x: torch.Tensor, codes: torch.Tensor = codes, scales: torch.Tensor = scales) -> torch.Tensor:
            step = x.abs().amax(-1, keepdim=True).double() / 127
            integers = torch.round(x.double() / step).clamp(-127, 127) @ codes.double().T
            return (integers * step * scales.double().T).float()

        layer.forward = forward
    return model


@pytest.mark.parametrize("method", ["smoothquant", "smoothquant+gptq"])
def test_what_is_measured_is_eight_bits_times_eight_bits(outlier_model: Path, tmp_path: Path, method: str) -> None:
    manifest = run(method, outlier_model, tmp_path / "out", write_text(tmp_path), without=("--group-size",))
    check_ledger(tmp_path / "out", manifest)
    records = [record for record in manifest.tensors if record.fate == "quantised"]
    assert {record.codec for record in records} == {"int-quantized"}
    assert {record.activations for record in records} == {"a8-token-dynamic"}
    assert {record.fate for record in manifest.tensors if record.name.endswith("layernorm.weight")} == {"folded"}
    with torch.inference_mode():
        ours, wanted = load_model(tmp_path / "out")(IDS).logits, simulated(tmp_path / "out")(IDS).logits
        weights_only = load_model(tmp_path / "out")
        for module in Artefact(tmp_path / "out").modules():
            weights_only.get_submodule(module)._forward_pre_hooks.clear()
        rounding = float((ours - weights_only(IDS).logits).norm())
    assert rounding > 1e-4, "inputs were not rounded"
    # A value half way between two codes may fall to either side in other arithmetic: a few codes of thousands.
    assert float((ours - wanted).norm()) < 0.3 * rounding


def test_transformers_reads_the_same_model(outlier_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    run("smoothquant", outlier_model, tmp_path / "out", write_text(tmp_path), without=("--group-size",))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.inference_mode():
        found, ours = theirs(IDS).logits, load_model(tmp_path / "out")(IDS).logits
        plain = load_model(outlier_model)(IDS).logits
        for module in Artefact(tmp_path / "out").modules():  # the same weights to the last bit; rounded inputs differ by a hair
            weight: Any = theirs.get_submodule(module).weight
            assert torch.equal(weight.float(), Artefact(tmp_path / "out").qtensor(module).dequantise())
    # Its scale of an input is the largest magnitude over 127.5, that of vLLM's kernels and ours over 127.
    ratio = float((found - plain).norm() / (ours - plain).norm())
    assert 0.5 < ratio < 2


def test_smoothing_helps_where_channels_stick_out(outlier_model: Path, tmp_path: Path) -> None:
    text = write_text(tmp_path)
    scheme = ("--scheme", "int8-sym-channel-f32", "--format", "int-quantized")
    run("rtn", outlier_model, tmp_path / "plain", text, *scheme, without=("--group-size",))
    run("smoothquant", outlier_model, tmp_path / "smooth", text, without=("--group-size",))
    run("smoothquant", outlier_model, tmp_path / "half", text, "--alpha", "0.5", without=("--group-size",))
    with torch.inference_mode():
        wanted = load_model(outlier_model)(IDS).logits
        errors = {name: float((load_model(tmp_path / name)(IDS).logits - wanted).norm()) for name in ("plain", "smooth", "half")}
    assert errors["smooth"] < 0.7 * errors["plain"]
    assert errors["half"] < 0.9 * errors["plain"]


@pytest.mark.parametrize(
    ("method", "options", "says"),
    [
        ("awq", ("--alpha", "0.5"), "does not smooth"),
        ("smoothquant", ("--alpha", "2"), "from 0 to 1"),
        ("smoothquant", ("--alpha", "half"), "from 0 to 1"),
        ("smoothquant", ("--bits", "4"), "names its own scheme"),
        ("smoothquant", ("--format", "dense"), "rounded inputs"),
    ],
)
def test_what_makes_no_sense_is_refused(
    tiny_model: Callable[[str], Path], tmp_path: Path, method: str, options: tuple[str, ...], says: str
) -> None:
    with pytest.raises(BitledgerError, match=says):
        run(method, tiny_model("llama"), tmp_path / "out", write_text(tmp_path), *options, without=("--group-size",))
    assert not (tmp_path / "out").exists()


def test_groups_and_other_widths_do_not_fit_the_layout() -> None:
    from quant.scheme import Scheme

    codec = get_codec("int-quantized")
    for name in ("int8-sym-g64-f16", "int4-sym-channel-f32", "int8-zp-channel-f32", "e4m3-channel-f32"):
        assert codec.refusal(Scheme.parse(name), (8, 64)) is not None
    assert codec.refusal(Scheme.parse("int8-sym-tensor-bf16"), (8, 64)) is None
