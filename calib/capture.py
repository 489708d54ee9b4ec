"""Capture: run a model one decoder block at a time over the calibration windows.

Only the embedding (once), one block and the hidden states are in memory. What surrounds the blocks (masks, rotary tables) is
recorded by stubs in their place, so that no architecture has to be known by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from calib.evidence import Evidence, Gatherer, Statistic
from formats.skeleton import Skeleton
from quant.errors import NonFiniteTensor, SourceError

Fetch = Callable[[str], Tensor]
Progress = Callable[[int, int], None]
Call = tuple[tuple[Any, ...], dict[str, Any]]
T = TypeVar("T", bound=Statistic)


class _Stop(Exception):
    """Ends a forward pass when everything that was wanted from it has been seen."""


class _Stub(nn.Module):
    """Stands in for one block: notes the arguments it is called with and hands the hidden states on."""

    def __init__(self, block: nn.Module, calls: list[Call], hidden: list[Tensor], last: bool) -> None:
        super().__init__()
        # Past nn.Module's registration: the block's parameters must not appear twice in the model.
        self.__dict__.update(_block=block, _calls=calls, _hidden=hidden, _last=last)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_block"], name)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not self.__dict__["_calls"]:
            self.__dict__["_hidden"].append(hidden)
        self.__dict__["_calls"].append((args, kwargs))
        if self.__dict__["_last"]:
            raise _Stop
        return hidden


@dataclass(frozen=True, slots=True)
class BlockInputs:
    """Hidden states ``[batch, length, hidden]`` per batch of windows, and every block's other arguments by batch shape."""

    hidden: tuple[Tensor, ...]
    calls: Mapping[tuple[int, int], tuple[Call, ...]]

    def sample(self, length: int) -> Tensor:
        """The first positions of the first window: ``[1, length, hidden]``."""
        return self.hidden[0][:1, :length]


class BlockRunner:
    """Runs the blocks of a skeleton one by one, with weights fetched from a checkpoint.

    Args:
        skeleton: the model without weights.
        fetch: the stored tensor of a parameter name, any float type; it is used in float32.
        device: where blocks run.
    """

    SAMPLE = 128

    def __init__(self, skeleton: Skeleton, fetch: Fetch, device: str = "cpu") -> None:
        self.skeleton = skeleton
        self.fetch = fetch
        self.device = device

    def block(self, index: int) -> nn.Module:
        return self.skeleton.blocks[index]

    def block_parameters(self, index: int) -> tuple[str, ...]:
        """Full names of the block's parameters."""
        prefix = f"{self.skeleton.blocks_name}.{index}."
        return tuple(name for name in self.skeleton.parameter_names() if name.startswith(prefix))

    def load(self, names: Iterable[str]) -> None:
        for name in names:
            self.skeleton.set(name, self.fetch(name).to(self.device, torch.float32))

    @torch.no_grad()
    def start(self, ids: Tensor, batch: int) -> BlockInputs:
        """Embed the windows ``[n, length]`` and record every block's other arguments; the embedding is dropped afterwards."""
        inner, head = self.skeleton.blocks_name + ".", self._head_prefix()
        outer = [name for name in self.skeleton.parameter_names() if not name.startswith((inner, head))]
        self.load(outer)
        hidden: list[Tensor] = []
        calls: dict[tuple[int, int], tuple[Call, ...]] = {}
        for chunk in (*torch.split(ids, batch), ids[:1, : self.SAMPLE]):
            states, seen = self._record(chunk.to(self.device))
            hidden.append(states)
            calls[(chunk.shape[0], chunk.shape[1])] = seen
        self.skeleton.clear(outer)
        return BlockInputs(tuple(hidden[:-1]), calls)

    def _head_prefix(self) -> str:
        head = self.skeleton.model.get_output_embeddings()
        names = [name for name, module in self.skeleton.model.named_modules() if module is head]
        return f"{names[0]}." if names else "\0"

    def _record(self, ids: Tensor) -> tuple[Tensor, tuple[Call, ...]]:
        blocks = self.skeleton.blocks
        originals = list(blocks)
        calls: list[Call] = []
        hidden: list[Tensor] = []
        try:
            for index, block in enumerate(originals):
                blocks[index] = _Stub(block, calls, hidden, index == len(originals) - 1)
            self.skeleton.model(input_ids=ids, use_cache=False)
        except _Stop:
            pass
        finally:
            for index, block in enumerate(originals):
                blocks[index] = block
        return hidden[0], tuple(calls)

    @torch.no_grad()
    def forward(self, index: int, hidden: Tensor, inputs: BlockInputs) -> Tensor:
        """Output ``[batch, length, hidden]`` of block ``index``, whose weights must be loaded; no gradient is recorded."""
        return self.forward_with_gradient(index, hidden, inputs)

    def forward_with_gradient(self, index: int, hidden: Tensor, inputs: BlockInputs) -> Tensor:
        """The same, for parameters that are being learned."""
        args, kwargs = inputs.calls[(hidden.shape[0], hidden.shape[1])][index]
        output = self.block(index)(hidden, *args, **kwargs)
        states: Tensor = output[0] if isinstance(output, tuple) else output
        return states

    def advance(self, index: int, inputs: BlockInputs) -> BlockInputs:
        """The hidden states after block ``index``. Raises NonFiniteTensor where they first stop being finite."""
        after = tuple(self.forward(index, hidden, inputs) for hidden in inputs.hidden)
        if not all(bool(torch.isfinite(states).all()) for states in after):
            raise NonFiniteTensor(
                f"hidden states after {self.skeleton.blocks_name}.{index} are not finite: nothing is calibrated on them; "
                "check the source weights of this block"
            )
        return BlockInputs(after, inputs.calls)

    def gather(
        self, index: int, modules: Sequence[str], inputs: BlockInputs, routed: frozenset[str] = frozenset()
    ) -> dict[str, Evidence]:
        """Evidence on the inputs of the named modules over all windows; see ``gather_as``."""
        return self.gather_as(Evidence, index, modules, inputs, routed)

    def gather_as(
        self, kind: Gatherer[T], index: int, modules: Sequence[str], inputs: BlockInputs, routed: frozenset[str] = frozenset()
    ) -> dict[str, T]:
        """A statistic of the inputs of the named modules (names inside the block, each run once in a pass) over all windows.

        Args:
            kind: what is gathered.
            routed: those that run only on tokens sent to them; where there is none, their evidence is that of no token.

        Raises:
            SourceError: another module that never ran: nothing is quantised on evidence that was never gathered.
            NonFiniteTensor: an input, or a sum of its products, that is not finite; the block before had finite outputs.
        """
        found: dict[str, T] = {}
        waiting: set[str] = set()

        def watch(name: str, value: Tensor) -> None:
            seen = kind.of(value)
            found[name] = found[name] + seen if name in found else seen
            waiting.discard(name)
            if not waiting:
                raise _Stop  # what the block does with the last of these inputs need not be computed

        with watching_inputs(self.block(index), modules, watch):
            for hidden in inputs.hidden:
                waiting.update(modules)
                with suppress(_Stop):
                    self.forward(index, hidden, inputs)
        missed = [name for name in modules if name not in found]
        for name in routed.intersection(missed):
            module: Any = self.block(index).get_submodule(name)
            found[name] = kind.none(module.in_features)
        missed = [name for name in missed if name not in routed]
        if missed:
            raise SourceError(
                f"{self.skeleton.blocks_name}.{index}.{missed[0]} and {len(missed) - 1} more matrices never ran on the "
                "calibration windows: keep them in float with a recipe rule, or use rtn"
            )
        for name, evidence in found.items():
            if not evidence.finite:
                raise NonFiniteTensor(
                    f"inputs of {self.skeleton.blocks_name}.{index}.{name} are not finite: nothing is calibrated on them; "
                    "check the source weights of this block"
                )
        return found

    def gather_pair(
        self,
        index: int,
        module: str,
        streams: tuple[BlockInputs, BlockInputs],
        weights: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
    ) -> Evidence:
        """Evidence on one module's inputs in the quantised stream and in the float stream beside it, batch by batch.

        Args:
            streams: hidden states before the block: quantised, float.
            weights: the block's parameters, by name inside it, that go with each; the quantised ones are loaded on return.

        Raises:
            SourceError, NonFiniteTensor: as ``gather``.
        """
        prefix = f"{self.skeleton.blocks_name}.{index}."
        found: Evidence | None = None
        for batch in range(len(streams[0].hidden)):
            seen: list[Tensor] = []
            for side in (1, 0):
                for name, value in weights[side].items():
                    self.skeleton.set(prefix + name, value)
                seen.append(self._input_of(index, module, streams[side], batch))
            pair = Evidence.of_pair(seen[1], seen[0])
            found = pair if found is None else found + pair
        assert found is not None  # there is no calibration without a batch
        assert found.cross is not None
        if not bool(torch.isfinite(found.gram).all() and torch.isfinite(found.cross).all()):
            raise NonFiniteTensor(f"inputs of {prefix}{module} are not finite: check the source weights of this block")
        return found

    def _input_of(self, index: int, module: str, inputs: BlockInputs, batch: int) -> Tensor:
        seen: list[Tensor] = []

        def watch(name: str, value: Tensor) -> None:
            seen.append(value)
            raise _Stop

        with watching_inputs(self.block(index), [module], watch), suppress(_Stop):
            self.forward(index, inputs.hidden[batch], inputs)
        if not seen:
            raise SourceError(f"{self.skeleton.blocks_name}.{index}.{module} never ran on the calibration windows")
        return seen[0]


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Hooks that last as long as the context."""
    held = list(handles)
    try:
        yield
    finally:
        for handle in held:
            handle.remove()


def watching_inputs(
    block: nn.Module, modules: Iterable[str], watch: Callable[[str, Tensor], None]
) -> AbstractContextManager[None]:
    """Call ``watch(name, input)`` whenever one of the named modules inside ``block`` runs."""

    def hook_for(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        return lambda module, args: watch(name, args[0])

    return hooked(block.get_submodule(name).register_forward_pre_hook(hook_for(name)) for name in modules)


def watching_outputs(block: nn.Module, modules: Iterable[str], watch: Callable[[str, Any], None]) -> AbstractContextManager[None]:
    """Call ``watch(name, output)`` whenever one of the named modules inside ``block`` has run."""

    def hook_for(name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        return lambda module, args, output: watch(name, output)

    return hooked(block.get_submodule(name).register_forward_hook(hook_for(name)) for name in modules)
