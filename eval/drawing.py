"""What all pictures share: colours, names that can be drawn, and log axes that read as plain numbers."""

from __future__ import annotations

import math
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.font_manager import findfont, get_font
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")  # Okabe and Ito: told apart with any colour vision
GREY = "#666666"


def shortened(text: str, most: int) -> str:
    """``text`` in one line of at most ``most`` characters that can be drawn, its middle left out where it is longer."""
    font = get_font(findfont("DejaVu Sans"))
    text = "".join(letter if letter.isprintable() and font.get_char_index(ord(letter)) else "?" for letter in text)
    keep = (most - 1) // 2
    return text if len(text) <= most else f"{text[:keep]}…{text[-keep:]}"


def log_limits(axes: Axes, name: Literal["x", "y"], values: NDArray[Any], *, below: float, above: float) -> None:
    """Limits and ticks of a log axis: shares of the values' span stay free below and above them; ticks are plain numbers."""
    low, high = (float(values.min()), float(values.max())) if len(values) else (1.0, 10.0)
    span = max(math.log(high / low), math.log(1.5))
    ends = low * math.exp(-below * span), high * math.exp(above * span)
    axis: Axis
    if name == "x":
        axis = axes.xaxis
        axes.set_xlim(ends)
    else:
        axis = axes.yaxis
        axes.set_ylim(ends)
    if ends[1] / ends[0] < 12:
        axis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 2.5, 5, 10], integer=name == "x"))
    else:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if ends[1] / ends[0] < 2000 else (1.0,)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}" if value < 1e6 else f"{value:.0e}"))
