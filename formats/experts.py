"""Experts one by one: transformers 5 holds all experts of a layer in two three-dimensional parameters, files hold them apart.

Calibration needs every expert's matrices as modules of their own that run on the tokens routed to them. ``unfuse_experts`` puts
such modules in the place of the fused ones, under the names that the checkpoint stores, and leaves routing as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from formats.skeleton import Skeleton
from quant.errors import SourceError

_STORED = re.compile(r"(?P<parent>.*)\.experts\.0\.(?P<gate>gate_proj|w1)\.weight")
_LEAVES = {"gate_proj": ("gate_proj", "up_proj", "down_proj"), "w1": ("w1", "w3", "w2")}


class Expert(nn.Module):
    """One gated expert: down(act(gate x) * (up x)); its matrices are called as in the checkpoint."""

    def __init__(self, leaves: tuple[str, str, str], hidden: int, inner: int, activation: Any) -> None:
        super().__init__()
        self.leaves = leaves
        self.activation = activation
        gate, up, down = leaves
        with torch.device("meta"):
            self.add_module(gate, nn.Linear(hidden, inner, bias=False))
            self.add_module(up, nn.Linear(hidden, inner, bias=False))
            self.add_module(down, nn.Linear(inner, hidden, bias=False))

    def forward(self, inputs: Tensor) -> Tensor:
        gate, up, down = (self.get_submodule(leaf) for leaf in self.leaves)
        output: Tensor = down(self.activation(gate(inputs)) * up(inputs))
        return output


class Experts(nn.Module):
    """All experts of a layer, each run once on the rows that are routed to it."""

    def __init__(self, fused: Any, leaves: tuple[str, str, str]) -> None:
        super().__init__()
        count, hidden, inner = fused.down_proj.shape
        self.count = int(count)
        for index in range(self.count):
            self.add_module(str(index), Expert(leaves, int(hidden), int(inner), fused.act_fn))

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Weighted sum ``[tokens, hidden]`` of the experts ``chosen`` ``[tokens, k]`` for every row of ``hidden``."""
        output = torch.zeros_like(hidden)
        for index in range(self.count):
            rows, places = torch.where(chosen == index)
            if len(rows):
                made = self.get_submodule(str(index))(hidden[rows]) * weights[rows, places, None]
                output.index_add_(0, rows, made.to(output.dtype))
        return output


def use_stored_names(skeleton: Skeleton, stored: Iterable[str]) -> dict[str, str]:
    """Call what holds experts, their routers too, as the checkpoint does; returns stored parents with their gates' names.

    Raises:
        SourceError: stored experts that the architecture has no place for.
    """
    parents = {match["parent"]: match["gate"] for match in map(_STORED.fullmatch, stored) if match}
    held = [name.removesuffix(".experts") for name, _ in skeleton.model.named_modules() if name.endswith(".experts")]
    places = {_block(name): name for name in held}
    for parent in parents:
        place = places.get(_block(parent))
        if place is None:
            raise SourceError(f"{parent}.experts is stored, but {type(skeleton.model).__name__} has no experts there")
        _rename(skeleton, place, parent)
    return parents


def unfuse_experts(skeleton: Skeleton, stored: Iterable[str]) -> None:
    """Replace the fused experts of a skeleton without weights, where the checkpoint ``stored`` them one by one.

    Raises:
        SourceError: experts that compute something else than the plain gated product, which is not taken apart.
    """
    for parent, gate in use_stored_names(skeleton, stored).items():
        owner = skeleton.model.get_submodule(parent)
        owner.experts = Experts(_checked(owner.experts, parent), _LEAVES[gate])


def expert_names(block: nn.Module) -> Mapping[str, Expert]:
    """The experts inside a block by their names there."""
    return {name: module for name, module in block.named_modules() if isinstance(module, Expert)}


def _block(name: str) -> str:
    """``model.layers.3`` of ``model.layers.3.mlp``: everything up to the last number."""
    match = re.match(r"(.*\.\d+)\.", name + ".")
    return match[1] if match else ""


def _rename(skeleton: Skeleton, place: str, stored: str) -> None:
    """Register the module at ``place`` under its stored name; the block's own code still finds it under the old one."""
    owner_name, _, old = place.rpartition(".")
    new = stored.removeprefix(owner_name + ".")
    if new == old:
        return
    owner = skeleton.model.get_submodule(owner_name)
    module = owner._modules.pop(old)
    owner.add_module(new, module)
    owner.__dict__[old] = module  # a plain attribute, which is found before registered modules are looked through


def _checked(fused: Any, parent: str) -> Any:
    plain = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True, "has_post_expert_norm": False}
    own_gate = getattr(getattr(type(fused), "_apply_gate", None), "__name__", "") != "_default_apply_gate"
    known = hasattr(fused, "is_transposed")  # set by the library for experts that it runs itself; the newer marks may be missing
    if not known or own_gate or any(getattr(fused, name, wanted) is not wanted for name, wanted in plain.items()):
        raise SourceError(
            f"{parent}.experts ({type(fused).__name__}) are no plain gated experts, which a calibrated method cannot take "
            "apart yet: use rtn, or keep them in float with a recipe rule"
        )
    return fused
