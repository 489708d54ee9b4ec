"""Grids: the numbers that codes mean before scaling, and the nearest of them to a value.

Three views of one matrix: *codes* are what is stored (integers, or bit patterns of a float format), *snapped* values are the
numbers that codes mean before their zero point is taken off, and *levels* are snapped values less zero points. Rounding goes to
the nearest number, half way to the even code, and saturates: nothing becomes infinite or NaN here.
"""

from __future__ import annotations

import itertools
import math
from functools import cache

import torch
from torch import Tensor

from quant.elements import ELEMENTS
from quant.scheme import Scheme

_FIXED = 64.0  # codes of mxint8 count 64ths


def snap(values: Tensor, zeros: Tensor | float, scheme: Scheme) -> Tensor:
    """Nearest snapped values (float32, shape of ``values``) of weights already divided by their scale.

    Args:
        zeros: zero points that broadcast over ``values``; 0 where the scheme has none.
    """
    if scheme.integer:
        return (torch.round(values) + zeros).clamp_(scheme.code_min, scheme.code_max)
    if scheme.element == "mxint8":
        return torch.round(values * _FIXED).clamp_(-127, 127) / _FIXED
    magnitudes, edges = _table(scheme.element, str(values.device))
    return torch.copysign(magnitudes[torch.bucketize(values.abs(), edges)], values)


def to_codes(snapped: Tensor, scheme: Scheme) -> Tensor:
    """Codes of snapped values: int8 for symmetric integers, else uint8. Minus zero is never written."""
    if scheme.integer:
        return snapped.to(torch.int8 if scheme.symmetric else torch.uint8)
    if scheme.element == "mxint8":
        return torch.round(snapped * _FIXED).to(torch.int8).view(torch.uint8)
    _, edges = _table(scheme.element, str(snapped.device))
    index = torch.bucketize(snapped.abs(), edges).to(torch.uint8)
    sign = (snapped < 0).to(torch.uint8) << (scheme.bits - 1)
    return index | sign


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


@cache
def _table(element: str, device: str) -> tuple[Tensor, Tensor]:
    """Finite magnitudes in order of their codes, and the edges between them.

    ``bucketize`` gives a value on an edge to the lower number; where the upper one has the even code, the edge is moved just
    below itself.
    """
    found = ELEMENTS[element]
    magnitudes = [value for value in found.values()[: 1 << (found.bits - 1)] if math.isfinite(value)]
    middles = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(magnitudes)], dtype=torch.float32)
    below = torch.nextafter(middles, torch.zeros_like(middles))
    odd = torch.arange(len(middles)) % 2 == 1
    edges = torch.where(odd, below, middles)
    return torch.tensor(magnitudes, dtype=torch.float32, device=device), edges.to(device)
