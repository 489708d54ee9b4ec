"""A cache in an artefact: what is stored for engines and for us, what the manifest covers, and what verify notices."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file

from eval.kvcache import stored_cache
from eval.recheck import recheck_measurements
from formats.broken import Broken
from formats.integrity import verify_folder
from formats.kv_files import CONFIG_KEY, SIDE_NAME, plan_kv
from formats.manifest import Manifest
from formats.reader import load_model
from quant.errors import CoverageError, SchemeError
from quant.kvscheme import KvScheme
from tests.artefact import edit, reseal
from tests.tiny_runs import run, write_text

Made = Callable[..., tuple[Path, Manifest]]
ENGINE = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture
def made(tiny_model: Callable[[str], Path], text: Path, tmp_path: Path) -> Made:
    def make(cache: str, *options: str, method: str = "rtn", model: Path | str = "llama") -> tuple[Path, Manifest]:
        source = tiny_model(model) if isinstance(model, str) else model
        folder = tmp_path / cache
        return folder, run(method, source, folder, text, "--kv-cache", cache, *options)

    return make


def block(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def observed(folder: Path, manifest: Manifest, text: Path) -> dict[str, list[np.ndarray]]:
    """Keys and values per layer that the stored artefact caches on the calibration windows, each at its own positions."""
    model = load_model(folder)
    assert manifest.digests.calibration is not None
    begin, end = manifest.digests.calibration.span_tokens
    data = text.read_bytes()
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    ids = torch.tensor([vocabulary["Ġ" if c == 32 else "Ċ" if c == 10 else chr(c)] for c in data[begin:end]]).reshape(8, 33)
    found: dict[str, list[np.ndarray]] = {"keys": [], "values": []}
    starts = [round(i * (128 - 33) / 7) for i in range(8)]
    with torch.inference_mode():
        passes = [
            model(row[None], position_ids=torch.arange(33)[None] + at, use_cache=True).cache
            for row, at in zip(ids, starts, strict=True)
        ]
    for layer in range(2):
        for side in found:
            found[side].append(np.stack([getattr(cache.layers[layer], side)[0].numpy() for cache in passes]))
    return found


def test_scales_for_engines_are_tensors_under_their_names(made: Made, text: Path) -> None:
    """R78: every layer has its own float32 [1] scales, amax / 448 of what the artefact caches, where engines look for them."""
    folder, manifest = made("fp8")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    states = observed(folder, manifest, text)
    assert block(folder)["quantization_config"]["kv_cache_scheme"] == ENGINE
    values = []
    for layer in range(2):
        for side, name in (("keys", "k_scale"), ("values", "v_scale")):
            full = f"model.layers.{layer}.self_attn.{name}"
            with safe_open(folder / index["weight_map"][full], "np") as file:
                scale = file.get_tensor(full)
            assert (scale.dtype, scale.shape) == (np.float32, (1,))
            assert scale[0] == pytest.approx(np.abs(states[side][layer]).max() / 448, rel=1e-5)
            values.append(float(scale[0]))
    assert len(set(values)) == 4
    assert sum(line.kv_scales_bytes for line in manifest.ledger) == 16
    for line in manifest.ledger:
        assert line.total_bytes == (folder / line.file).stat().st_size


def test_scales_per_channel_are_those_of_numpy_and_lie_where_no_engine_looks(made: Made, text: Path) -> None:
    folder, manifest = made("int8")
    states = observed(folder, manifest, text)
    stored = load_file(folder / SIDE_NAME)
    assert sorted(stored) == ["layers.0.keys", "layers.1.keys"]
    for layer in range(2):
        expected = np.abs(states["keys"][layer]).max(axis=(0, 2))[:, None] / 127  # windows and tokens away: [heads, 1, dim]
        np.testing.assert_allclose(stored[f"layers.{layer}.keys"], expected, rtol=1e-5)
    assert block(folder)["quantization_config"]["kv_cache_scheme"] is None
    assert [path.name for path in folder.glob("*.safetensors")] == ["model.safetensors"]
    assert manifest.kv_cache is not None
    assert manifest.kv_cache.calibration_tokens == 8 * 33
    assert SIDE_NAME in {file.name for file in manifest.files}


@pytest.mark.parametrize("cache", ["fp8", "int8", "int8-token", "int8-static", "int4-kchannel-vtoken-g8"])
def test_an_artefact_with_a_cache_verifies_and_its_cache_can_be_built_from_its_files(made: Made, cache: str) -> None:
    folder, manifest = made(cache)
    verify_folder(folder)
    assert "5 figures" in str(recheck_measurements(folder, manifest))
    model = load_model(folder)
    held = stored_cache(folder, model.config)
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        logits = model(ids, use_cache=True, cache=held).logits
        plain = model(ids, use_cache=False).logits
    assert 0 < float((logits - plain).norm()) < 0.1 * float(plain.norm())
    assert manifest.kv_cache is not None
    assert KvScheme.parse(cache) == KvScheme.parse(manifest.kv_cache.scheme)
    assert held.nbytes == 20 * manifest.kv_cache.bytes_per_token


@pytest.mark.parametrize("cache", ["fp8", "int8"])
def test_transformers_loads_the_weights_as_without_a_cache(made: Made, cache: str) -> None:
    from transformers import AutoModelForCausalLM

    folder, _ = made(cache)
    ids = torch.arange(24)[None]
    with torch.inference_mode():
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
        ours = load_model(folder)(ids).logits
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-4)


def test_what_is_measured_is_the_cache_in_the_loop(made: Made) -> None:
    """Perplexity, KL and agreement are in the manifest, with their interval, bytes and scheme; the rows give them again."""
    folder, manifest = made("int4-ktoken-vtoken-g8")
    found = {measurement.name: measurement for measurement in manifest.measurements}
    wanted = {"perplexity_kv", "ln_perplexity_ratio_kv", "kl_kv", "top1_kv", "kl_kv_cache", "top1_kv_cache"}
    assert wanted <= set(found)
    for name in wanted:
        assert found[name].settings["kv_cache"] == "int4-ktoken-vtoken-g8"
    kl, alone = found["kl_kv"].value, found["kl_kv_cache"].value
    assert kl is not None
    assert alone is not None
    assert kl > alone > 0
    weights = {file.name for file in manifest.files if file.role == "weights"}
    assert weights <= set(found["perplexity_kv"].subject)
    edit(folder, "manifest.json", lambda m: next(x for x in m["measurements"] if x["name"] == "perplexity_kv").update(value=1.0))
    with pytest.raises(Broken, match="perplexity_kv"):
        recheck_measurements(folder, Manifest.load(folder))


def test_cards_plan_with_the_bytes_of_the_artefacts_cache(made: Made) -> None:
    _, manifest = made("int8", "--cards", "all")
    assert manifest.kv_cache is not None
    assert {card["kv_bytes_per_token"] for card in manifest.cards} == {2 * 2 * (2 * 16 + 2)}
    assert manifest.kv_cache.bytes_per_token == 2 * 2 * (2 * 16 + 2)
    assert all("as the artefact's own scheme stores it" in str(card["notes"]) for card in manifest.cards)


def _scale(folder: Path, value: float) -> None:
    """Overwrite every stored scale, as somebody would who can compute hashes."""
    path = folder / SIDE_NAME
    raw = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(raw[:8], "little")
    raw[header:] = np.full((len(raw) - header) // 4, value, dtype="<f4").tobytes()
    path.write_bytes(raw)
    reseal(folder, SIDE_NAME)


@pytest.mark.parametrize("value", [1.0, 0.0, float("nan")])
def test_scales_that_calibrate_nothing_do_not_verify(made: Made, value: float) -> None:
    """R78: 1.0 everywhere, and its kin: zero, NaN."""
    folder, _ = made("int8")
    _scale(folder, value)
    with pytest.raises(Broken, match="kv cache"):
        verify_folder(folder)


@pytest.mark.parametrize("cache", ["fp8", "int8"])
def test_another_scheme_in_the_configuration_does_not_verify(made: Made, cache: str) -> None:
    folder, _ = made(cache)
    edit(folder, "config.json", lambda config: config.pop(CONFIG_KEY))
    reseal(folder, "config.json")
    with pytest.raises(Broken, match="kv cache"):
        verify_folder(folder)


def test_a_run_without_a_cache_says_nothing_of_one(tiny_model: Callable[[str], Path], text: Path, tmp_path: Path) -> None:
    manifest = run("rtn", tiny_model("llama"), tmp_path / "plain", text)
    assert manifest.kv_cache is None
    assert CONFIG_KEY not in block(tmp_path / "plain")
    edit(tmp_path / "plain", "config.json", lambda config: config.update({CONFIG_KEY: {"scheme": "int8-ktoken-vtoken"}}))
    reseal(tmp_path / "plain", "config.json")
    with pytest.raises(Broken, match="not recorded"):
        verify_folder(tmp_path / "plain")


def test_scales_of_one_everywhere_fail_the_run(tiny_copy: Callable[[str], Path], text: Path, tmp_path: Path) -> None:
    """R78: here every value that is cached is 448, so that every scale of values is exactly 1.0."""
    from safetensors.torch import load_file as load
    from safetensors.torch import save_file

    folder = tiny_copy("qwen2")
    path = folder / "model.safetensors"
    tensors = load(path)
    for name, value in tensors.items():
        if "self_attn.v_proj" in name:
            value.fill_(448 if name.endswith("bias") else 0)
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(SchemeError, match="value scales are 1: the cache was not calibrated"):
        run("rtn", folder, tmp_path / "out", text, "--kv-cache", "fp8")
    assert not (tmp_path / "out").exists()


def test_a_huge_key_bias_is_named_and_warned_of(tiny_copy: Callable[[str], Path], text: Path, tmp_path: Path) -> None:
    """R19: judged on logits, the run warns, names the layer, and offers keys per channel, which cost far less.

    The matrices of that layer and the head are enlarged: a random model attends to everything alike and predicts nothing, so
    that no error of its keys would reach the logits.
    """
    from safetensors.torch import load_file as load
    from safetensors.torch import save_file

    folder = tiny_copy("qwen2")
    path = folder / "model.safetensors"
    tensors = load(path)
    for proj in "qkvo":
        tensors[f"model.layers.0.self_attn.{proj}_proj.weight"] *= 10
    tensors["lm_head.weight"] *= 20
    tensors["model.layers.0.self_attn.k_proj.bias"][0] = 600
    save_file(tensors, path, {"format": "pt"})
    costs, warnings = {}, {}
    for cache in ("int8", "int8-token"):
        with patch("pipelines.measuring.broken_baseline", return_value=None):  # its confident head is far worse than guessing
            manifest = run("rtn", folder, tmp_path / cache, text, "--bits", "8", "--kv-cache", cache)
        costs[cache] = next(m.value for m in manifest.measurements if m.name == "kl_kv_cache") or 0.0
        warnings[cache] = [note.text for note in manifest.notes if note.kind == "kv-cache-quality"]
    assert costs["int8-token"] > 5 * costs["int8"] > 0
    assert "tokens): 0 (" in warnings["int8-token"][0]
    assert "--kv-cache int8" in warnings["int8-token"][0]


def test_a_cache_that_costs_nothing_is_not_warned_of(made: Made) -> None:
    _, manifest = made("int8")
    assert [note.kind for note in manifest.notes if note.kind.startswith("kv-cache")] == ["kv-cache"]


def test_names_and_shapes_that_no_engine_finds_are_refused_before_any_work() -> None:
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    fp8, int8 = KvScheme.parse("fp8"), KvScheme.parse("int8")
    with pytest.raises(SchemeError, match="self_attn"):
        plan_kv(config, ["transformer.h.0.attn.c_attn.weight"], fp8)
    with pytest.raises(SchemeError, match="self_attn"):
        plan_kv(config, ["model.layers.0.self_attn.q_proj.weight"], fp8)
    assert plan_kv(config, [], int8).specs[1].name == "layers.1.keys"
    with pytest.raises(SchemeError, match="kv_lora_rank"):
        plan_kv(config | {"kv_lora_rank": 8}, [], int8)
    with pytest.raises(SchemeError, match="num_hidden_layers"):
        plan_kv({"num_attention_heads": 4}, [], int8)


def test_a_record_whose_bytes_are_not_its_schemes_is_refused(made: Made) -> None:
    _, manifest = made("int8")
    assert manifest.kv_cache is not None
    manifest.kv_cache.check()
    with pytest.raises(CoverageError, match="bytes per token"):
        manifest.kv_cache.model_copy(update={"bytes_per_token": 1}).check()
    with pytest.raises(CoverageError, match="scales"):
        manifest.kv_cache.model_copy(update={"parts": []}).check()


def test_several_weight_files_are_renumbered_with_the_scales_behind_them(made: Made) -> None:
    folder, manifest = made("fp8", "--shard-bytes", "60000")
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) > 3
    assert manifest.kv_cache is not None
    assert manifest.kv_cache.file == files[-1]
    verify_folder(folder)


def test_a_dry_run_shows_the_file_of_scales_with_its_bytes(
    made: Made, tiny_model: Callable[[str], Path], text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from typer.main import get_command

    from pipelines.run import app

    folder, manifest = made("fp8")
    capsys.readouterr()
    options = ["--kv-cache", "fp8", "--window", "33", "--group-size", "32", "--calibration-windows", "8", "--cards", "none"]
    options += ["--model", str(tiny_model("llama")), "--corpus", str(text), "--output", str(tmp_path / "dry")]
    get_command(app).main(args=["rtn", *options, "--dry-run", "--json"], standalone_mode=False)
    plan = json.loads(capsys.readouterr().out)
    assert {file["name"]: file["nbytes"] for file in plan["files"]} == {line.file: line.total_bytes for line in manifest.ledger}
    assert folder.exists()
