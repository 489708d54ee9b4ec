"""How the inputs of a matrix are rounded when a model runs: 8-bit symmetric integers with one scale per token or per batch.

Names: ``a8-token-dynamic`` (a scale for every token, found when it arrives: what engines do), ``a8-tensor-dynamic`` (one scale
for the whole batch, as the source text's lab 4), ``a8-tensor-static`` (one calibrated scale). No torch is imported at the top.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from quant.errors import SchemeError

if TYPE_CHECKING:
    from torch import Tensor

TOP = 127
_SMALLEST = 1e-12
_PATTERN = re.compile(r"a8-(token|tensor)-(dynamic|static)")


@dataclass(frozen=True, slots=True)
class ActivationScheme:
    """What shares a scale (``token``: each row of the input, ``tensor``: all of it), and whether it is found while running."""

    sharing: Literal["token", "tensor"] = "token"
    dynamic: bool = True

    def __post_init__(self) -> None:
        if self.sharing not in ("token", "tensor"):
            raise SchemeError(f"activations share a scale per token or per tensor, not per {self.sharing}")
        if self.sharing == "token" and not self.dynamic:
            raise SchemeError("a scale per token is found while running: static scales are per tensor")

    def __str__(self) -> str:
        return f"a8-{self.sharing}-{'dynamic' if self.dynamic else 'static'}"

    @classmethod
    def parse(cls, text: str) -> ActivationScheme:
        """The inverse of ``str``. Raises SchemeError."""
        match = _PATTERN.fullmatch(text)
        if not match:
            raise SchemeError(
                f"no such activation scheme: {text!r} (there are a8-token-dynamic, a8-tensor-dynamic, a8-tensor-static)"
            )
        return cls(cast(Literal["token", "tensor"], match.group(1)), match.group(2) == "dynamic")

    def rounded(self, inputs: Tensor, scale: Tensor | None = None) -> Tensor:
        """``inputs`` ``[..., in]`` as 8-bit codes times their scale, in the type they came in.

        Args:
            scale: the calibrated scale, float32 of one element, where this is static.
        """
        import torch

        wide = inputs.float()
        if not self.dynamic:
            if scale is None:
                raise SchemeError(f"{self} needs a calibrated scale")
            step = scale.float()
        elif self.sharing == "tensor":
            step = wide.abs().amax() / TOP
        else:
            step = wide.abs().amax(-1, keepdim=True) / TOP
        step = step.clamp_min(_SMALLEST)
        return (torch.round(wide / step).clamp_(-TOP, TOP) * step).to(inputs.dtype)
