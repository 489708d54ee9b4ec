"""How the inputs of a matrix are rounded when a model runs: 8-bit symmetric integers with one scale per token or per batch.

Names: ``a8-token-dynamic`` (a scale for every token, found when it arrives: what engines do), ``a8-tensor-dynamic`` (one scale
for the whole batch, as the source text's lab 4), ``a8-tensor-static`` (one calibrated scale); ``token``, ``tensor`` and
``static`` for short. No torch is imported at the top.

The arithmetic is that of vLLM's int8 kernels: a dynamic scale is max|x| / 127, codes go to the nearest integer (half way to the
even one) and saturate at -128 and 127, which only a static scale can reach. compressed-tensors simulates the same layout with
max|x| / 127.5: its values differ by less than a step.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from quant.errors import SchemeError

if TYPE_CHECKING:
    from torch import Tensor

TOP, BOTTOM = 127, -128
ALIASES = {"token": "a8-token-dynamic", "tensor": "a8-tensor-dynamic", "static": "a8-tensor-static"}
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
        """The scheme that ``text`` names, in full or for short; the inverse of ``str``. Raises SchemeError."""
        match = _PATTERN.fullmatch(ALIASES.get(text, text))
        if not match:
            names = ", ".join(f"{short} ({full})" for short, full in ALIASES.items())
            raise SchemeError(f"no such activation scheme: {text!r} (there are: {names})")
        return cls(cast(Literal["token", "tensor"], match.group(1)), match.group(2) == "dynamic")

    @property
    def static(self) -> bool:
        """Whether it needs a calibrated scale."""
        return not self.dynamic

    def rounded(self, inputs: Tensor, scale: Tensor | None = None) -> Tensor:
        """``inputs`` ``[..., in]`` as 8-bit codes times their scale, in the type they came in.

        Args:
            scale: the calibrated scale, float32 of one element, where this is static.
        """
        import torch

        wide = inputs.float()
        step = self._step(wide, scale)
        return (torch.round(wide / step).clamp_(BOTTOM, TOP) * step).to(inputs.dtype)

    def _step(self, wide: Tensor, scale: Tensor | None) -> Tensor:
        if self.static:
            if scale is None:
                raise SchemeError(f"{self} needs a calibrated scale")
            return scale.to(wide.device).float().clamp_min(_SMALLEST)
        largest = wide.abs().amax() if self.sharing == "tensor" else wide.abs().amax(-1, keepdim=True)
        return (largest / TOP).clamp_min(_SMALLEST)


def static_scale(largest: float) -> Tensor:
    """The scale, float32 ``[1]``, with which inputs up to the magnitude ``largest`` are not clipped; 1 where all are zero."""
    import torch

    return torch.tensor([largest / TOP if largest > 0 else 1.0]).clamp_min(_SMALLEST)
