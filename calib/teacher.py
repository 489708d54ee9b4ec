"""The float model as a teacher: its hidden states after the last block are computed once, block by block, and kept.

Only one block's weights are in memory at a time. Logits are made from the kept states whenever they are wanted, by the model's
own norm and head, so that they never have to be stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from calib.capture import BlockRunner, Fetch
from formats.skeleton import Skeleton

Report = Callable[[int, int], None]


class _Replay(nn.Module):
    """Stands in for a block: gives the kept states back, whatever it is called with."""

    def __init__(self, block: nn.Module, states: Tensor) -> None:
        super().__init__()
        # Past nn.Module's registration: the block's parameters must not appear in the model again.
        self.__dict__.update(_block=block, _states=states)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_block"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        states: Tensor = self.__dict__["_states"]
        return states


class Teacher:
    """Logits of a float model on windows of tokens.

    Args:
        skeleton: the model without weights; it belongs to the teacher from now on.
        fetch: the stored tensor of a parameter name.
        ids: int64 ``[n, length]``.
        batch: windows per forward pass.
    """

    def __init__(
        self, skeleton: Skeleton, fetch: Fetch, ids: Tensor, *, batch: int, device: str = "cpu", report: Report | None = None
    ) -> None:
        self.skeleton, self.ids, self.device = skeleton, ids, device
        runner = BlockRunner(skeleton, fetch, device)
        inputs = runner.start(ids, batch)
        count = len(skeleton.blocks)
        for index in range(count):
            names = runner.block_parameters(index)
            runner.load(names)
            inputs = runner.advance(index, inputs)
            skeleton.clear(names)
            if report is not None:
                report(index + 1, count)
        self.states = torch.cat(inputs.hidden)
        inner = skeleton.blocks_name + "."
        stored = [name for name in skeleton.parameter_names() if not name.startswith(inner)]
        for name in stored:
            if not skeleton.is_tied_head(name):
                skeleton.set(name, fetch(name).to(device, torch.float32))
        skeleton.tie()

    @torch.no_grad()
    def logits(self, index: int) -> Tensor:
        """Float32 ``[length, vocabulary]`` of one window."""
        with self._replaying(self.states[index : index + 1]):
            found: Tensor = self.skeleton.model(input_ids=self.ids[index : index + 1].to(self.device), use_cache=False).logits
        return found[0].float()

    @contextmanager
    def _replaying(self, states: Tensor) -> Iterator[None]:
        blocks = self.skeleton.blocks
        originals = list(blocks)
        try:
            for index, block in enumerate(originals):
                blocks[index] = _Replay(block, states)
            yield
        finally:
            for index, block in enumerate(originals):
                blocks[index] = block
