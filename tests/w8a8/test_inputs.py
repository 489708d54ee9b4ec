"""Rounded inputs from the option to the engine: what is measured, recorded in recipes and refused, beside products by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from calib.corpora import load_corpus
from calib.tokenizer import TextTokenizer
from calib.windows import calibration_windows, evaluation_windows, tokenise
from formats.integrity import verify_folder
from formats.manifest import Manifest
from formats.reader import Artefact, load_model
from quant.activations import ALIASES
from quant.errors import RecipeError, SchemeError, SourceError
from tests.tiny_runs import WINDOW, check_ledger, run
from tests.w8a8.conftest import SHORT, W8, logits


def by_hand(folder: Path, name: str) -> Any:
    """The artefact's model with every product written out from its stored tensors, in float64."""
    artefact, model = Artefact(folder), load_model(folder)
    for module in artefact.modules():
        layer = model.get_submodule(module)
        layer._forward_pre_hooks.clear()
        codes, scales = artefact.tensor(f"{module}.weight").double(), artefact.tensor(f"{module}.weight_scale").double()
        static = artefact.tensor(f"{module}.input_scale").double() if name == "static" else None

        def forward(
            x: Tensor, codes: Tensor = codes, scales: Tensor = scales, static: Tensor | None = static, layer: Any = layer
        ) -> Tensor:
            step = x.abs().amax(-1, keepdim=True).double() / 127 if name == "token" else x.abs().max().double() / 127
            step = step if static is None else static
            integers = torch.round(x.double() / step).clamp(-128, 127) @ codes.T
            return (integers * step * scales.reshape(1, -1)).to(x.dtype)

        layer.forward = forward
    return model


@pytest.mark.parametrize("method", ["rtn", "smoothquant", "smoothquant+gptq"])
@pytest.mark.parametrize("name", SHORT)
def test_what_is_measured_is_what_integers_give(
    name: str, method: str, text: Path, made: Callable[..., tuple[Path, Manifest]]
) -> None:
    """The manifest's perplexity is that of int8 codes times int8 codes, not that of rounded weights alone."""
    options = W8 if method == "rtn" else ()
    folder, manifest = made(method, *options, "--activations", name)
    check_ledger(folder, manifest)
    verify_folder(folder)
    quantised = [record for record in manifest.tensors if record.fate == "quantised"]
    assert {(record.codec, record.activations) for record in quantised} == {("int-quantized", ALIASES[name])}
    assert sum(line.input_scales_bytes for line in manifest.ledger) == (4 * len(quantised) if name == "static" else 0)
    ours, wanted = logits(load_model(folder)), logits(by_hand(folder, name))
    weights_only = load_model(folder)
    for module in Artefact(folder).modules():
        weights_only.get_submodule(module)._forward_pre_hooks.clear()
    rounding = float((ours - logits(weights_only)).norm())
    assert rounding > 1e-4, "inputs were not rounded"
    # A value half way between two codes may fall to either side in other arithmetic: a few codes of thousands.
    assert float((ours - wanted).norm()) < 0.35 * rounding
    tokens = tokenise(load_corpus(str(text)), TextTokenizer.from_folder(folder))
    windows = evaluation_windows(tokens, count=3, length=WINDOW, bos="none")
    ids = torch.from_numpy(windows.ids.copy())
    losses = torch.nn.functional.cross_entropy(
        logits(load_model(folder), ids)[:, :-1].reshape(-1, 256).double(), ids[:, 1:].reshape(-1)
    )
    measured = next(found.value for found in manifest.measurements if found.name == "perplexity")
    assert measured == pytest.approx(float(losses.exp()), rel=1e-5)


@pytest.mark.parametrize("method", ["rtn", "smoothquant", "smoothquant+gptq"])
def test_static_scales_reach_what_the_quantised_model_itself_puts_there(
    method: str, text: Path, source: Path, made: Callable[..., tuple[Path, Manifest]]
) -> None:
    """Calibrated after smoothing, on inputs that come out of the quantised blocks and matrices before."""
    folder, _ = made(method, *(W8 if method == "rtn" else ()), "--activations", "static")
    artefact, model = Artefact(folder), load_model(folder)
    tokens = tokenise(load_corpus(str(text)), TextTokenizer.from_folder(folder))
    evaluation = evaluation_windows(tokens, count=3, length=WINDOW, bos="none")
    windows = calibration_windows(tokens, count=8, length=WINDOW, evaluation=evaluation, bos="none")
    largest: dict[str, float] = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(module: Any, args: tuple[Tensor, ...]) -> None:
            largest[name] = max(largest.get(name, 0.0), float(args[0].abs().max()))

        return hook

    for module in artefact.modules():
        layer = model.get_submodule(module)
        rounding = dict(layer._forward_pre_hooks)
        layer._forward_pre_hooks.clear()
        layer.register_forward_pre_hook(watch(module))  # before the rounding
        for hook in rounding.values():
            layer.register_forward_pre_hook(hook)
    with torch.inference_mode():
        for batch in torch.split(torch.from_numpy(windows.ids.copy()), 4):
            model(batch)
    for module in artefact.modules():
        stored = artefact.tensor(f"{module}.input_scale")
        assert (stored.shape, stored.dtype) == ((1,), torch.float32)
        # A code that tips over in other arithmetic moves what comes after it by a little.
        assert float(stored) == pytest.approx(largest[module] / 127, rel=2e-3), module
    for family in (("q", "k", "v"), ("gate", "up")):
        parent = "self_attn" if "q" in family else "mlp"
        scales = {float(artefact.tensor(f"model.layers.1.{parent}.{leaf}_proj.input_scale")) for leaf in family}
        assert len(scales) == 1, "engines fuse these and keep one scale"


@pytest.mark.parametrize("name", SHORT)
def test_transformers_runs_what_we_run(
    name: str, source: Path, made: Callable[..., tuple[Path, Manifest]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Static scales: the same model. Dynamic ones: the same but for its divisor 127.5, which is put in our place here."""
    from transformers import AutoModelForCausalLM

    import quant.activations

    folder, _ = made("smoothquant", "--activations", name)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours = logits(load_model(folder))
    apart = float((logits(theirs) - ours).norm())
    noise = float((ours - logits(load_model(source))).norm())
    assert apart < noise
    if name == "static":
        assert apart < 1e-3 * float(ours.norm())
        return
    monkeypatch.setattr(quant.activations, "TOP", 127.5)
    with monkeypatch.context() as patched:
        rounded = torch.Tensor.clamp_
        patched.setattr(torch.Tensor, "clamp_", lambda self, low, high: rounded(self, low, 127))
        same = logits(load_model(folder))
    assert float((logits(theirs) - same).norm()) < 0.35 * apart


def test_w4a8_has_a_layout_of_ours(made: Callable[..., tuple[Path, Manifest]]) -> None:
    folder, manifest = made("smoothquant", "--bits", "4", "--group-size", "32")
    check_ledger(folder, manifest)
    verify_folder(folder)
    kinds = {(r.scheme, r.codec, r.activations) for r in manifest.tensors if r.fate == "quantised"}
    assert kinds == {("int4-sym-g32-f16", "dense", "a8-token-dynamic")}
    assert logits(load_model(folder)).isfinite().all()


def test_recipes_round_inputs_by_pattern_and_tables_stay_weight_only(source: Path, text: Path, tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(
        '[[rule]]\nmatch = "*.down_proj"\nactivations = "none"\n'
        '[[rule]]\nmatch = "lm_head"\nactivations = "token"\n'
        '[[rule]]\nmatch = "*.o_proj"\nformat = "int-quantized"\n'
        '[[rule]]\nmatch = "*"\nactivations = "static"\n'
    )
    manifest = run("smoothquant", source, tmp_path / "out", text, "--recipe", str(path), without=("--group-size",))
    verify_folder(tmp_path / "out")
    check_ledger(tmp_path / "out", manifest)
    found = {r.name.rpartition(".")[0].rpartition(".")[2]: (r.codec, r.activations) for r in manifest.tensors if r.scheme}
    assert found["down_proj"] == ("pack-quantized", None)
    assert found["lm_head"] == ("pack-quantized", None)
    assert found["o_proj"] == ("int-quantized", "a8-token-dynamic")
    assert found["q_proj"] == found["gate_proj"] == ("int-quantized", "a8-tensor-static")
    assert "weight-only" in {note.kind for note in manifest.notes}
    rules = manifest.recipe["rules"]
    assert isinstance(rules, list)
    assert [rule.get("activations") for rule in rules if isinstance(rule, dict)] == [
        None,
        "a8-token-dynamic",
        "a8-token-dynamic",
        "a8-tensor-static",
    ]
    hooked = {n for n, m in load_model(tmp_path / "out").named_modules() if m._forward_pre_hooks}
    assert hooked == {n for n in Artefact(tmp_path / "out").modules() if "down" not in n and n != "lm_head"}


def test_q_k_v_with_different_inputs_are_told_before_the_run(source: Path, text: Path, tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text('[[rule]]\nmatch = "*.q_proj"\nactivations = "none"\n[[rule]]\nmatch = "*"\n')
    manifest = run("smoothquant", source, tmp_path / "out", text, "--recipe", str(path), without=("--group-size",))
    texts = [note.text for note in manifest.notes if note.kind == "fused-siblings"]
    assert any("q_proj int8-sym-channel-f16, k_proj int8-sym-channel-f16 a8-token-dynamic" in each for each in texts)


def test_a_wrong_name_in_a_recipe_is_one_sentence(source: Path, text: Path, tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text('[[rule]]\nmatch = "*"\nkeep = true\nactivations = "token"\n')
    with pytest.raises(RecipeError, match="no place for activations"):
        run("smoothquant", source, tmp_path / "out", text, "--recipe", str(path), without=("--group-size",))
    path.write_text('[[rule]]\nmatch = "*"\nactivations = "tokens"\n')
    with pytest.raises(SchemeError, match="'tokens'"):
        run("smoothquant", source, tmp_path / "out", text, "--recipe", str(path), without=("--group-size",))


def test_experts_are_refused_before_any_work(tiny_model: Callable[[str], Path], text: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"--activations does not work with the .* matrices of experts"):
        run("rtn", tiny_model("mixtral"), tmp_path / "out", text, *W8, "--activations", "token", without=("--group-size",))
    assert not (tmp_path / "out").exists()
