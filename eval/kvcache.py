"""A transformers cache that really holds codes, its calibration, and what it costs in quality.

Every ``update`` stores the new keys and values as codes and hands attention what a kernel would read back: all tokens
dequantised, those of the current call included. So one pass over a window sees a quantised cache at every position, as
decoding token by token does. Scales are calibrated at ``update`` too, on keys after their rotation, whatever the matrices of
attention are called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, get_layer_types_and_kwargs

from eval.kv_checks import check_owned, check_scales, head_shape
from formats.kv_files import SIDES
from formats.reader import Artefact
from quant.errors import SchemeError
from quant.kvcache import Stored, restore, static_scales, store
from quant.kvscheme import KvScheme, Sharing

Progress = Callable[[int, int], None]
SLIDING = "sliding_attention"


@dataclass
class KvEvidence:
    """Largest magnitudes seen at the cache, per layer: ``[heads, 1, head_dim]`` of keys and of values."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def see(self, layer: int, keys: Tensor, values: Tensor) -> None:
        for seen, states in ((self.keys, keys), (self.values, values)):
            largest = states.detach().float().abs().amax(dim=(0, 2)).unsqueeze(1)
            if layer == len(seen):
                seen.append(largest)
            else:
                seen[layer] = torch.maximum(seen[layer], largest)

    def scales(self, scheme: KvScheme) -> StaticScales:
        def of(seen: Iterable[Tensor], sharing: Sharing) -> list[Tensor | None]:
            if sharing == "token":
                return [None for _ in seen]
            return [static_scales(s if sharing == "channel" else s.amax().reshape(1, 1, 1), scheme.element) for s in seen]

        return StaticScales(of(self.keys, scheme.keys), of(self.values, scheme.values))

    def odd_layers(self, ratio: float = 20.0) -> list[int]:
        """Layers with a key channel ``ratio`` times larger than the median one: per-token scales drown the others there."""
        found = []
        for layer, largest in enumerate(self.keys):
            each = largest.flatten(1)
            if bool((each.amax(1) > ratio * each.median(1).values.clamp_min(1e-12)).any()):
                found.append(layer)
        return found


@dataclass(frozen=True)
class StaticScales:
    """Calibrated scales per layer, float32: ``[heads, 1, head_dim]`` per channel, ``[1, 1, 1]`` per tensor, None per token."""

    keys: Sequence[Tensor | None]
    values: Sequence[Tensor | None]

    def check(self) -> None:
        """Raise SchemeError where a scale is not finite or not above 0, or all are one number: then nothing was calibrated."""
        self.check_each()
        for name, scales in (("key", self.keys), ("value", self.values)):
            flat = [scale.flatten() for scale in scales if scale is not None]
            # One layer may well have one scale, but no calibration finds exactly 1.0.
            if flat and bool((torch.cat(flat) == flat[0][0]).all()) and (len(flat) > 1 or float(flat[0][0]) == 1.0):
                raise SchemeError(f"all {name} scales are {float(flat[0][0]):g}: the cache was not calibrated")

    def check_each(self) -> None:
        """Raise SchemeError for a scale that is not finite or not above 0."""
        for name, scales in (("key", self.keys), ("value", self.values)):
            for layer, scale in enumerate(scales):
                if scale is not None and not bool((torch.isfinite(scale) & (scale > 0)).all()):
                    raise SchemeError(f"a {name} scale of layer {layer} is not finite or not above 0: calibrate the cache again")


class _Observer(DynamicLayer):
    def __init__(self, layer: int, evidence: KvEvidence) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._layer, self._evidence = layer, evidence

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self._evidence.see(self._layer, key_states, value_states)
        found: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
        return found


class QuantisedLayer(DynamicLayer):
    """One layer's cache: ``keys`` and ``values`` are codes, their scales lie beside them."""

    def __init__(self, scheme: KvScheme, key_scales: Tensor | None, value_scales: Tensor | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.scheme = scheme
        self._static = (key_scales, value_scales)
        self._stored: tuple[Stored, Stored] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        scheme = self.scheme
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new = (
            store(key_states, scheme.element, scheme.keys, scheme.group, self._static[0]),
            store(value_states, scheme.element, scheme.values, scheme.group, self._static[1]),
        )
        self._put(new if self._stored is None else (self._stored[0].then(new[0]), self._stored[1].then(new[1])))
        return self._read(0, key_states.dtype), self._read(1, value_states.dtype)

    def _put(self, stored: tuple[Stored, Stored]) -> None:
        self._stored = stored
        self.keys, self.values = stored[0].codes, stored[1].codes

    def _read(self, which: int, dtype: torch.dtype) -> Tensor:
        assert self._stored is not None
        return restore(self._stored[which], self.scheme.element, self._static[which], dtype)

    def _change(self, change: str, *arguments: object) -> None:
        if self._stored is not None:
            self._put((self._stored[0].map(change, *arguments), self._stored[1].map(change, *arguments)))

    def reset(self) -> None:
        self._stored = None
        super().reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens; ValueError, as in the library's own caches, for a number above 0."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes minus the number of tokens to remove, got {tokens_to_remove}")
        if tokens_to_remove and self._stored is not None:
            self._change("narrow", -2, 0, max(self.get_seq_length() + tokens_to_remove, 0))
            self._change("clone")  # a view would keep the memory of all tokens

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._change("index_select", 0, beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change("repeat_interleave", repeats, 0)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._change("__getitem__", indices)

    @property
    def nbytes(self) -> int:
        """Bytes held for tokens: codes and their scales."""
        return 0 if self._stored is None else sum(stored.nbytes for stored in self._stored)


class QuantisedCache(Cache):
    """A cache for ``generate`` and for plain passes; with ``only``, all but these layers stay in float.

    Raises SchemeError for a model that it cannot serve.
    """

    def __init__(
        self, config: Any, scheme: KvScheme, scales: StaticScales | None = None, only: frozenset[int] | None = None
    ) -> None:
        text = check_config(config, scheme)
        count = int(text.num_hidden_layers)
        self._shape = head_shape(text)
        check_scales(scheme, scales, count, *self._shape)
        keys, values = (scales.keys, scales.values) if scales is not None else ([None] * count, [None] * count)
        layers: list[Any] = [
            QuantisedLayer(scheme, k, v) if only is None or layer in only else DynamicLayer()
            for layer, (k, v) in enumerate(zip(keys, values, strict=True))
        ]
        super().__init__(layers=layers)

    @property
    def nbytes(self) -> int:
        """Bytes held for tokens over all layers."""
        return sum(layer.nbytes for layer in self.layers if isinstance(layer, QuantisedLayer))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Raises SchemeError for heads that are not those of the configuration: the promised bytes would not be the held ones."""
        for name, states in (("keys", key_states), ("values", value_states)):
            found = (states.shape[1], states.shape[3])
            if found != self._shape:
                raise SchemeError(
                    f"layer {layer_idx} caches {name} of {found[0]} heads x {found[1]} channels, the configuration says "
                    f"{self._shape[0]} x {self._shape[1]}: a cache of this kind is not supported, use a float cache (none)"
                )
        read: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return read


def check_config(config: Any, scheme: KvScheme) -> Any:
    """The text configuration, after checking that every layer caches keys and values and a head can be stored so.

    Layers with a sliding window keep all their tokens, too: the model's own mask hides those outside of the window, and the
    bytes are those of full attention.
    """
    text = config.get_text_config()
    others = set(layer_kinds(text)) - {"full_attention", SLIDING}
    if others:
        raise SchemeError(
            f"a cache of {', '.join(sorted(others))} layers is not supported yet: only full and sliding attention are"
        )
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    scheme.check(int(head_dim))
    check_owned(text, scheme)
    return text


def layer_kinds(text: Any) -> list[str]:
    """Kind of every layer, as the library's own cache sees them: some configurations give a window and name no kinds."""
    kinds: list[str] = get_layer_types_and_kwargs(text)[0]
    return kinds


class WithCache:
    """A model whose every call starts with an empty quantised cache and fills it; for whatever measures ``model(ids).logits``."""

    def __init__(
        self, model: Any, scheme: KvScheme, scales: StaticScales | None = None, only: frozenset[int] | None = None
    ) -> None:
        self.model, self.scheme, self.scales, self.only = model, scheme, scales, only

    def __call__(self, ids: Tensor, **kwargs: Any) -> Any:
        cache = QuantisedCache(self.model.config, self.scheme, self.scales, self.only)
        return self.model(ids, **{**kwargs, "use_cache": True, "cache": cache})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["model"], name)


@torch.inference_mode()
def calibrate(model: Any, ids: Tensor, batch: int = 1, progress: Progress | None = None) -> KvEvidence:
    """Magnitudes of everything that ``model`` caches on windows ``[n, length]``.

    Rotation makes the range of a key's channel depend on where the token stands: slow channels have not turned far in a short
    window. Scores depend on distances only, so the windows are spread over all positions of a model that rotates its keys.

    Raises:
        SchemeError: layers that cache nothing.
    """
    evidence = KvEvidence()
    text = model.config.get_text_config()
    count = int(text.num_hidden_layers)
    starts = _starts(text, len(ids), ids.shape[1])
    device = next(model.parameters()).device
    done = 0
    for rows, begin in zip(torch.split(ids, batch), torch.split(starts, batch), strict=True):
        cache = Cache(layers=[_Observer(layer, evidence) for layer in range(count)])
        positions = begin[:, None] + torch.arange(ids.shape[1])
        model(rows.to(device), position_ids=positions.to(device), use_cache=True, cache=cache)
        done += len(rows)
        if progress is not None:
            progress(done, len(ids))
    if len(evidence.keys) != count:
        raise SchemeError(f"{len(evidence.keys)} of {count} layers put keys into the cache: its format is not supported")
    return evidence


def _starts(text: Any, windows: int, length: int) -> Tensor:
    """First position of every calibration window: evenly over the model's positions, or 0 where keys are not rotated."""
    room = int(getattr(text, "max_position_embeddings", 0) or 0) - length
    rotates = getattr(text, "rope_parameters", None) or getattr(text, "rope_theta", None)
    if not rotates or room <= 0 or windows < 2:
        return torch.zeros(windows, dtype=torch.int64)
    return torch.linspace(0, room, windows).round().to(torch.int64)


def stored_cache(folder: Path, config: Any) -> QuantisedCache:
    """An empty cache as the artefact in ``folder`` describes it, for its model of the transformers ``config``.

    Raises:
        SchemeError: the artefact describes none.
    """
    found = Artefact(folder).kv_cache()
    if found is None:
        raise SchemeError(f"{folder} describes no quantised cache: make one with --kv-cache")
    scheme, scales = found
    count = int(config.get_text_config().num_hidden_layers)
    sides = ([scales.get((side, layer)) for layer in range(count)] for side in SIDES)
    static = StaticScales(*([s if s is None or s.ndim == 3 else s.reshape(1, 1, 1) for s in each] for each in sides))
    return QuantisedCache(config, scheme, static if scheme.static else None)
