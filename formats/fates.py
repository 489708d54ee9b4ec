"""Fates: what becomes of every tensor of a checkpoint, decided from its headers alone.

``Quantise`` (scheme, quantiser, codec), ``Keep`` (with a reason) or ``Alias`` (the bytes are those of another tensor). A rule
is a pattern over module names with a fate; the first that matches decides. All problems of a plan are collected and told at
once. No torch is imported here.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from formats.checkpoint import Checkpoint, TensorInfo
from formats.codec import get_codec
from formats.shards import TensorSpec
from quant.errors import RecipeError, SchemeError, SourceError
from quant.scheme import Scheme

_FLOATS = ("F64", "F32", "F16", "BF16")
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TRANSPOSED = {"gpt2": "Conv1D", "gpt_bigcode": "Conv1D", "openai-gpt": "Conv1D"}
_TIED_BY_DEFAULT = ("gemma", "gemma2", "gemma3", "gemma3_text", "gpt2", "opt", "bloom")
_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Quantise:
    scheme: Scheme
    quantizer: str = "rtn"
    codec: str = "pack-quantized"


@dataclass(frozen=True, slots=True)
class Keep:
    reason: str


@dataclass(frozen=True, slots=True)
class Alias:
    of: str


Fate = Quantise | Keep | Alias


@dataclass(frozen=True, slots=True)
class Rule:
    """``pattern`` is a shell pattern over module names (``*.down_proj``), or a regular expression after ``re:``."""

    pattern: str
    fate: Quantise | Keep

    def matches(self, module: str) -> bool:
        if self.pattern.startswith("re:"):
            return re.match(self.pattern[3:], module) is not None
        return fnmatch.fnmatchcase(module, self.pattern)


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """A source tensor, its fate, and the tensors it will be stored as (none for an alias)."""

    info: TensorInfo
    fate: Fate
    stored: tuple[TensorSpec, ...]

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")

    @property
    def matrix_shape(self) -> tuple[int, int]:
        return (self.info.shape[0], self.info.shape[1])


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sorts ``layers.2`` before ``layers.10``, and what is in no block before and after in alphabetical order."""
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name))


def role_of(info: TensorInfo, config: dict[str, Any], names: frozenset[str]) -> str | None:
    """Why a tensor is kept in float by default, or None for a matrix of a decoder block, which is quantised.

    Routers are known by their place beside the experts and by their number of outputs, never by a word in their name.
    """
    if info.dtype not in _FLOATS:
        return f"{info.dtype} is no float type"
    if len(info.shape) != 2 or not info.name.endswith(".weight"):
        return "not a matrix" if len(info.shape) < 2 else f"a {len(info.shape)}-dimensional tensor"
    if not re.search(r"\.\d+\.", info.name):
        return "embedding, output head or other matrix outside the decoder blocks"
    parent = info.name.removesuffix(".weight").rpartition(".")[0]
    experts = next((int(config[key]) for key in _EXPERT_COUNTS if isinstance(config.get(key), int)), 0)
    if experts and info.shape[0] in (1, experts) and any(name.startswith(f"{parent}.experts.") for name in names):
        return "router of a mixture of experts"
    return None


def tied_head(checkpoint: Checkpoint) -> tuple[str, str] | None:
    """(head, embedding) where the configuration ties them and the file stores both.

    Raises:
        SourceError: the two are tied but differ, so that one of the two would be lost.
    """
    config = checkpoint.config
    tied = config.get("tie_word_embeddings", config.get("model_type") in _TIED_BY_DEFAULT)
    head = "lm_head.weight"
    embeddings = [name for name in checkpoint.tensors if name.endswith(("embed_tokens.weight", "wte.weight", "embed_in.weight"))]
    if not tied or head not in checkpoint.tensors or len(embeddings) != 1:
        return None
    if not np.array_equal(checkpoint.raw(head), checkpoint.raw(embeddings[0])):
        raise SourceError(
            f"{checkpoint.folder}: tie_word_embeddings is true, but {head} and {embeddings[0]} are stored with different values; "
            "set tie_word_embeddings to false in config.json, or remove one of them"
        )
    return head, embeddings[0]


def plan_fates(checkpoint: Checkpoint, rules: Sequence[Rule]) -> tuple[TensorPlan, ...]:
    """Decide every tensor's fate, in production order (blocks by number).

    Raises:
        SourceError: a family whose matrices cannot be quantised yet.
        RecipeError: a pattern that matches nothing, a matrix that no rule matches, or a rule that quantises what must stay float.
        SchemeError: matrices that cannot be stored with their scheme: all are named, with their shapes and the ways out.
    """
    kind = checkpoint.config.get("model_type")
    if kind in _TRANSPOSED:
        raise SourceError(
            f"{checkpoint.folder} is a {kind} model, whose matrices are stored transposed ({_TRANSPOSED[str(kind)]}): "
            "not supported yet"
        )
    names = frozenset(checkpoint.tensors)
    tied = tied_head(checkpoint)
    used: set[int] = set()
    plans: list[TensorPlan] = []
    unmatched: list[str] = []
    forced: list[str] = []
    for name in sorted(checkpoint.tensors, key=natural_key):
        info = checkpoint.tensors[name]
        fate: Fate
        if tied is not None and name == tied[0]:
            fate = Alias(tied[1])
        else:
            reason = role_of(info, checkpoint.config, names)
            first = next((index for index, rule in enumerate(rules) if rule.matches(name.removesuffix(".weight"))), None)
            if reason is None and first is None:
                unmatched.append(name)
                continue
            fate = rules[first].fate if reason is None and first is not None else Keep(str(reason))
            if first is not None and reason is None:
                used.add(first)
            elif first is not None and rules[first].pattern != "*":  # the rule for all speaks of what can be quantised
                if isinstance(rules[first].fate, Keep):
                    used.add(first)
                elif len(info.shape) == 2:
                    used.add(first)
                    forced.append(f"{name} ({reason}; rule {rules[first].pattern!r})")
        plans.append(TensorPlan(info, fate, stored_specs(info, fate)))
    _raise_recipe_problems(rules, used, unmatched, forced)
    _raise_scheme_problems(plans)
    if not any(isinstance(plan.fate, Quantise) for plan in plans):
        raise SourceError(f"{checkpoint.folder}: nothing to quantise: no tensor is a matrix of a decoder block")
    return tuple(plans)


def stored_specs(info: TensorInfo, fate: Fate) -> tuple[TensorSpec, ...]:
    """The tensors that a source tensor with this fate is stored as, in their order."""
    if isinstance(fate, Alias):
        return ()
    if isinstance(fate, Keep):
        return (TensorSpec(info.name, info.dtype, info.shape, "kept"),)
    module = info.name.removesuffix("weight")
    layout = get_codec(fate.codec).layout(fate.scheme, (info.shape[0], info.shape[1]))
    return tuple(TensorSpec(module + part.suffix, part.dtype, part.shape, part.role) for part in layout)


def _raise_recipe_problems(rules: Sequence[Rule], used: set[int], unmatched: list[str], forced: list[str]) -> None:
    problems = []
    idle = [rule.pattern for index, rule in enumerate(rules) if index not in used]
    if idle:
        problems.append(f"{_listing(repr(pattern) for pattern in idle)}: no matrix has this pattern as its first match")
    if unmatched:
        problems.append(f"no rule matches {_listing(unmatched)}; end the recipe with a rule for '*'")
    if forced:
        problems.append(f"these must stay in float in this version: {_listing(forced)}; narrow the pattern")
    if problems:
        raise RecipeError(". ".join(problems))


def _raise_scheme_problems(plans: Iterable[TensorPlan]) -> None:
    refused = []
    for plan in plans:
        if isinstance(plan.fate, Quantise):
            reason = get_codec(plan.fate.codec).refusal(plan.fate.scheme, plan.matrix_shape)
            if reason:
                refused.append(f"  {plan.module} {list(plan.matrix_shape)} as {plan.fate.scheme}: {reason}")
    if refused:
        lines = "\n".join(refused)
        raise SchemeError(
            f"{len(refused)} matrices cannot be stored as asked; choose a --group-size that divides their columns, 'channel', "
            f"or keep them in float with a recipe rule (keep = true):\n{lines}"
        )


def _listing(names: Iterable[str]) -> str:
    found = list(names)
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(found[:_SHOWN]) + more
