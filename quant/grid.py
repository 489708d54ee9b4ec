"""Grids: the numbers that codes mean before scaling, and the nearest of them to a value.

Three views of one matrix: *codes* are what is stored (integers, or bit patterns of a float format), *snapped* values are the
numbers that codes mean before their zero point is taken off, and *levels* are snapped values less zero points. Rounding goes to
the nearest number, half way to the even code, and saturates: nothing becomes infinite or NaN here.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from quant.elements import ELEMENTS, Element
from quant.scheme import Scheme

_FIXED = 64.0  # codes of mxint8 count 64ths
_FRACTION = 23  # mantissa bits of float32


def snap(values: Tensor, zeros: Tensor | float, scheme: Scheme) -> Tensor:
    """Nearest snapped values (float32, shape of ``values``) of weights already divided by their scale.

    Args:
        zeros: zero points that broadcast over ``values``; 0 where the scheme has none.
    """
    if scheme.integer:
        return (torch.round(values) + zeros).clamp_(scheme.code_min, scheme.code_max)
    if scheme.element == "mxint8":
        return torch.round(values * _FIXED).clamp_(-127, 127) / _FIXED
    element, dropped = scheme.format, _FRACTION - scheme.format.mantissa_bits
    magnitude = values.abs().clamp_max(4 * element.largest)
    # float32's own bits, rounded half to even to the format's mantissa: a carry runs into the exponent, as it should.
    bits = magnitude.view(torch.int32)
    odd = (bits >> dropped) & 1
    rounded = (bits + odd + ((1 << (dropped - 1)) - 1)).bitwise_and_(-1 << dropped).view(torch.float32)
    # Below the smallest normal number the step no longer shrinks.
    step = _subnormal_step(element)
    rounded = torch.where(magnitude < step * 2**element.mantissa_bits, torch.round(magnitude / step).mul_(step), rounded)
    return torch.copysign(rounded.clamp_max_(element.largest), values)


def to_codes(snapped: Tensor, scheme: Scheme) -> Tensor:
    """Codes of snapped values: int8 for symmetric integers, else uint8. Minus zero is never written."""
    if scheme.integer:
        return snapped.to(torch.int8 if scheme.symmetric else torch.uint8)
    if scheme.element == "mxint8":
        return torch.round(snapped * _FIXED).to(torch.int8).view(torch.uint8)
    element = scheme.format
    magnitude, step = snapped.abs(), _subnormal_step(element)
    offset = (127 - element.bias) << element.mantissa_bits  # between float32's exponents and the format's
    normal = (magnitude.view(torch.int32) >> (_FRACTION - element.mantissa_bits)) - offset
    code = torch.where(magnitude < step * 2**element.mantissa_bits, (magnitude / step).to(torch.int32), normal)
    return (code | ((snapped < 0).to(torch.int32) << (scheme.bits - 1))).to(torch.uint8)


def from_codes(codes: Tensor, scheme: Scheme) -> Tensor:
    """Snapped values (float32) of codes; the inverse of ``to_codes``."""
    if scheme.integer:
        return codes.float()
    return _values(scheme.element, str(codes.device))[codes.to(torch.int32)]


def nonfinite_codes(codes: Tensor, scheme: Scheme) -> Tensor:
    """Where codes mean NaN or an infinity: bool of their shape. No integer does, and nothing here ever makes one."""
    if scheme.integer:
        return torch.zeros_like(codes, dtype=torch.bool)
    return ~torch.isfinite(_values(scheme.element, str(codes.device)))[codes.to(torch.int32)]


@cache
def _values(element: str, device: str) -> Tensor:
    return torch.tensor(ELEMENTS[element].values(), dtype=torch.float32, device=device)


def _subnormal_step(element: Element) -> float:
    """Distance between the subnormal numbers of a format, and of the first normal ones."""
    return math.ldexp(1.0, 1 - element.bias - element.mantissa_bits)
