"""Rounded inputs of a block while it is being quantised: what is calibrated later sees what the quantised model will see."""

from __future__ import annotations

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from calib.capture import BlockRunner
from calib.evidence import Evidence, InputRange
from formats.fates import Quantise
from formats.inputs import round_inputs
from quant.activations import static_scale


class RoundedInputs:
    """The matrices of one block whose inputs are rounded from now on; ``remove`` ends it.

    Attributes:
        scales: calibrated scales, float32 ``[1]``, by the matrices' parameter names.
    """

    def __init__(self, runner: BlockRunner) -> None:
        self._runner = runner
        self._handles: list[RemovableHandle] = []
        self.scales: dict[str, Tensor] = {}

    def add(self, name: str, fate: Quantise, found: Evidence | InputRange | None) -> None:
        """Round the inputs of the matrix ``name`` (full parameter name) as its fate says.

        Args:
            found: what is known of its inputs, where a scale is to be calibrated: the largest of them is not clipped.
        """
        if fate.activations is None:
            return
        if fate.activations.static:
            assert found is not None
            largest = found.abs_max if isinstance(found, Evidence) else found.largest
            self.scales[name] = static_scale(float(largest.max()))
        module = self._runner.skeleton.model.get_submodule(name.removesuffix(".weight"))
        self._handles.append(round_inputs(module, fate.activations, self.scales.get(name)))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
