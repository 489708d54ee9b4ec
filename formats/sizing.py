"""A size to be met: how many bytes the planned matrices may take, and the best plan that stores all of them alike.

Everything follows from headers and layouts; no torch is imported here.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from formats.engine_config import family_of
from formats.fates import Quantise, TensorPlan, stored_specs
from formats.tables import is_head, is_table
from quant.errors import UsageError
from quant.scheme import Blocks, Scheme

WIDTHS = (2, 3, 4, 5, 6, 8)
GROUPS: tuple[Blocks, ...] = (32, 64, 128, "channel")
_COUNTED = ("codes", "scales", "zeros")


@dataclass(frozen=True, slots=True)
class SizeTarget:
    """At most so many bits per quantised weight, or at most so many bytes of weight files; exactly one of the two is given."""

    bits_per_weight: float | None = None
    file_bytes: int | None = None

    def __str__(self) -> str:
        return f"{self.bits_per_weight:g} bits per weight" if self.file_bytes is None else f"{self.file_bytes:,} bytes of weights"

    def budget(self, plans: Sequence[TensorPlan], planned_file_bytes: int) -> int:
        """Bytes for codes, scales and zero points of all matrices whose width is up for choice.

        Args:
            planned_file_bytes: bytes of all weight files of ``plans``; what they hold besides is not up for choice.

        Raises:
            UsageError: a target that even the smallest width does not meet, with what it would take.
        """
        matrices = up_for_choice(plans)
        if self.file_bytes is not None:
            fixed = planned_file_bytes - sum(matrix_bytes(plan) for plan in matrices)
            found = self.file_bytes - fixed
        else:
            assert self.bits_per_weight is not None
            found = int(self.bits_per_weight * sum(plan.info.elements for plan in matrices) / 8)
        least = sum(matrix_bytes(plan, dataclasses.replace(_scheme(plan), bits=WIDTHS[0])) for plan in matrices)
        if found < least:
            raise UsageError(
                f"a target of {self} leaves {max(found, 0):,} bytes for the matrices, which take {least:,} "
                f"with {WIDTHS[0]} bits: raise the target or choose larger groups"
            )
        return found


def up_for_choice(plans: Iterable[TensorPlan]) -> list[TensorPlan]:
    """The quantised matrices of decoder blocks; embeddings and output heads keep the scheme that a recipe gives them by name."""
    inner = [plan for plan in plans if not is_table(plan.module) and not is_head(plan.module)]
    return [plan for plan in inner if isinstance(plan.fate, Quantise)]


def matrix_bytes(plan: TensorPlan, scheme: Scheme | None = None) -> int:
    """Bytes of codes, scales and zero points of a planned matrix, in its own or in another scheme."""
    assert isinstance(plan.fate, Quantise)
    fate = plan.fate if scheme is None else dataclasses.replace(plan.fate, scheme=scheme)
    return sum(spec.nbytes for spec in stored_specs(plan.info, fate) if spec.role in _COUNTED)


def units_of(plans: Iterable[TensorPlan]) -> list[tuple[TensorPlan, ...]]:
    """Planned matrices, those together that engines fuse."""
    found: dict[tuple[str, str], list[TensorPlan]] = defaultdict(list)
    for plan in up_for_choice(plans):
        parent, _, leaf = plan.module.rpartition(".")
        found[(parent, family_of(leaf))].append(plan)
    return [tuple(members) for members in found.values()]


def with_schemes(plans: Sequence[TensorPlan], schemes: Mapping[str, Scheme]) -> tuple[TensorPlan, ...]:
    """The same plans with the schemes given by module name."""
    found = []
    for plan in plans:
        if isinstance(plan.fate, Quantise) and plan.module in schemes:
            fate = dataclasses.replace(plan.fate, scheme=schemes[plan.module])
            plan = dataclasses.replace(plan, fate=fate, stored=stored_specs(plan.info, fate))
        found.append(plan)
    return tuple(found)


def best_uniform(plans: Sequence[TensorPlan], budget: int) -> tuple[TensorPlan, ...]:
    """All matrices in the one width and group size that use the budget best; None of the choices is refused by a codec."""
    matrices = up_for_choice(plans)
    best: tuple[int, int, dict[str, Scheme]] | None = None
    for blocks in {*GROUPS, *(_scheme(plan).blocks for plan in matrices)}:
        for bits in WIDTHS:
            schemes = {plan.module: dataclasses.replace(_scheme(plan), bits=bits, blocks=blocks) for plan in matrices}
            if any(_refused(plan, schemes[plan.module]) for plan in matrices):
                continue
            size = sum(matrix_bytes(plan, schemes[plan.module]) for plan in matrices)
            if size <= budget and (best is None or (size, bits) > best[:2]):
                best = (size, bits, schemes)
    assert best is not None  # the budget holds the smallest width of the plan's own groups
    return with_schemes(plans, best[2])


def _refused(plan: TensorPlan, scheme: Scheme) -> bool:
    assert isinstance(plan.fate, Quantise)
    return dataclasses.replace(plan.fate, scheme=scheme).refusal(plan.matrix_shape) is not None


def _scheme(plan: TensorPlan) -> Scheme:
    assert isinstance(plan.fate, Quantise)
    return plan.fate.scheme
