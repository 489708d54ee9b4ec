"""Rounded inputs from the option to the engine: what is planned, stored, said in the configuration, calibrated, verified, run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from calib.corpora import load_corpus
from calib.tokenizer import TextTokenizer
from calib.windows import calibration_windows, evaluation_windows, tokenise
from formats.checkpoint import Checkpoint
from formats.codec import codec_names, default_codec, get_codec
from formats.config_block import check_config
from formats.fates import Quantise, Rule
from formats.inputs import inputs_block, inputs_of_group
from formats.integrity import verify_folder
from formats.manifest import Manifest
from formats.planning import plan_fates
from formats.reader import Artefact, load_model
from quant.activations import ALIASES, ActivationScheme
from quant.errors import BitledgerError, NonFiniteTensor, RecipeError, SchemeError, SourceError, VerifyError
from quant.scheme import Scheme
from tests.conftest import QWEN2, SIZES
from tests.numerics.blocks import PHI3
from tests.test_tables import build
from tests.tiny_runs import WINDOW, check_ledger, run, write_text

IDS = torch.randint(0, 256, (3, 24), generator=torch.Generator().manual_seed(0))
W8 = ("--bits", "8", "--group-size", "channel")
SHORT = list(ALIASES)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


def outliers(model: Any) -> None:
    """Channels that stick out of every norm, as in large models."""
    for layer in model.model.layers:
        layer.input_layernorm.weight[3] = 40
        layer.post_attention_layernorm.weight[5] = 40


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("models") / "outliers", "Llama", SIZES, outliers)


@pytest.fixture(scope="module")
def made(source: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Manifest]]:
    """``made("smoothquant", "--activations", "static")``: folder and manifest of a run, each made once."""
    done: dict[tuple[str, ...], tuple[Path, Manifest]] = {}

    def make(*words: str) -> tuple[Path, Manifest]:
        if words not in done:
            folder = tmp_path_factory.mktemp("made") / "out"
            method, *options = words
            done[words] = folder, run(method, source, folder, text, *options, without=("--group-size",))
        return done[words]

    return make


def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    with torch.inference_mode():
        found: Tensor = model(ids).logits
    return found


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


@pytest.mark.parametrize("name", SHORT)
def test_the_configuration_says_it_as_compressed_tensors_does(name: str) -> None:
    from compressed_tensors.quantization import QuantizationScheme

    activations = ActivationScheme.parse(name)
    codec = get_codec("int-quantized")
    group = codec.config_group(Scheme(8, "sym", "channel"), ["Linear"]) | {"input_activations": inputs_block(activations)}
    assert inputs_of_group(json.loads(json.dumps(group))) == activations
    read = QuantizationScheme.model_validate(group)
    assert read.input_activations is not None
    assert (read.input_activations.num_bits, read.input_activations.symmetric) == (8, True)
    assert read.input_activations.strategy == activations.sharing
    assert bool(read.input_activations.dynamic) == activations.dynamic


@pytest.mark.parametrize("change", [{"num_bits": 4}, {"symmetric": False}, {"type": "float"}, {"strategy": "channel"}])
def test_another_kind_of_rounding_is_refused_by_the_reader(change: dict[str, Any]) -> None:
    with pytest.raises(SchemeError):
        inputs_of_group({"input_activations": inputs_block(ActivationScheme("tensor")) | change})


@pytest.mark.parametrize("change", ["none", "token", "static"])
def test_a_configuration_with_other_inputs_than_recorded_is_found(
    change: str, made: Callable[..., tuple[Path, Manifest]]
) -> None:
    """An engine trusts the block: with other inputs it runs another model than the one that was measured."""
    folder, manifest = made("smoothquant", "--activations", "tensor")
    config = json.loads((folder / "config.json").read_text())
    assert "int-quantized" in check_config(config, manifest.tensors)
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["input_activations"] = None if change == "none" else inputs_block(ActivationScheme.parse(change))
    with pytest.raises(VerifyError, match="is described with inputs"):
        check_config(config, manifest.tensors)


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_a_stored_scale_of_inputs_that_is_no_scale_is_found(value: float) -> None:
    """The same check that codes get: the smallest matrix is read back."""
    # Written by hand: one int8 matrix with its scale and that of its inputs.
    import tempfile

    from safetensors.torch import save_file

    from formats.header import TensorInfo
    from formats.records import PartRecord, TensorRecord, stored_bits_per_weight
    from formats.round_trip import check_codecs

    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "model.safetensors"
        tensors = {
            "a.weight": torch.ones(2, 3, dtype=torch.int8),
            "a.weight_scale": torch.ones(2, 1),
            "a.input_scale": torch.tensor([value]),
        }
        save_file(tensors, file, {"format": "pt"})
        from formats.checkpoint import read_header

        infos: dict[str, TensorInfo] = read_header(file, file.name)[0]
        roles = {"weight": "codes", "weight_scale": "scales", "input_scale": "input_scales"}
        parts = [
            PartRecord(
                name=name,
                file=file.name,
                dtype=info.dtype,
                shape=list(info.shape),
                nbytes=info.nbytes,
                role=roles[name.removeprefix("a.")],  # type: ignore[arg-type]
            )
            for name, info in infos.items()
        ]
        record = TensorRecord(
            name="a.weight",
            dtype="F32",
            shape=[2, 3],
            fate="quantised",
            scheme="int8-sym-channel-f32",
            codec="int-quantized",
            activations="a8-tensor-static",
            parts=parts,
            nbytes=sum(part.nbytes for part in parts),
            bits_per_weight=stored_bits_per_weight(parts, 6),
        )
        with pytest.raises(BitledgerError, match="scale of its inputs"):
            check_codecs(Path(place), [record], infos)


def test_a_layout_says_whether_it_is_for_rounded_inputs() -> None:
    for name in codec_names():
        codec = get_codec(name)
        takes = [codec.input_refusal(inputs) is None for inputs in (None, ActivationScheme())]
        assert any(takes), name
    assert default_codec(Scheme(8, "sym", "channel"), ActivationScheme()) == "int-quantized"
    assert default_codec(Scheme(8, "sym", "channel")) == "pack-quantized"
    for other in (Scheme(4, "sym", "channel"), Scheme(8, "sym", 32), Scheme(8, "zp", "channel"), Scheme.parse("mxfp4")):
        assert default_codec(other, ActivationScheme()) == "dense"


@pytest.mark.parametrize("activations", [None, *SHORT])
@pytest.mark.parametrize("codec", codec_names())
def test_plans_store_the_scale_of_static_inputs_and_no_other(
    codec: str, activations: str | None, tiny_model: Callable[[str], Path]
) -> None:
    parsed = None if activations is None else ActivationScheme.parse(activations)
    fate = Quantise(Scheme(8, "sym", "channel"), codec=codec, activations=parsed)
    checkpoint = Checkpoint.open(tiny_model("llama"))
    if fate.refusal((64, 64)):
        with pytest.raises(SchemeError, match="14 matrices cannot be stored"):
            plan_fates(checkpoint, (Rule("*", fate),))
        return
    plans = plan_fates(checkpoint, (Rule("*", fate),))
    scales = [spec for plan in plans for spec in plan.stored if spec.role == "input_scales"]
    assert len(scales) == (14 if activations == "static" else 0)
    assert all((spec.dtype, spec.shape) == ("F32", (1,)) for spec in scales)


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


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("layer", [0, 1])
def test_r17_overflow_names_the_layer_where_it_first_appears(layer: int, name: str, text: Path, tmp_path: Path) -> None:
    """R17: finite weights whose products are not, in front of a matrix whose inputs would be rounded."""

    def blow_up(model: Any) -> None:
        for leaf in ("gate_proj", "up_proj"):
            getattr(model.model.layers[layer].mlp, leaf).weight.mul_(1e30)

    bad = build(tmp_path / "model", "Llama", SIZES, blow_up)
    with pytest.raises(NonFiniteTensor, match=rf"model\.layers\.{layer}.*not finite"):
        run("smoothquant", bad, tmp_path / "out", text, "--activations", name, without=("--group-size",))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_r25_a_fused_query_key_value_matrix_is_left_alone_and_told(kv_heads: int, text: Path, tmp_path: Path) -> None:
    """R25: the value rows stand at the end of the fused matrix; nothing is divided there, and a note per layer says so."""
    fused = build(tmp_path / "model", "Phi3", {**PHI3, "num_key_value_heads": kv_heads})
    manifest = run("smoothquant", fused, tmp_path / "out", text, without=("--group-size",))
    skipped = next(note for note in manifest.notes if note.kind == "not-scaled")
    assert skipped.count >= 2
    for layer in (0, 1):
        assert f"model.layers.{layer}.self_attn.o_proj: nothing that produces its input can take factors" in skipped.text
    before, after = logits(load_model(fused)), logits(load_model(tmp_path / "out"))
    assert float((after - before).norm() / before.norm()) < 0.02
    folded = {record.name for record in manifest.tensors if record.fate == "folded"}
    assert folded == {f"model.layers.{n}.{which}_layernorm.weight" for n in (0, 1) for which in ("input", "post_attention")}


def test_r24_r30_folded_value_rows_carry_their_biases_with_them(text: Path, tmp_path: Path) -> None:
    """R24, R30: one factor per value channel for all queries that read it; its bias is divided by the same factor."""

    def biased(model: Any) -> None:
        outliers(model)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.fill_(5.0)

    made = build(tmp_path / "model", "Qwen2", QWEN2, biased)
    manifest = run("smoothquant", made, tmp_path / "out", text, "--alpha", "0.5", without=("--group-size",))
    checkpoint, artefact = Checkpoint.open(made), Artefact(tmp_path / "out")
    biases = {name for name in checkpoint.tensors if name.endswith("bias")}
    assert {name for name in artefact.tensors if name.endswith("bias")} == biases
    fates = {record.name: record.fate for record in manifest.tensors}
    for name in biases:
        if "v_proj" not in name:
            assert artefact.tensor(name).numpy().tobytes() == checkpoint.raw(name).tobytes()
            continue
        assert fates[name] == "folded"
        module = name.removesuffix(".bias")
        factors = checkpoint.tensor(name) / artefact.tensor(name)
        assert float((factors.log()).abs().max()) > 0.01, "something was folded"
        rows = checkpoint.tensor(f"{module}.weight").float().norm(dim=1)
        # All rows were scaled by the columns' factors of the input too: those of equal shares tell the rows' own factor.
        stored = artefact.qtensor(module).dequantise()
        again = build_rows(artefact, checkpoint, module)
        torch.testing.assert_close(rows / (stored / again).norm(dim=1), factors, rtol=2e-2, atol=0)
    before, after = (logits(load_model(folder)) for folder in (made, tmp_path / "out"))
    assert float((after - before).norm() / before.norm()) < 0.05


def build_rows(artefact: Artefact, checkpoint: Checkpoint, module: str) -> Tensor:
    """Factors of the input channels of a value matrix, from what its norm was divided by."""
    norm = module.rpartition(".self_attn")[0] + ".input_layernorm.weight"
    return (checkpoint.tensor(norm) / artefact.tensor(norm)).float()


@pytest.mark.parametrize("options", [(), ("--percentile", "90"), ("--clip",), ("--alpha", "0.5")])
def test_smoothing_leaves_the_float_model_what_it_was(
    options: tuple[str, ...], source: Path, made: Callable[..., tuple[Path, Manifest]]
) -> None:
    """With inputs and weights of 8 bits the logits are within their noise, whatever was folded; all that can fold did."""
    folder, manifest = made("smoothquant", *options)
    before, after = logits(load_model(source)), logits(load_model(folder))
    assert float((after - before).norm() / before.norm()) < 0.03
    note = next(note for note in manifest.notes if note.kind == "smoothing")
    assert note.count == 8
    if options[:1] == ("--alpha",):
        assert note.text.count("alpha 0.5, ") == 8
    assert manifest.options["percentile"] == (90.0 if "--percentile" in options else None)


def test_a_percentile_is_another_smoothing(made: Callable[..., tuple[Path, Manifest]]) -> None:
    plain, other = (Artefact(made("smoothquant", "--alpha", "0.5", *more)[0]) for more in ((), ("--percentile", "60")))
    name = "model.layers.0.input_layernorm.weight"
    assert not torch.equal(plain.tensor(name), other.tensor(name))


@pytest.mark.parametrize("name", SHORT)
def test_r63_scales_and_smoothing_are_those_of_any_batch_size(name: str, source: Path, text: Path, tmp_path: Path) -> None:
    """R62, R63: windows are all of one length and never padded, so that a batch only says how many run at once."""
    for batch in ("1", "3", "8"):
        options = ("--activations", name, "--batch", batch)
        run("smoothquant", source, tmp_path / batch, text, *options, without=("--group-size",))
    first, *others = (Artefact(tmp_path / batch) for batch in ("1", "3", "8"))
    for module in [module for module in first.modules() if ".0." in module]:
        for other in others:
            torch.testing.assert_close(other.qtensor(module).scales, first.qtensor(module).scales, rtol=1e-4, atol=0)
            if name == "static":
                scales = [artefact.tensor(f"{module}.input_scale") for artefact in (other, first)]
                torch.testing.assert_close(*scales, rtol=2e-3, atol=0)


def test_the_output_folder_and_the_plan_name_the_inputs(
    source: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from typer.main import get_command

    from pipelines.run import app

    monkeypatch.chdir(tmp_path)
    command: Any = get_command(app)
    words = ["--model", str(source), "--corpus", str(text), "--window", "33", "--evaluation-windows", "3", "--cards", "none"]
    words += ["--calibration-windows", "8", "--dry-run", "--json"]
    command.main(args=["smoothquant", *words, "--activations", "static"], standalone_mode=False)
    plan = json.loads(capsys.readouterr().out)
    assert plan["output"].endswith("-smoothquant-int8-sym-channel-f16-a8-tensor-static")
    details = {each["detail"] for each in plan["tensors"] if each["fate"] == "quantise"}
    assert details == {"rtn int8-sym-channel-f16 a8-tensor-static int-quantized"}
    command.main(args=["rtn", *words, *W8, "--activations", "static"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["calibration"] is not None, "static scales need calibration text"
    command.main(args=["rtn", *words, *W8, "--activations", "token"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["calibration"] is None
