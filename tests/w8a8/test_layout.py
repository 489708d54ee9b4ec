"""How rounded inputs are said in the configuration, planned and stored, and what the checks find there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from formats.checkpoint import Checkpoint
from formats.codec import codec_names, default_codec, get_codec
from formats.config_block import check_config
from formats.fates import Quantise, Rule
from formats.inputs import inputs_block, inputs_of_group
from formats.manifest import Manifest
from formats.planning import plan_fates
from quant.activations import ActivationScheme
from quant.errors import BitledgerError, SchemeError, VerifyError
from quant.scheme import Scheme
from tests.w8a8.conftest import SHORT


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
