"""Which cards multiply a scheme's codes as they are, when the activations have the same format.

A card that lacks the format runs the scheme all the same where an engine has a kernel for it: codes are unpacked to 16 bits,
which saves memory and traffic but no arithmetic. Integer codes with a scale per group along the input are always unpacked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from eval.capacity.cards import Card
from quant.scheme import Scheme

_BLOCK_FORMATS = {"e4m3": "mxfp8", "e5m2": "mxfp8", "e3m2": "mxfp6", "e2m3": "mxfp6", "e2m1": "mxfp4"}


def native_format(scheme: Scheme) -> str | None:
    """The name by which a card's list of formats has the scheme's products, or None where no card's list can."""
    if scheme.integer:
        native = scheme.bits in (4, 8) and scheme.symmetric and scheme.blocks in ("channel", "tensor")
        return f"int{scheme.bits}" if native else None
    if scheme.scale == "e8m0":
        return _BLOCK_FORMATS.get(scheme.element) if scheme.blocks == 32 else None
    if scheme.scale == "e4m3":
        return "nvfp4" if (scheme.element, scheme.blocks) == ("e2m1", 16) else None
    if scheme.bits != 8 or scheme.element == "mxint8" or isinstance(scheme.blocks, int):
        return None
    return "fp8 fnuz" if scheme.element.endswith("fnuz") else "fp8"


def native_cards(scheme: Scheme, cards: Iterable[Card]) -> list[Card]:
    """Those of ``cards`` whose stated formats have the scheme's products."""
    wanted = native_format(scheme)
    return [card for card in cards if wanted is not None and any(_means(text, wanted) for text in card.native_formats)]


def _means(stated: str, wanted: str) -> bool:
    """Whether a card's words for a format, such as ``fp8 FNUZ (max 240, NOT OCP)``, mean this one."""
    words = re.findall(r"[a-z0-9]+", stated.lower())
    if wanted.startswith("fp8"):
        return words[:1] == ["fp8"] and ("fnuz" in words) == wanted.endswith("fnuz")
    return words[:1] == [wanted]
