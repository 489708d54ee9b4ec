"""The methods of the command line: short compositions of a transform and a quantiser. No torch is imported here."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from quant.errors import UsageError
from quant.scheme import ALIASES


@dataclass(frozen=True, slots=True)
class Method:
    """A name of the command line.

    Attributes:
        transform: module of ``quant.transforms`` that rescales matrices first, or None.
        quantizer: module of ``quant.quantizers`` that makes the codes.
        learned: refine the codes by learned rounding, block by block.
        codec: name of the layout that the method is meant for, or None for the scheme's own.
        scheme: name of the scheme that the method stands for, or None where it is chosen apart from it.
        summary: one line for help texts.
    """

    name: str
    quantizer: str
    transform: str | None
    summary: str
    learned: bool = False
    scheme: str | None = None
    codec: str | None = None

    @property
    def needs_calibration(self) -> bool:
        return self.transform is not None or self.quantizer != "rtn" or self.learned


# Schemes that are methods by themselves: rounding to nearest is what their specifications describe.
NUMBER_FORMATS = ("mxfp4", "mxfp6-e2m3", "mxfp6-e3m2", "mxfp8", "mxint8", "nvfp4", "fp8")

W8A8 = "int8-sym-channel-f32"

METHODS = {
    method.name: method
    for method in (
        Method("rtn", "rtn", None, "round to nearest, no data needed"),
        Method("awq", "rtn", "awq", "activation-aware scaling and clipping, then round to nearest (Lin et al. 2024)"),
        Method("gptq", "gptq", None, "column by column, later columns make up for earlier errors (Frantar et al. 2022)"),
        Method("awq+gptq", "gptq", "awq", "the scaling of awq, then the codes of gptq"),
        Method("learned", "rtn", None, "rounding and scales learned block by block (after AutoRound, Cheng et al. 2023)", True),
        Method("awq+learned", "rtn", "awq", "the scaling of awq, then learned rounding", True),
        Method("gptq+learned", "gptq", None, "the codes of gptq, refined by learned rounding", True),
        Method("awq+gptq+learned", "gptq", "awq", "the scaling of awq, the codes of gptq, refined by learned rounding", True),
        Method(
            "smoothquant",
            "rtn",
            "smoothquant",
            "ranges moved from inputs into weights, then 8-bit weights and inputs (Xiao et al. 2023)",
            scheme=W8A8,
            codec="int-quantized",
        ),
        Method(
            "smoothquant+gptq",
            "gptq",
            "smoothquant",
            "the smoothing of smoothquant, then the codes of gptq",
            scheme=W8A8,
            codec="int-quantized",
        ),
        *(
            Method(name, "rtn", None, f"round to nearest as {ALIASES[name]}, no data needed", scheme=name)
            for name in NUMBER_FORMATS
        ),
    )
}


def get_method(name: str) -> Method:
    """The method of that name. Raises UsageError with the names there are."""
    if name not in METHODS:
        close = difflib.get_close_matches(name, METHODS, 1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UsageError(f"no such method: {name!r} ({hint}there are: {', '.join(METHODS)})")
    return METHODS[name]
