"""GPTQ's options, from the command line or a recipe to the codes and the manifest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from formats.checkpoint import Checkpoint
from formats.reader import Artefact, load_model
from tests.tiny_runs import run, write_text


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.mark.parametrize("method", ["gptq", "awq+gptq"])
def test_asymmetric_runs_are_recorded_and_bring_the_last_hidden_states_closer(
    method: str, tiny_model: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    source, errors = tiny_model("llama"), {}
    ids = torch.randint(97, 123, (8, 33), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = load_model(source)(ids).logits
        for share in ("0", "1"):
            options = ("--asymmetric", share, "--bits", "3", "--calibration-windows", "48")
            manifest = run(method, source, tmp_path / share, text, *options)
            rules: Any = manifest.recipe["rules"]
            assert rules[0]["options"] == {"asymmetric": float(share)}
            assert rules[0]["quantizer"] == "gptq"
            errors[share] = float((load_model(tmp_path / share)(ids).logits - expected).norm())
    assert errors["1"] < 1.1 * errors["0"]
    assert errors["1"] != errors["0"]


@pytest.mark.parametrize(
    "options", [("--order", "none"), ("--order", "none", "--scale-policy", "updated"), ("--damping", "0.3"), ("--mse",)]
)
def test_options_reach_the_codes_and_the_manifest(
    options: tuple[str, ...], tiny_model: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    run("gptq", tiny_model("llama"), tmp_path / "plain", text)
    manifest = run("gptq", tiny_model("llama"), tmp_path / "other", text, *options)
    rules: Any = manifest.recipe["rules"]
    assert rules[0].get("options") or rules[0].get("mse")
    first, second = (Artefact(tmp_path / name) for name in ("plain", "other"))
    assert any(not torch.equal(first.qtensor(m).codes, second.qtensor(m).codes) for m in first.modules())


WRONG = [
    (("rtn", "--order", "none"), "--order: rtn does not make its codes with gptq"),
    (("gptq", "--order", "up"), "--order is one of energy, none"),
    (("gptq", "--scale-policy", "updated"), "needs order none"),
    (("gptq", "--damping", "0"), "--damping is a share above 0 and below 1"),
    (("gptq", "--asymmetric", "2"), "--asymmetric is a share from 0 to 1"),
    (("gptq", "--mse", "--clip"), "--mse and --clip choose the same ranges in two ways"),
]


@pytest.mark.parametrize(("words", "sentence"), WRONG)
def test_wrong_options_are_one_sentence(
    words: tuple[str, ...], sentence: str, tiny_model: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    from quant.errors import BitledgerError

    with pytest.raises(BitledgerError, match=sentence):
        run(words[0], tiny_model("llama"), tmp_path / "out", text, *words[1:])


def test_a_rule_with_a_clever_quantiser_makes_a_plain_method_calibrate(
    tiny_model: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    """One recipe, two quantisers: the named matrices differ from plain rounding, the others do not."""
    path = tmp_path / "recipe.toml"
    path.write_text('[[rule]]\nmatch = "*.down_proj"\nquantizer = "gptq"\n[[rule]]\nmatch = "*"\ngroup_size = 32\n')
    manifest = run(
        "rtn", tiny_model("llama"), tmp_path / "out", text, "--recipe", str(path), "--no-clip", without=("--group-size",)
    )
    assert manifest.digests.calibration is not None
    from quant.quantizers.rtn import round_to_nearest

    artefact, checkpoint = Artefact(tmp_path / "out"), Checkpoint.open(tiny_model("llama"))
    quantizers = {record.name.removesuffix(".weight"): record.quantizer for record in manifest.tensors}
    for module in artefact.modules():
        stored = artefact.qtensor(module)
        same = torch.equal(stored.codes, round_to_nearest(checkpoint.tensor(f"{module}.weight"), stored.scheme).codes)
        assert same == (quantizers[module] == "rtn")
        assert (quantizers[module] == "gptq") == module.endswith("down_proj")
