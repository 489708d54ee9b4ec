"""ModelShape: what a config.json says about the size of a model, and the counts that follow from it.

Counts follow the source text's section 1 and lab 1: all parameters for memory, and for products the same without an untied
input table (looking up one row is no product; the few norm entries stay in by convention). Grouped queries share keys and
values, so the cache counts ``kv_heads``; an explicit ``head_dim`` need not be hidden / heads; a tied table is one table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quant.errors import SourceError

# What a block of each family has beside Llama's seven matrices and two norms. Checked against the models of transformers 5.24.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "ministral": {},
    "granite": {},
    "phi3": {},
    "smollm3": {"tied": True},
    "gemma": {"tied": True},
    "gemma2": {"tied": True, "norms_per_block": 4},
    "gemma3_text": {"tied": True, "norms_per_block": 4, "qk_norm": True},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
}
_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder of the Llama kind: L blocks of attention (q, k, v, o) and gated MLP (gate, up, down), RMS norms.

    ``notes`` says in words what was assumed; it is empty where the config left nothing open.

    Raises:
        SourceError: a size below 1, or query heads that are no multiple of the key-value heads.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norms_per_block: int = 2
    sliding_window: int | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab"):
            if getattr(self, name) < 1:
                raise SourceError(f"the model's {name} must be 1 or more, got {getattr(self, name)}: mend config.json")
        if self.heads % self.kv_heads:
            raise SourceError(f"{self.heads} query heads cannot share {self.kv_heads} key-value heads evenly: mend config.json")

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, tied: bool | None = None) -> ModelShape:
        """The shape that a config.json describes; keys that it does not know are ignored.

        Args:
            config: the parsed config.json of a Llama-like model.
            tied: whether the output head is the input table, where the caller knows it from the tensors; None: as the config
                says, and where that is silent as the family does.

        Raises:
            SourceError: a missing or unusable key (named), or a kind of model that these counts do not describe.
        """
        _refuse_other_kinds(config)
        notes: list[str] = []
        family = config.get("model_type")
        traits = dict(FAMILIES.get(str(family), {}))
        if family not in FAMILIES:
            notes.append(f"model_type {family!r} is not a known family: parameters counted as Llama's")
        by_family = bool(traits.pop("tied", False))
        if tied is None:
            stated = config.get("tie_word_embeddings")
            tied = by_family if stated is None else bool(stated)
        hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
        window = _sliding_window(config)
        if window is not None:
            notes.append(f"a sliding window of {window} tokens is not credited: the cache is charged for the full context")
        bias = bool(config.get("attention_bias"))
        return cls(
            layers=_size(config, "num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=_size(config, "num_key_value_heads", default=heads),
            head_dim=_head_dim(config, hidden, heads),
            intermediate=_size(config, "intermediate_size"),
            vocab=_size(config, "vocab_size"),
            tied=tied,
            sliding_window=window,
            notes=tuple(notes),
            **{"qkv_bias": bias, "o_bias": bias, "mlp_bias": bool(config.get("mlp_bias")), **traits},
        )

    @property
    def attention_width(self) -> int:
        """heads x head_dim, the inner width of attention; equals ``hidden`` where the config gives no explicit head_dim."""
        return self.heads * self.head_dim

    def n_params(self) -> int:
        """All parameters; tied tables once."""
        kv_width = self.kv_heads * self.head_dim
        block = 2 * self.hidden * self.attention_width + 2 * self.hidden * kv_width + 3 * self.hidden * self.intermediate
        block += self.norms_per_block * self.hidden
        block += (self.attention_width + 2 * kv_width) * self.qkv_bias + self.hidden * self.o_bias
        block += (2 * self.intermediate + self.hidden) * self.mlp_bias + 2 * self.head_dim * self.qk_norm
        return self.layers * block + self.hidden + self.table_params() * (1 if self.tied else 2)

    def table_params(self) -> int:
        """Entries of one vocabulary table, ``[vocab, hidden]``."""
        return self.vocab * self.hidden

    def n_matmul(self) -> int:
        """Parameters that take part in products for each token: all but an untied input table."""
        return self.n_params() - (0 if self.tied else self.table_params())

    def resident_params(self, *, copies_tied_head: bool = False) -> int:
        """Parameters in memory, which is more than the file holds where an engine gives a tied head its own copy."""
        return self.n_params() + (self.table_params() if self.tied and copies_tied_head else 0)

    def uniform_weight_bytes(self, bits_per_weight: float = 16) -> int:
        """Bytes of all parameters at one width, an estimate before there is a file; the config's dtype plays no part."""
        return math.ceil(self.n_params() * bits_per_weight / 8)

    def kv_bytes_per_token(self, bytes_value: float = 2, *, scale_bytes_per_vector: float = 0) -> int:
        """Cache bytes of one token of one sequence: keys and values of all layers, full attention.

        Args:
            bytes_value: bytes of one stored element (2 for bf16, 1 for int8, 0.5 for int4).
            scale_bytes_per_vector: bytes of scale metadata for each head vector of head_dim elements.
        """
        vectors = 2 * self.layers * self.kv_heads
        return math.ceil(vectors * (self.head_dim * bytes_value + scale_bytes_per_vector))


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A whole number of at least 1 from the config. Raises SourceError naming the key."""
    value = config.get(key)
    if value is None and default is not None:
        return default
    if value is None:
        raise SourceError(f"config.json has no {key}, which capacity needs: add it, or leave the cards out")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SourceError(f"config.json gives {key} = {value!r}: a whole number of 1 or more is needed")
    return value


def _head_dim(config: Mapping[str, Any], hidden: int, heads: int) -> int:
    """The explicit head_dim, else hidden / heads where that is whole."""
    if config.get("head_dim") is None and hidden % heads:
        raise SourceError(f"config.json has no head_dim, and {heads} heads do not divide hidden_size {hidden}: add head_dim")
    return _size(config, "head_dim", default=hidden // heads)


def _sliding_window(config: Mapping[str, Any]) -> int | None:
    """The window of the layers that have one, None where all layers attend to everything."""
    window = config.get("sliding_window")
    if not isinstance(window, int) or isinstance(window, bool) or config.get("use_sliding_window") is False:
        return None
    kinds = config.get("layer_types")
    return window if kinds is None or "sliding_attention" in kinds else None


def _refuse_other_kinds(config: Mapping[str, Any]) -> None:
    """Experts and latent attention would be miscounted by a large factor, so they are refused and not guessed."""
    for key in _EXPERT_KEYS:
        experts = config.get(key)
        if isinstance(experts, int) and experts > 1:
            raise SourceError(f"config.json has {key} = {experts}: mixtures of experts are not counted yet, leave the cards out")
    if config.get("kv_lora_rank") is not None:
        raise SourceError("config.json has kv_lora_rank: latent attention is not counted yet, leave the cards out")
