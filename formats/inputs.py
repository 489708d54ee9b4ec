"""Rounded inputs of quantised matrices: how a file says that they are, where a calibrated scale lies, and how a model does it.

In the configuration they are the entry ``input_activations`` of a group, as in compressed-tensors; a calibrated scale is the
float32 tensor ``input_scale`` ``[1]`` beside the codes. No torch is imported at the top.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quant.activations import ActivationScheme
from quant.errors import SchemeError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.hooks import RemovableHandle

INPUT_SCALE = "input_scale"
INPUTS_KEY = "input_activations"
_ADVICE = {
    "a8-tensor-dynamic": "one dynamic scale for a whole batch of inputs: vLLM has no kernel for it (use token or static), "
    "transformers loads it",
}


def inputs_block(activations: ActivationScheme) -> dict[str, Any]:
    """The entry of a group in compressed-tensors' form."""
    return {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": activations.sharing,
        "dynamic": activations.dynamic,
    }


def inputs_of_group(group: Mapping[str, Any]) -> ActivationScheme | None:
    """The inverse of ``inputs_block`` for a group of a configuration; None where inputs stay in float.

    Raises:
        SchemeError: another kind of rounding than this project has.
    """
    block = group.get(INPUTS_KEY)
    if block is None:
        return None
    known = {name: block.get(name) for name in ("num_bits", "type", "symmetric")}
    if known != {"num_bits": 8, "type": "int", "symmetric": True}:
        raise SchemeError(f"inputs rounded as {block} are not 8-bit symmetric integers: this reader cannot run them")
    return ActivationScheme(block["strategy"], block["dynamic"])


def inputs_advice(activations: ActivationScheme | None) -> tuple[str, ...]:
    """What engines need to run inputs that are rounded so."""
    return tuple(text for name, text in _ADVICE.items() if str(activations) == name)


def round_inputs(module: nn.Module, activations: ActivationScheme, scale: Tensor | None = None) -> RemovableHandle:
    """Let ``module`` see rounded inputs whenever it runs, until the handle is removed."""
    if activations.static and scale is None:
        raise SchemeError(f"{activations} needs a calibrated scale")

    def rounded(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (activations.rounded(args[0], scale), *args[1:])

    return module.register_forward_pre_hook(rounded)
