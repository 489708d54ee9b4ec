"""A transformers model without weights: the architecture with its buffers, whose parameters are set one by one.

The whole model never has to be in memory: ``Skeleton.set`` puts tensors into modules and ``Skeleton.clear`` takes them out again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quant.errors import SourceError


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep the library's own progress bars and advice off the terminal: ours is the only voice there."""
    from transformers.utils import logging

    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


def model_config(folder: Path) -> Any:
    """The transformers configuration of a folder, without any quantisation block. Code in the folder is never run."""
    from transformers import AutoConfig

    with quiet_transformers():
        try:
            config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        except (ValueError, KeyError, OSError, TypeError) as error:  # the last: a value of the wrong kind in config.json
            raise SourceError(
                f"transformers does not know the architecture in {folder / 'config.json'}: {str(error).splitlines()[0]}"
            ) from error
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    return config


class Skeleton:
    """The model of a folder's ``config.json`` with parameters on the meta device and real buffers.

    Attributes:
        model: the transformers causal language model, in evaluation mode, float32.
        blocks_name: dotted name of the list of decoder blocks, for example ``model.layers``.

    Raises:
        SourceError: an unknown architecture, or one whose decoder blocks cannot be found.
    """

    def __init__(self, folder: Path) -> None:
        from accelerate import init_empty_weights
        from transformers import AutoModelForCausalLM

        config = model_config(folder)
        with quiet_transformers(), init_empty_weights(include_buffers=False):
            try:
                # Attention is left to the library: fused where the architecture allows it, else plain (Gemma 2).
                self.model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
            except (ValueError, AttributeError, TypeError) as error:  # the last two: a value of the wrong kind in config.json
                raise SourceError(
                    f"{folder} is no causal language model that transformers knows: {str(error).splitlines()[0]}"
                ) from error
        self.blocks_name = self._find_blocks(int(config.num_hidden_layers))

    def _find_blocks(self, count: int) -> str:
        for name, module in self.model.named_modules():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                return str(name)
        raise SourceError(f"no list of {count} decoder blocks in {type(self.model).__name__}")

    @property
    def blocks(self) -> nn.ModuleList:
        found = self.model.get_submodule(self.blocks_name)
        assert isinstance(found, nn.ModuleList)
        return found

    def parameter_names(self) -> tuple[str, ...]:
        """All parameter names; a tied head appears under both of its names."""
        return tuple(name for name, _ in self.model.named_parameters(remove_duplicate=False))

    def check_stored(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise SourceError where stored tensors (name to shape) and the architecture's parameters disagree; reads no weight.

        Experts may be stored one by one and held fused, so that their names are not compared; a tied head need not be stored.
        """
        name = type(self.model).__name__
        wanted = {n: tuple(p.shape) for n, p in self.model.named_parameters(remove_duplicate=False)}
        wrong = [n for n, shape in shapes.items() if n in wanted and wanted[n] != shape]
        if wrong:
            raise SourceError(
                f"{len(wrong)} tensors have another shape than config.json says of {name}, the first is {wrong[0]}: "
                f"{list(shapes[wrong[0]])} stored, {list(wanted[wrong[0]])} expected"
            )
        known = wanted.keys() | {n for n, _ in self.model.named_buffers()}
        extra = [n for n in shapes if n not in known and not n.endswith("rotary_emb.inv_freq")]
        if extra and not any(".experts." in n for n in shapes):
            raise SourceError(f"the checkpoint stores {len(extra)} tensors that {name} does not have, the first is {extra[0]}")
        head = self.model.get_output_embeddings()
        tied = bool(self.model.config.tie_word_embeddings) and head is not None
        absent = [n for n in wanted if n not in shapes and ".experts." not in n and not (tied and self.get(n) is head.weight)]
        if absent:
            raise SourceError(f"the checkpoint lacks {len(absent)} parameters of {name}, the first is {absent[0]}")

    def set(self, name: str, value: Tensor) -> None:
        """Put ``value`` in place of the parameter ``name``. Raises SourceError where there is none or the shape differs."""
        path, _, leaf = name.rpartition(".")
        try:
            module = self.model.get_submodule(path)
        except AttributeError:
            module = None
        old = None if module is None else module._parameters.get(leaf)
        if module is None or old is None:
            raise SourceError(f"the architecture has no parameter {name}, but the checkpoint stores one")
        if old.shape != value.shape:
            raise SourceError(f"{name} is {list(value.shape)} in the checkpoint and {list(old.shape)} in the architecture")
        module._parameters[leaf] = nn.Parameter(value, requires_grad=False)

    def get(self, name: str) -> Tensor:
        return self.model.get_parameter(name)  # type: ignore[no-any-return]

    def clear(self, names: Iterable[str]) -> None:
        """Send parameters back to the meta device, which frees their memory."""
        for name in names:
            path, _, leaf = name.rpartition(".")
            module = self.model.get_submodule(path)
            module._parameters[leaf] = nn.Parameter(module._parameters[leaf].to("meta"), requires_grad=False)

    def is_tied_head(self, name: str) -> bool:
        """Whether ``name`` is the output head's weight of a model that uses its embedding there (before ``tie``)."""
        head = self.model.get_output_embeddings()
        return bool(self.model.config.tie_word_embeddings) and head is not None and self.get(name) is head.weight

    def tie(self) -> None:
        """Give a tied output head that has no value of its own the embedding."""
        head, embedding = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        weight = getattr(head, "weight", None)  # what stands in for a quantised head has none, and its own values
        if self.model.config.tie_word_embeddings and weight is not None and weight.is_meta:
            head.weight = embedding.weight

    def missing(self) -> tuple[str, ...]:
        """Names of parameters that are still without a value."""
        return tuple(name for name, value in self.model.named_parameters(remove_duplicate=False) if value.is_meta)
