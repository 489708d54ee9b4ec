"""Whether a model's cache is of the kind that a scheme describes, and scales are those of that scheme."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quant.errors import SchemeError
from quant.kvscheme import KvScheme

if TYPE_CHECKING:
    from eval.kvcache import StaticScales


def check_owned(text: Any, scheme: KvScheme) -> None:
    """Raise SchemeError where layers cache something else than keys and values of their own."""
    for key, meaning in (("kv_lora_rank", "latent vectors"), ("num_kv_shared_layers", "keys and values of other layers")):
        if getattr(text, key, None):
            raise SchemeError(
                f"{scheme}: the model caches {meaning} ({key}), not keys and values of each layer: use a float cache (none)"
            )


def head_shape(text: Any) -> tuple[int, int]:
    """Heads and channels of cached keys and values."""
    heads = int(text.num_attention_heads)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return int(getattr(text, "num_key_value_heads", None) or heads), int(head_dim)


def check_scales(scheme: KvScheme, scales: StaticScales | None, layers: int, kv_heads: int, head_dim: int) -> None:
    """Raise SchemeError unless ``scales`` are calibrated ones of this scheme for this cache."""
    if not scheme.static and scales is None:
        return
    if scales is None or len(scales.keys) != layers or len(scales.values) != layers:
        raise SchemeError(f"{scheme} needs calibrated scales for {layers} layers")
    wanted = {"token": None, "channel": (kv_heads, 1, head_dim), "tensor": (1, 1, 1)}
    for name, sharing, found in (("keys", scheme.keys, scales.keys), ("values", scheme.values, scales.values)):
        for layer, scale in enumerate(found):
            shape = None if scale is None else tuple(scale.shape)
            if sharing == "tensor" and shape == (1,):
                continue  # as engines, and so artefacts, store one number
            if shape != wanted[sharing]:
                raise SchemeError(f"{scheme}: scales of {name} in layer {layer} have shape {shape}, expected {wanted[sharing]}")
    scales.check_each()
