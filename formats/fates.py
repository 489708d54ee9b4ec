"""Fates: what becomes of every tensor of a checkpoint, decided from its headers alone.

``Quantise`` (scheme, quantiser, codec), ``Keep`` (with a reason) or ``Alias`` (the bytes are those of another tensor). A rule
is a pattern over module names with a fate; the first that matches decides (``formats.planning``). No torch is imported here.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass
from typing import Any

from formats.checkpoint import TensorInfo
from formats.codec import get_codec
from formats.shards import TensorSpec
from formats.tables import is_head, is_input_table
from quant.quantizer import Option
from quant.scheme import Scheme

FLOATS = ("F64", "F32", "F16", "BF16")
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
DATA_FREE = "rtn"


@dataclass(frozen=True, slots=True)
class Quantise:
    """Store as ``scheme`` in ``codec``; ``quantizer`` makes the codes, with ``options`` that differ from its defaults.

    ``mse``: each block's range is shrunk to the least squared error of the weights first.
    """

    scheme: Scheme
    quantizer: str = DATA_FREE
    codec: str = "pack-quantized"
    options: tuple[Option, ...] = ()
    mse: bool = False


@dataclass(frozen=True, slots=True)
class Keep:
    """Stays a float tensor: of the source's type, or rounded to ``dtype`` (a safetensors name)."""

    reason: str
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class Alias:
    of: str


Fate = Quantise | Keep | Alias


@dataclass(frozen=True, slots=True)
class Rule:
    """``pattern`` is a shell pattern over module names (``*.down_proj``), or a regular expression after ``re:``.

    ``otherwise`` are tried in order where the codec cannot hold ``fate`` for a matrix's shape, as with groups that must divide.
    """

    pattern: str
    fate: Quantise | Keep
    otherwise: tuple[Quantise, ...] = ()

    def matches(self, module: str) -> bool:
        if self.pattern.startswith("re:"):
            return re.match(self.pattern[3:], module) is not None
        return fnmatch.fnmatchcase(module, self.pattern)

    @property
    def for_all(self) -> bool:
        """Whether it matches anything: such a rule speaks of the matrices of decoder blocks, and names no table."""
        return self.matches("\0")

    def fate_for(self, info: TensorInfo) -> tuple[Fate, tuple[PlanNote, ...]]:
        """The first fate that the codec can hold for this tensor (or the first of all), with a note where it is another."""
        if isinstance(self.fate, Keep):
            return self.fate, ()
        shape = (info.shape[0], info.shape[1])
        for fate in (self.fate, *self.otherwise):
            reason = get_codec(fate.codec).refusal(fate.scheme, shape)
            if reason is None:
                if fate == self.fate:
                    return fate, ()
                first = get_codec(self.fate.codec).refusal(self.fate.scheme, shape)
                return fate, (("group-size", f"stored as {fate.scheme}, not {self.fate.scheme}: {first}"),)
        return self.fate, ()


PlanNote = tuple[str, str]


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """A tensor, its fate, and the tensors it will be stored as (none for an alias).

    ``untied`` is the head of a tied pair whose halves are both stored; ``copy_of`` names the source tensor that has its values
    where the source stores the table once. ``notes`` are (kind, sentence) of what did not go the plain way. ``family`` are the
    tensors, this one among them, that share one scale of the whole tensor because engines fuse them.
    """

    info: TensorInfo
    fate: Fate
    stored: tuple[TensorSpec, ...]
    untied: bool = False
    copy_of: str | None = None
    notes: tuple[PlanNote, ...] = ()
    family: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def source_name(self) -> str:
        """The tensor of the source that holds its values."""
        return self.copy_of or self.name

    @property
    def stored_dtype(self) -> str:
        """Safetensors type of a kept tensor as stored; the source's for all others."""
        return self.fate.dtype or self.info.dtype if isinstance(self.fate, Keep) else self.info.dtype

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")

    @property
    def matrix_shape(self) -> tuple[int, int]:
        return (self.info.shape[0], self.info.shape[1])


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sorts ``layers.2`` before ``layers.10``, and what is in no block before and after in alphabetical order."""
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name))


TABLE_REASON = "embedding or output head, and no rule names it"


def role_of(info: TensorInfo, config: dict[str, Any], names: frozenset[str]) -> str | None:
    """Why a tensor is kept in float by default, or None for a matrix of a decoder block, which is quantised.

    Routers are known by their place beside the experts and by their number of outputs, never by a word in their name.
    """
    if info.dtype not in FLOATS:
        return f"{info.dtype} is no float type"
    if len(info.shape) != 2 or not info.name.endswith(".weight"):
        return "not a matrix" if len(info.shape) < 2 else f"a {len(info.shape)}-dimensional tensor"
    if not re.search(r"\.\d+\.", info.name):
        module = info.name.removesuffix(".weight")
        if is_input_table(module) or is_head(module):
            return TABLE_REASON
        return "a matrix outside the decoder blocks"
    parent = info.name.removesuffix(".weight").rpartition(".")[0]
    experts = next((int(config[key]) for key in _EXPERT_COUNTS if isinstance(config.get(key), int)), 0)
    if experts and info.shape[0] in (1, experts) and any(name.startswith(f"{parent}.experts.") for name in names):
        return "router of a mixture of experts"
    return None


def stored_specs(info: TensorInfo, fate: Fate) -> tuple[TensorSpec, ...]:
    """The tensors that a source tensor with this fate is stored as, in their order."""
    if isinstance(fate, Alias):
        return ()
    if isinstance(fate, Keep):
        return (TensorSpec(info.name, fate.dtype or info.dtype, info.shape, "kept"),)
    module = info.name.removesuffix("weight")
    layout = get_codec(fate.codec).layout(fate.scheme, (info.shape[0], info.shape[1]))
    return tuple(TensorSpec(module + part.suffix, part.dtype, part.shape, part.role) for part in layout)
