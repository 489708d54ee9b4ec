"""The quantised cache in models of other families: its memory, its masks, and what must be refused."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from eval.kvcache import QuantisedCache, StaticScales, WithCache
from formats.broken import Broken
from formats.integrity import verify_folder
from formats.kv_files import SIDE_NAME
from quant.errors import SchemeError
from quant.kvscheme import KvScheme
from tests.artefact import reseal
from tests.conftest import write_tiny_tokenizer
from tests.tiny_runs import run, write_text

IDS = torch.randint(1, 256, (2, 24), generator=torch.Generator().manual_seed(0))
SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 2,
}


def model(name: str, **changes: Any) -> Any:
    """A tiny model whose attention is sharp enough to notice what it reads."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **changes})
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for weights in made.parameters():
            if weights.dim() == 2:
                weights.mul_(6)
    return made


def storage_bytes(cache: QuantisedCache) -> int:
    """Bytes of the memory behind the tensors, not of the tensors."""
    found = 0
    for layer in cache.layers:
        for stored in layer._stored:  # type: ignore[union-attr]
            found += sum(part.untyped_storage().nbytes() for part in (stored.codes, stored.scales) if part is not None)
    return found


def test_cropped_tokens_give_their_memory_back() -> None:
    llama = model("Llama")
    for batch in (IDS, IDS[:1]):
        cache = QuantisedCache(llama.config, KvScheme.parse("int4-ktoken-vtoken-g8"))
        with torch.inference_mode():
            llama(batch, use_cache=True, cache=cache)
        before = storage_bytes(cache)
        cache.crop(-20)
        assert storage_bytes(cache) == cache.nbytes == before // 6


def test_crop_means_what_it_means_in_the_library() -> None:
    from transformers import DynamicCache

    llama = model("Llama")
    ours, theirs = QuantisedCache(llama.config, KvScheme.parse("int8-token")), DynamicCache(config=llama.config)
    with torch.inference_mode():
        for cache in (ours, theirs):
            llama(IDS, use_cache=True, cache=cache)
    for remove in (0, -5, -19):
        for cache in (ours, theirs):
            cache.crop(remove)
        assert ours.get_seq_length() == theirs.get_seq_length()
    for cache in (ours, theirs):
        with pytest.raises(ValueError, match="crop"):
            cache.crop(4)


def test_a_scale_of_one_everywhere_fails_in_a_single_layer_too() -> None:
    """R78: no calibration finds exactly 1.0; one other number for a single layer is what a scheme per tensor asks for."""
    for ones in (torch.ones(1), torch.ones(2, 1, 16)):
        with pytest.raises(SchemeError, match="not calibrated"):
            StaticScales([ones], [None]).check()
    StaticScales([torch.tensor([0.37])], [None]).check()


def test_a_scale_of_one_does_not_verify_where_there_is_one_layer(tmp_path: Path) -> None:
    """R78: with a single scale per side there is nothing to compare with, but no calibration finds exactly 1.0."""
    source, made = tmp_path / "source", tmp_path / "made"
    model("Llama", num_hidden_layers=1).save_pretrained(source)
    write_tiny_tokenizer(source)
    run("rtn", source, made, write_text(tmp_path), "--kv-cache", "int8-static")
    verify_folder(made)
    path = made / SIDE_NAME
    raw = path.read_bytes()
    header = 8 + int.from_bytes(raw[:8], "little")
    path.write_bytes(raw[:header] + struct.pack("<2f", 1, 1))
    reseal(made, SIDE_NAME)
    with pytest.raises(Broken, match="nothing was calibrated"):
        verify_folder(made)


def test_a_mask_reaches_the_model() -> None:
    """A padded row is read as the row without its padding; before, the mask was dropped and padding was attended to."""
    llama, scheme = model("Llama"), KvScheme.parse("int8-token")
    mask = torch.ones_like(IDS)
    mask[0, :10] = 0
    places = (mask.cumsum(-1) - 1).clamp_min(0)
    cached = WithCache(llama, scheme)
    with torch.inference_mode():
        padded = cached(IDS, attention_mask=mask, position_ids=places).logits
        alone = cached(IDS[:1, 10:]).logits
    torch.testing.assert_close(padded[:1, 10:], alone, rtol=0, atol=1e-3 * float(alone.abs().max()))


def test_a_cache_of_latent_vectors_is_refused() -> None:
    """Its bytes would not be heads times channels, nor would the library cache what the scheme describes."""
    latent = model("DeepseekV3", **LATENT)
    with pytest.raises(SchemeError, match="kv_lora_rank"):
        QuantisedCache(latent.config, KvScheme.parse("int8-token"))


def test_heads_that_are_not_those_of_the_configuration_are_refused() -> None:
    """Falcon caches one head whatever ``num_key_value_heads`` says: the promised bytes would be twice the held ones."""
    falcon = model("Falcon")
    cache = QuantisedCache(falcon.config, KvScheme.parse("int8-token"))
    with pytest.raises(SchemeError, match="caches keys of 1 heads x 16 channels, the configuration says 2 x 16"):
        falcon(IDS, use_cache=True, cache=cache)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.ones(1, 1, 1), "have shape"),
        (None, "have shape None"),
        (torch.ones(1, 1, 16), "have shape"),
        (torch.full((2, 1, 16), float("nan")), "not finite"),
        (torch.full((2, 1, 16), float("inf")), "not finite"),
        (torch.zeros(2, 1, 16), "not above 0"),
        (-torch.ones(2, 1, 16), "not above 0"),
    ],
)
def test_scales_of_another_scheme_or_of_no_calibration_are_refused(scale: torch.Tensor | None, message: str) -> None:
    """R78 and its kind: a damaged or foreign scale fails, it is not broadcast and not taken for 1.0."""
    config = model("Llama").config
    good = torch.rand(2, 1, 16) + 1
    for keys in ([good, scale], [scale, good]):
        scales = StaticScales(keys, [None, None])
        with pytest.raises(SchemeError, match=message):
            QuantisedCache(config, KvScheme.parse("int8"), scales)
        if message.startswith("not"):
            with pytest.raises(SchemeError, match=message):
                scales.check()
    QuantisedCache(config, KvScheme.parse("int8"), StaticScales([good, good], [None, None]))
    one = [torch.tensor([0.5]), torch.tensor([0.25])]
    QuantisedCache(config, KvScheme.parse("fp8"), StaticScales(one, one))  # as artefacts store them for engines
    with pytest.raises(SchemeError, match="have shape"):
        QuantisedCache(config, KvScheme.parse("int8-token"), StaticScales([good, good], [None, None]))
