"""The run command's line, parsed: what is asked for, before anything of it is looked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from calib.conventions import Convention
from calib.methods import Method, Smoothing
from eval.capacity.implications import Assumptions
from formats.fates import DATA_FREE, Quantise, Rule
from formats.sizing import SizeTarget
from quant.kvscheme import KvScheme


@dataclass(frozen=True, slots=True)
class Request:
    """The command line, parsed: one field per option."""

    method: Method
    model: str
    rules: tuple[Rule, ...]
    corpus: str
    calibration_windows: int
    evaluation_windows: int | Literal["all"]
    convention: Convention
    evaluation_start: int
    calibration_start: int | None
    seed: int
    cards: str
    output: Path
    device: str
    batch: int
    clip: bool
    smoothing: Smoothing
    tune_steps: int
    self_written_windows: int
    learn_iterations: int
    target: SizeTarget | None
    kv_scheme: KvScheme | None
    force: bool
    shard_bytes: int
    system_prompt: Path | None
    assumptions: Assumptions
    options: dict[str, str | int | float | bool | None] = field(default_factory=dict)

    @property
    def needs_calibration(self) -> bool:
        """Whether what is stored depends on calibration text: the method, a rule's own quantiser, or a static input scale."""
        fates = [fate for rule in self.rules for fate in (rule.fate, *rule.otherwise) if isinstance(fate, Quantise)]
        return self.method.needs_calibration or any(fate.quantizer != DATA_FREE or fate.static_inputs for fate in fates)

    @property
    def streams(self) -> int:
        """Streams of hidden states that quantising holds: 2 where the float model runs beside the quantised one."""
        asymmetric = any(
            name == "asymmetric" and value
            for rule in self.rules
            if isinstance(rule.fate, Quantise)
            for name, value in rule.fate.options
        )
        return 2 if self.method.learned or asymmetric else 1

    @property
    def calibrates(self) -> bool:
        """Whether the run reads calibration windows."""
        static = self.kv_scheme is not None and self.kv_scheme.static
        return self.needs_calibration or self.tune_steps > 0 or self.target is not None or static
