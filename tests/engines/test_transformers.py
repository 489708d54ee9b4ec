"""transformers, with the compressed-tensors package, reads our files and computes what our own reader computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.engines.conftest import Artefact, prompt_ids

if TYPE_CHECKING:
    import torch

pytestmark = pytest.mark.real_model


@pytest.mark.parametrize("zero", ["--symmetric", "--full-range", "--zero-point", "head"])
def test_transformers_computes_what_our_reader_computes(zero: str, artefact: Artefact) -> None:
    import torch
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    from formats.reader import load_model

    folder = artefact("rtn", zero)
    # compressed-tensors 0.18.0 to 0.20.1 cannot load packed zero points into a packed model. Decompressing while loading works,
    # but rounds each weight to the type of the scales, float16; seen: 0.06 apart at most, on logits of standard deviation 4.
    atol = 0.2 if zero == "--zero-point" else 1e-3
    options = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if zero == "--zero-point" else {}
    ids = torch.arange(100, 164)[None] * 300  # any ids below the vocabulary's 49,152
    with torch.inference_mode():
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)(ids).logits
        ours = load_model(folder, dtype="float32")(ids).logits
    assert theirs.std() > 1  # a model with random weights would be flat
    torch.testing.assert_close(theirs, ours, rtol=0, atol=atol)


@pytest.mark.parametrize("inputs", ["token", "static"])
def test_transformers_rounds_inputs_as_our_reader_does(inputs: str, artefact: Artefact) -> None:
    """W8A8. Static scales are stored: every logit is the same. For scales per token compressed-tensors divides by 127.5, we by
    127 (as vLLM's kernel): with its divisor in our hooks every logit is the same, so that nothing but the divisor differs.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from formats.reader import Artefact as Stored
    from formats.reader import load_model

    def as_compressed_tensors(module: torch.nn.Module, args: tuple[torch.Tensor]) -> torch.Tensor:
        scale = args[0].abs().amax(-1, keepdim=True) / 127.5
        return (args[0] / scale).round().clamp(-128, 127) * scale

    folder = artefact("smoothquant", inputs)
    ids = torch.tensor([prompt_ids(folder)])
    with torch.inference_mode():
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
        model = load_model(folder, dtype="float32")
        ours = model(ids).logits
        layers = [model.get_submodule(module) for module in Stored(folder).modules()]
        for layer in layers:
            layer._forward_pre_hooks.clear()
        weights_only = model(ids).logits
        if inputs == "token":
            assert abs(_nats_per_token(theirs, ids) - _nats_per_token(ours, ids)) < 0.05  # seen: 0.015
            for layer in layers:
                layer.register_forward_pre_hook(as_compressed_tensors)
            ours = model(ids).logits
    assert (weights_only - ours).abs().mean() > 0.01  # rounding the inputs does something at all
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-3)


def _nats_per_token(logits: torch.Tensor, ids: torch.Tensor) -> float:
    from torch.nn.functional import cross_entropy

    return float(cross_entropy(logits[0, :-1], ids[0, 1:]))
