"""The ``quantization_config`` block of the output, derived from what is stored.

One scheme: the group targets the class ``Linear`` and everything that is not quantised is listed in ``ignore``. Several schemes:
engines disagree about the order of class and name matches, so every group then names its modules by anchored regular expressions,
one per kind of module where that is unambiguous. ``format`` stands in every group as well as at the top.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from formats.codec import get_codec
from formats.fates import Quantise, TensorPlan
from formats.kv_files import engine_block
from formats.tables import is_head, is_table, untied_config
from quant.kvscheme import KvScheme
from quant.scheme import Scheme

# The release whose layout is followed; informational, no reader checks it.
LAYOUT_VERSION = "0.15.0"
OWN_METHOD, OWN_VERSION = "bitledger", "1"

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def family_of(leaf: str) -> str:
    """One name for all matrices that engines fuse into one (``q_proj`` for q, k and v), by the last part of the module's name."""
    return next((family[0] for family in _FUSED if leaf in family), leaf)


def block_head(codecs: Iterable[str]) -> dict[str, str]:
    """The entries of the block that say who can read it, for the layouts in use.

    With a layout of this project's own there is no ``quant_method`` but a ``method`` that only its reader looks at: transformers
    refuses a block without the first, but passes over one that it does not know and fills the matrices with random numbers.
    """
    names = sorted(set(codecs))
    top = names[0] if len(names) == 1 else "mixed-precision"
    methods = {get_codec(name).quant_method for name in names}
    if len(methods) == 1 and None not in methods:
        return {"quant_method": str(methods.pop()), "version": LAYOUT_VERSION, "format": top}
    return {"method": OWN_METHOD, "version": OWN_VERSION, "format": top}


def kept_linears(plans: Sequence[TensorPlan]) -> list[str]:
    """Modules of a plan that are matrices, stay in float and are no embedding table: what engines would take for quantised."""
    return sorted(
        plan.module
        for plan in plans
        if not isinstance(plan.fate, Quantise)
        and len(plan.info.shape) == 2
        and plan.name.endswith(".weight")
        and not is_table(plan.module)
    )


def fused_differences(plans: Sequence[TensorPlan]) -> list[str]:
    """A sentence for every set of matrices that engines fuse into one (q, k, v; gate, up) and a recipe stores differently."""
    stored = {plan.module: plan.fate.scheme if isinstance(plan.fate, Quantise) else None for plan in plans}
    found = []
    for module in stored:
        parent, _, leaf = module.rpartition(".")
        for family in _FUSED:
            members = [f"{parent}.{name}" for name in family if f"{parent}.{name}" in stored]
            if leaf == family[0] and len({stored[member] for member in members}) > 1:
                ways = ", ".join(f"{member.rpartition('.')[2]} {stored[member] or 'float'}" for member in members)
                found.append(
                    f"{parent}: {ways}: vLLM and SGLang fuse these and refuse different schemes, transformers loads them"
                )
    return found


def quantization_config(plans: Sequence[TensorPlan], kv_scheme: KvScheme | None = None) -> dict[str, Any]:
    """The block for a plan; what stays in float is ignored by name, the output head too if it is tied and not in the plan.

    Quantised tables and heads are always named: for vLLM a head is no Linear, and for no reader is an embedding one.
    """
    heads = {plan.module for plan in plans if isinstance(plan.fate, Quantise) and is_head(plan.module)}
    ignored = sorted({*kept_linears(plans), "lm_head"} - heads)
    by_fate: dict[tuple[str, Scheme], list[str]] = defaultdict(list)
    for plan in plans:
        if isinstance(plan.fate, Quantise):
            by_fate[(plan.fate.codec, plan.fate.scheme)].append(plan.module)
    single = len(by_fate) == 1
    groups = {}
    for index, ((codec, scheme), modules) in enumerate(by_fate.items()):
        others = [name for key, names in by_fate.items() if key != (codec, scheme) for name in names]
        named = [module for module in modules if is_table(module) or is_head(module)]
        linears = ["Linear"] if len(named) < len(modules) else []
        targets = [*linears, *_targets(named, [])] if single else _targets(modules, [*others, *ignored])
        groups[f"group_{index}"] = get_codec(codec).config_group(scheme, targets)
    return {
        **block_head([codec for codec, _ in by_fate]),
        "quantization_status": "compressed",
        "ignore": ignored,
        "kv_cache_scheme": engine_block(kv_scheme),
        "config_groups": groups,
    }


def _targets(modules: Sequence[str], others: Sequence[str]) -> list[str]:
    """Anchored patterns that match all of ``modules`` and none of ``others``: by last name where possible, else one each."""
    by_leaf: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        by_leaf[module.rpartition(".")[2]].append(module)
    foreign = {name.rpartition(".")[2] for name in others}
    targets: list[str] = []
    for leaf, members in by_leaf.items():
        if leaf in foreign:
            targets += [f"re:{re.escape(member)}$" for member in members]
        else:
            targets.append(
                f"re:.*\\.{re.escape(leaf)}$" if all("." in member for member in members) else f"re:{re.escape(leaf)}$"
            )
    return targets


def output_config(config: Mapping[str, Any], plans: Sequence[TensorPlan]) -> dict[str, Any]:
    """config.json of the output without its block: the source's, untied where the plan stores both halves of a pair."""
    return untied_config(config) if is_untied(plans) else dict(config)


def is_untied(plans: Sequence[TensorPlan]) -> bool:
    """Whether the plan stores both halves of what is one tied table in the source."""
    return any(plan.untied for plan in plans)
