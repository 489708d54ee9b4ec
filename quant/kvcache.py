"""Keys and values as codes: rounding, packing and reading back, as a kernel that reads the stored cache would see them.

States are ``[batch, heads, tokens, head_dim]``. Scales are rounded to their stored type before codes are made.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quant.errors import SchemeError
from quant.kvscheme import LARGEST, Element, Sharing

_SMALLEST_HALF = 2.0**-24
_SMALLEST_STATIC = 2.0**-126


@dataclass(frozen=True, slots=True)
class Stored:
    """Codes (int8; two per byte as uint8; or float8) of some tokens, and their scales.

    ``scales`` is float16 ``[batch, heads, tokens, groups]``, or None where the scales are static.
    """

    codes: Tensor
    scales: Tensor | None

    def map(self, change: str, *arguments: object) -> Stored:
        """The tensor method ``change`` on both parts."""
        parts = [None if part is None else getattr(part, change)(*arguments) for part in (self.codes, self.scales)]
        assert parts[0] is not None
        return Stored(parts[0], parts[1])

    def then(self, later: Stored) -> Stored:
        """These tokens, then those of ``later``."""
        scales = None if self.scales is None or later.scales is None else torch.cat([self.scales, later.scales], dim=-2)
        return Stored(torch.cat([self.codes, later.codes], dim=-2), scales)

    @property
    def nbytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in (self.codes, self.scales) if part is not None)


def static_scales(largest: Tensor, element: Element) -> Tensor:
    """float32 scales of calibrated magnitudes. Raises SchemeError where one is not finite."""
    if not bool(torch.isfinite(largest).all()):
        raise SchemeError("the magnitudes of cached keys or values are not finite: nothing is calibrated on them")
    return (largest.float() / LARGEST[element]).clamp_min(_SMALLEST_STATIC)


def store(states: Tensor, element: Element, sharing: Sharing, group: int | None, static: Tensor | None = None) -> Stored:
    """Codes of new tokens.

    Args:
        static: float32 scales that broadcast over ``[heads, 1, head_dim]``, for all sharings but ``token``.

    Raises:
        SchemeError: a state that is not finite, or larger than the float16 scale of a token can say.
    """
    if not bool(torch.isfinite(states).all()):
        raise SchemeError("a key or value that is not finite reached the cache")
    wide = states.float()
    if sharing != "token":
        assert static is not None
        return Stored(_codes(wide / static, element), None)
    pieces = wide.reshape(*wide.shape[:-1], -1, group or wide.shape[-1])
    scales = pieces.abs().amax(-1) / LARGEST[element]
    most = torch.finfo(torch.float16).max
    if scales.numel() and float(scales.detach().max()) > most:
        raise SchemeError(
            f"a key or value of magnitude {float(wide.detach().abs().max()):g} is beyond {most * LARGEST[element]:g}, what "
            f"{element} codes with a float16 scale per token hold at most: use a float cache (none) or scales per channel"
        )
    # Rounded up where half precision is subnormal, so that a tiny vector is coarse and not clipped.
    tiny = scales < torch.finfo(torch.float16).smallest_normal
    scales = torch.where(tiny, torch.ceil(scales / _SMALLEST_HALF) * _SMALLEST_HALF, scales)
    stored = scales.clamp_min(_SMALLEST_HALF).to(torch.float16)
    return Stored(_codes((pieces / stored.float().unsqueeze(-1)).flatten(-2), element), stored)


def restore(stored: Stored, element: Element, static: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What the stored tokens mean: ``[batch, heads, tokens, head_dim]`` of ``dtype``."""
    wide = _numbers(stored.codes, element)
    if stored.scales is None:
        assert static is not None
        wide = wide * static
    else:
        wide = (wide.reshape(*stored.scales.shape, -1) * stored.scales.float().unsqueeze(-1)).flatten(-2)
    # A scale rounded up carries the largest code past the last float16 number: it saturates and is not infinite.
    most = torch.finfo(dtype).max
    return wide.clamp_(-most, most).to(dtype)


def _codes(values: Tensor, element: Element) -> Tensor:
    top = LARGEST[element]
    if element == "e4m3":
        return values.clamp(-top, top).to(torch.float8_e4m3fn)
    codes = torch.round(values).clamp_(-top, top).to(torch.int8)
    if element == "int8":
        return codes
    fields = (codes + 8).view(torch.uint8)
    return fields[..., 0::2] | (fields[..., 1::2] << 4)


def _numbers(codes: Tensor, element: Element) -> Tensor:
    if element == "int4":
        return torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).float() - 8
    return codes.float()
