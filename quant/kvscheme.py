"""How keys and values are cached: number format and what shares a scale. No torch is imported here.

``int8-kchannel-vtoken``: 8-bit integers, keys with one static scale per channel (calibrated; the outliers of keys sit in few
channels, Liu et al. 2024, KIVI), values with one scale per token and head, found when the token arrives. ``ktensor``: one static
scale per layer. A group ``g32`` splits every token's vector into pieces of 32 with a scale each.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, cast

from quant.errors import SchemeError

Element = Literal["int8", "int4", "e4m3"]
Sharing = Literal["token", "channel", "tensor"]

CODE_BITS: dict[str, int] = {"int8": 8, "int4": 4, "e4m3": 8}
LARGEST: dict[str, float] = {"int8": 127.0, "int4": 7.0, "e4m3": 448.0}
SCALE_BYTES = 2  # scales of tokens are float16; static ones are float32 and do not grow with the context
_STATIC_BYTES = 4

ALIASES = {
    "int8": "int8-kchannel-vtoken",
    "int8-token": "int8-ktoken-vtoken",
    "int8-static": "int8-ktensor-vtensor",
    "fp8": "e4m3-ktensor-vtensor",
    "int4": "int4-ktoken-vtoken-g32",
    "int4-channel": "int4-kchannel-vtoken-g32",
}
_PATTERN = re.compile(r"(int8|int4|e4m3)-k(token|channel|tensor)-v(token|channel|tensor)(?:-g(\d+))?")


@dataclass(frozen=True, slots=True)
class KvScheme:
    """Format of a cache. ``group`` is the number of channels that share a scale within a token; None is all of a head."""

    element: Element
    keys: Sharing
    values: Sharing
    group: int | None = None

    def __post_init__(self) -> None:
        if self.group is not None and (self.group < 1 or "token" not in (self.keys, self.values)):
            raise SchemeError(f"a group of {self.group} channels needs scales per token and a size of 1 or more")

    def __str__(self) -> str:
        group = "" if self.group is None else f"-g{self.group}"
        return f"{self.element}-k{self.keys}-v{self.values}{group}"

    @classmethod
    def parse(cls, text: str) -> KvScheme:
        """The scheme of that name or alias; the inverse of ``str``. Raises SchemeError."""
        match = _PATTERN.fullmatch(ALIASES.get(text, text))
        if not match:
            raise SchemeError(
                f"no such cache format: {text!r} (there are {', '.join(ALIASES)}, or for example int8-ktoken-vtoken)"
            )
        element, keys, values, group = match.groups()
        return cls(cast(Element, element), cast(Sharing, keys), cast(Sharing, values), int(group) if group else None)

    @property
    def static(self) -> bool:
        """Whether scales have to be calibrated."""
        return self.keys != "token" or self.values != "token"

    def check(self, head_dim: int) -> None:
        """Raise SchemeError where a head of ``head_dim`` channels cannot be stored so."""
        if self.group is not None and head_dim % self.group:
            raise SchemeError(f"{self}: {head_dim} channels of a head are no multiple of the group {self.group}")
        if CODE_BITS[self.element] < 8 and head_dim % 2:
            raise SchemeError(f"{self}: two codes share a byte, a head of {head_dim} channels is odd")

    def bytes_per_token(self, layers: int, kv_heads: int, head_dim: int) -> int:
        """Bytes that every cached token takes over all layers: codes, and the scales that come with the token."""
        groups = head_dim // (self.group or head_dim)
        codes = 2 * head_dim * CODE_BITS[self.element] // 8
        scales = SCALE_BYTES * groups * ((self.keys == "token") + (self.values == "token"))
        return layers * kv_heads * (codes + scales)

    def static_bytes(self, layers: int, kv_heads: int, head_dim: int) -> int:
        """Bytes of calibrated scales, whatever the context."""
        counts = {"token": 0, "channel": kv_heads * head_dim, "tensor": 1}
        return layers * _STATIC_BYTES * (counts[self.keys] + counts[self.values])
