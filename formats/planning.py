"""The plan: rules applied to every tensor of a checkpoint, from its headers alone.

All problems of a plan are collected and told at once. No torch is imported here.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from formats.checkpoint import Checkpoint, TensorInfo
from formats.codec import OWN, get_codec
from formats.engine_config import family_of
from formats.fates import (
    DATA_FREE,
    FLOATS,
    TABLE_REASON,
    Alias,
    Fate,
    Keep,
    PlanNote,
    Quantise,
    Rule,
    TensorPlan,
    natural_key,
    role_of,
    stored_specs,
)
from formats.tables import TiedPair, tied_pair
from quant.errors import RecipeError, SchemeError, SourceError
from quant.scheme import Scheme

_TRANSPOSED = {"gpt2": "Conv1D", "gpt_bigcode": "Conv1D", "openai-gpt": "Conv1D"}
_SHOWN = 12


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
    planner = _Planner(checkpoint, rules)
    plans = _with_families(planner.plans())
    planner.raise_problems()
    _raise_scheme_problems(plans)
    if not any(isinstance(plan.fate, Quantise) for plan in plans):
        raise SourceError(f"{checkpoint.folder}: nothing to quantise: no tensor is a matrix of a decoder block")
    return plans


class _Planner:
    """Applies rules to the tensors of a checkpoint, and collects what is wrong with the rules."""

    def __init__(self, checkpoint: Checkpoint, rules: Sequence[Rule]) -> None:
        self.checkpoint = checkpoint
        self.rules = rules
        self.names = frozenset(checkpoint.tensors)
        self.used: set[int] = set()
        self.unmatched: list[str] = []
        self.forced: list[str] = []
        self.conflicts: list[str] = []

    def plans(self) -> tuple[TensorPlan, ...]:
        pair = tied_pair(self.checkpoint)
        found = [] if pair is None else self._pair(pair)
        done = {plan.name for plan in found}
        for name in sorted(set(self.checkpoint.tensors) - done, key=natural_key):
            found += self._single(self.checkpoint.tensors[name])
        return tuple(sorted(found, key=lambda plan: natural_key(plan.name)))

    def _first(self, module: str) -> int | None:
        return next((index for index, rule in enumerate(self.rules) if rule.matches(module)), None)

    def _single(self, info: TensorInfo) -> list[TensorPlan]:
        reason = role_of(info, self.checkpoint.config, self.names)
        first = self._first(info.name.removesuffix(".weight"))
        if reason is None and first is None:
            self.unmatched.append(info.name)
            return []
        if first is None or (reason is not None and self.rules[first].for_all):
            return [_plan(info, Keep(str(reason)))]
        rule = self.rules[first]
        if reason is None or reason == TABLE_REASON:
            self.used.add(first)
            return [_plan(info, *_data_free(*rule.fate_for(info)) if reason else rule.fate_for(info))]
        if isinstance(rule.fate, Keep):
            self.used.add(first)
            return [_plan(info, _recast(info, reason, rule.fate.dtype))]
        if len(info.shape) == 2:
            self.used.add(first)
            self.forced.append(f"{info.name} ({reason}; rule {rule.pattern!r})")
        return [_plan(info, Keep(reason))]

    def _named(self, info: TensorInfo) -> tuple[Fate, tuple[PlanNote, ...]] | None:
        """What a rule that names this table says of it, or None."""
        first = self._first(info.name.removesuffix(".weight"))
        if first is None or self.rules[first].for_all:
            return None
        self.used.add(first)
        return _data_free(*self.rules[first].fate_for(info))

    def _pair(self, pair: TiedPair) -> list[TensorPlan]:
        """Both halves of a tied table: one table, or an explicit pair where only one of them is quantised."""
        embedding = self.checkpoint.tensors[pair.embedding]
        head = self.checkpoint.tensors[pair.head] if pair.stored else replace(embedding, name=pair.head)
        table, output = self._named(embedding), self._named(head)
        fates = [Keep(TABLE_REASON) if said is None else said[0] for said in (table, output)]
        notes = [() if said is None else said[1] for said in (table, output)]
        quantised = [isinstance(fate, Quantise) for fate in fates]
        alias = TensorPlan(head, Alias(pair.embedding), ())
        if not any(quantised):
            if fates[0] != fates[1] and table is not None and output is not None:
                self.conflicts.append(f"{pair.embedding} and {pair.head} are one tied table and must be kept alike")
            kept = fates[0] if table is not None or output is None else fates[1]
            return [_plan(embedding, kept), *([alias] if pair.stored else [])]
        if all(quantised):
            if fates[0] != fates[1]:
                self.conflicts.append(
                    f"{pair.embedding} and {pair.head} are one tied table, but two rules store it differently; give both one "
                    "scheme, or name only one of them to get an untied pair"
                )
            return [_plan(embedding, fates[0], notes[0]), alias]
        which = pair.head if quantised[1] else pair.embedding
        note = ("untied", f"only {which} of the tied pair is quantised: both are stored, and tie_word_embeddings becomes false")
        return [
            _plan(embedding, fates[0], notes[0]),
            replace(_plan(head, fates[1], (*notes[1], note)), untied=True, copy_of=None if pair.stored else pair.embedding),
        ]

    def raise_problems(self) -> None:
        """Raise RecipeError with everything that is wrong with the rules."""
        problems = list(self.conflicts)
        idle = [rule.pattern for index, rule in enumerate(self.rules) if index not in self.used]
        if idle:
            problems.append(f"{_listing(repr(pattern) for pattern in idle)}: no matrix has this pattern as its first match")
        if self.unmatched:
            problems.append(f"no rule matches {_listing(self.unmatched)}; end the recipe with a rule for '*'")
        if self.forced:
            problems.append(f"these must stay in float in this version: {_listing(self.forced)}; narrow the pattern")
        if problems:
            raise RecipeError(". ".join(problems))


def _data_free(fate: Fate, notes: tuple[PlanNote, ...]) -> tuple[Fate, tuple[PlanNote, ...]]:
    """Tables are rounded to nearest whatever the method: calibration gathers no evidence on them."""
    if not isinstance(fate, Quantise) or fate.quantizer == DATA_FREE:
        return fate, notes
    text = f"rounded to nearest, not by {fate.quantizer}: calibration gathers nothing for embeddings and output heads"
    return replace(fate, quantizer=DATA_FREE, options=()), (*notes, ("data-free", text))


def _recast(info: TensorInfo, reason: str, dtype: str | None) -> Keep:
    """What is no matrix and stays float: with another storage type if a rule says so."""
    return Keep(reason) if dtype in (None, info.dtype) or info.dtype not in FLOATS else Keep(reason, dtype)


def _plan(info: TensorInfo, fate: Fate, notes: tuple[PlanNote, ...] = ()) -> TensorPlan:
    if isinstance(fate, Keep) and fate.dtype is not None:
        fate = _recast(info, fate.reason, fate.dtype)
        if isinstance(fate, Keep) and fate.dtype is not None:
            notes = (*notes, ("stored-type", f"{info.dtype} in the source, stored as {fate.dtype}"))
    refused = isinstance(fate, Quantise) and get_codec(fate.codec).refusal(fate.scheme, (info.shape[0], info.shape[1]))
    return TensorPlan(info, fate, () if refused else stored_specs(info, fate), notes=notes)  # all refusals are told at once


def _with_families(plans: tuple[TensorPlan, ...]) -> tuple[TensorPlan, ...]:
    """The plans, with those named to each other that engines fuse and whose scheme has a scale of the whole tensor."""
    members: dict[tuple[str, str, Scheme], list[str]] = defaultdict(list)
    keys = {}
    for plan in plans:
        if isinstance(plan.fate, Quantise) and plan.fate.scheme.shares_range:
            parent, _, leaf = plan.module.rpartition(".")
            keys[plan.name] = (parent, family_of(leaf), plan.fate.scheme)
            members[keys[plan.name]].append(plan.name)
    found = []
    for plan in plans:
        family = tuple(members[keys[plan.name]]) if plan.name in keys else ()
        if len(family) > 1:
            leaves = ", ".join(name.removesuffix(".weight").rpartition(".")[2] for name in family)
            note = ("shared-range", f"one tensor-level scale for {leaves}, which engines fuse")
            plan = replace(plan, family=family, notes=(*plan.notes, note))
        found.append(plan)
    return tuple(found)


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
            f"--format {OWN} (any shape; no engine reads it), or keep them in float with a recipe rule (keep = true):\n{lines}"
        )


def _listing(names: Iterable[str]) -> str:
    found = list(names)
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(found[:_SHOWN]) + more


def plan_notes(plans: Iterable[TensorPlan]) -> tuple[PlanNote, ...]:
    """The notes of a plan, equal ones once with their number and the first tensor's name."""
    first: dict[PlanNote, str] = {}
    counts: Counter[PlanNote] = Counter()
    for plan in plans:
        for note in plan.notes:
            first.setdefault(note, plan.name)
            counts[note] += 1
    more = {note: f" and {count - 1} more" if count > 1 else "" for note, count in counts.items()}
    return tuple((note[0], f"{name}{more[note]}: {note[1]}") for note, name in first.items())
