"""Where an artefact says how its cache is meant to be stored, and where the calibrated scales lie.

Engines read one thing only: an fp8 cache with one scale for the keys and one for the values of a layer, float32 ``[1]`` tensors
``model.layers.N.self_attn.k_scale`` and ``.v_scale`` among the weights (real value = code x scale), announced by
``kv_cache_scheme`` in the quantisation block. They get a weight file of their own, written after the others, because they are
calibrated on the finished artefact.

vLLM refuses any other ``kv_cache_scheme`` and any tensor name it does not know, and without an index it reads every
``*.safetensors`` of the folder. So all other formats stand under a key of our own in ``config.json``, which engines pass over,
and their scales in a subfolder, where no engine looks: the weights load everywhere as they would without. No torch is imported
here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from formats.folder import SINGLE_NAME
from formats.header import build_header
from formats.shards import ShardPlan, TensorSpec
from quant.errors import SchemeError
from quant.kvscheme import KvScheme

CONFIG_KEY = "bitledger_kv_cache"
SIDE_NAME = "kv_cache/scales.safetensors"
ROLE = "kv_scales"
ENGINE_SCHEME = KvScheme("e4m3", "tensor", "tensor")
SIDES = ("keys", "values")
_ENGINE_NAMES = {"keys": "k_scale", "values": "v_scale"}
_ATTENTION = re.compile(r"(.+\.(\d+)\.self_attn)\.")


@dataclass(frozen=True, slots=True)
class KvPlan:
    """What will be stored for a cache: scheme, the cache's shape, and the scales as ``(side, layer, tensor)``."""

    scheme: KvScheme
    layers: int
    kv_heads: int
    head_dim: int
    scales: tuple[tuple[str, int, TensorSpec], ...]

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(spec for _, _, spec in self.scales)

    @property
    def for_engines(self) -> bool:
        """Whether engines read this cache's scales from the weight files."""
        return self.scheme == ENGINE_SCHEME

    @property
    def bytes_per_token(self) -> int:
        return self.scheme.bytes_per_token(self.layers, self.kv_heads, self.head_dim)

    @property
    def static_bytes(self) -> int:
        return self.scheme.static_bytes(self.layers, self.kv_heads, self.head_dim)


def plan_kv(config: Mapping[str, Any], names: Iterable[str], scheme: KvScheme) -> KvPlan:
    """The plan for a model's plain configuration and its tensor names.

    Raises:
        SchemeError: no attention cache of this shape, a head that cannot be stored so, or names that engines would not find.
    """
    text = config.get("text_config", config)
    layers, heads = text.get("num_hidden_layers"), text.get("num_attention_heads")
    kv_heads, head_dim = text.get("num_key_value_heads") or heads, text.get("head_dim")
    if text.get("kv_lora_rank") is not None:
        raise SchemeError(f"{scheme}: the model caches latent vectors (kv_lora_rank), not keys and values: use --kv-cache none")
    if head_dim is None and isinstance(heads, int) and heads > 0:
        head_dim = int(text.get("hidden_size") or 0) // heads
    for key, value in (("num_hidden_layers", layers), ("num_key_value_heads", kv_heads), ("head_dim", head_dim)):
        if not isinstance(value, int) or value < 1:
            raise SchemeError(f"{scheme}: config.json gives no {key}, without which a cache has no size: use --kv-cache none")
    scheme.check(head_dim)
    modules = _attention_modules(names) if scheme == ENGINE_SCHEME else {}
    if scheme == ENGINE_SCHEME and sorted(modules) != list(range(layers)):
        raise SchemeError(
            f"{scheme}: engines look for the scales in modules named layers.N.self_attn, and the checkpoint has them for "
            f"{len(modules)} of {layers} layers: use --kv-cache int8, which the artefact keeps under names of its own"
        )
    specs = []
    for layer in range(layers):
        for side, sharing in zip(SIDES, (scheme.keys, scheme.values), strict=True):
            if modules:
                specs.append((side, layer, TensorSpec(f"{modules[layer]}.{_ENGINE_NAMES[side]}", "F32", (1,), ROLE)))
            elif sharing != "token":
                shape = (kv_heads, 1, head_dim) if sharing == "channel" else (1, 1, 1)
                specs.append((side, layer, TensorSpec(f"layers.{layer}.{side}", "F32", shape, ROLE)))
    return KvPlan(scheme, layers, kv_heads, head_dim, tuple(specs))


def _attention_modules(names: Iterable[str]) -> dict[int, str]:
    """Layer -> dotted name of its attention module; empty where two lists of layers have one each."""
    found: dict[int, str] = {}
    for name in names:
        match = _ATTENTION.match(name)
        if match and found.setdefault(int(match.group(2)), match.group(1)) != match.group(1):
            return {}
    return found


def with_kv_shard(shards: Sequence[ShardPlan], plan: KvPlan | None, metadata: Mapping[str, str]) -> tuple[ShardPlan, ...]:
    """The weight files as they will be called with the file of scales behind them; as they are where there is none."""
    if plan is None or not plan.for_engines:
        return tuple(shards)
    names = shard_names(len(shards) + 1)
    renamed = [ShardPlan(name, shard.tensors, shard.header) for name, shard in zip(names, shards, strict=False)]
    return (*renamed, scales_file(names[-1], plan, metadata))


def shard_names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE_NAME]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def scales_file(name: str, plan: KvPlan, metadata: Mapping[str, str]) -> ShardPlan:
    """The safetensors file of all scales, planned to the byte."""
    entries, offset = [], 0
    for spec in plan.specs:
        entries.append((spec.name, spec.dtype, spec.shape, offset, offset + spec.nbytes))
        offset += spec.nbytes
    return ShardPlan(name, plan.specs, build_header(entries, metadata))


def kv_config(plan: KvPlan) -> dict[str, Any]:
    """The entry of config.json under ``CONFIG_KEY``: the scheme, and the file of its scales unless they lie in the weights."""
    side = SIDE_NAME if plan.scales and not plan.for_engines else None
    return {"scheme": str(plan.scheme), "scales": side}


def engine_block(scheme: KvScheme | None) -> dict[str, Any] | None:
    """``kv_cache_scheme`` of the quantisation block: None for all that engines do not read."""
    if scheme != ENGINE_SCHEME:
        return None
    return {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}


def engine_sentence(scheme: KvScheme) -> str:
    """What engines make of an artefact with this cache."""
    if scheme == ENGINE_SCHEME:
        return (
            "vLLM and SGLang read these scales, and vLLM turns the fp8 cache on by itself (--kv-cache-dtype auto); "
            "transformers loads the weights and keeps a float cache"
        )
    return (
        f"no engine reads a cache as {scheme} from a checkpoint (vLLM and SGLang take fp8 with one scale per layer only): the "
        "weights load as they would without it, the cache runs in eval.kvcache.QuantisedCache with transformers"
    )
