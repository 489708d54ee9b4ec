"""The shipped cards against their reference, their provenance, and how names and own files are read."""

from __future__ import annotations

import json
import os
from datetime import date
from pathlib import Path

import pytest

from eval.capacity.cards import CARDS_FILE, MEMORY_BASES, Card, Figure, load_card_file, load_cards, load_sources
from quant.errors import UsageError

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = Path(os.environ.get("BITLEDGER_SHARED", ROOT.parent / "shared")) / "reference" / "cards.json"
OWN = """
[cards.lab-box]
name = "Lab box"
bandwidth_bytes_per_s = 5e11
memory_label_gb = { value = 16, sources = ["sheet"], date = 2026-11-01 }
dense_tflops.bf16 = 50
price = { per_hour = 0.25, currency = "EUR", date = 2026-11-01 }

[sources]
sheet = { date = 2026-11-01, text = "the vendor's sheet" }
"""


def figures(card: Card) -> dict[str, Figure]:
    single = {
        "bandwidth": card.bandwidth,
        "memory_label": card.memory_label,
        "memory_reported": card.memory_reported,
        "tdp_w": card.tdp_w,
    }
    present = {name: figure for name, figure in single.items() if figure is not None}
    return present | dict(card.dense_tflops) | {f"fp16_{key}": figure for key, figure in card.fp16_accumulate_tflops.items()}


def own_file(folder: Path, text: str = OWN) -> Path:
    path = folder / "my.toml"
    path.write_text(text)
    return path


@pytest.mark.skipif(not REFERENCE.is_file(), reason=f"no {REFERENCE.name} beside the repository")
def test_shipped_cards_carry_every_figure_of_the_reference() -> None:
    reference = json.loads(REFERENCE.read_text())
    cards = load_cards("all")
    assert [card.name for card in cards] == [row["name"] for row in reference["cards"]]
    assert len(cards) == 23
    assert set(reference["sources"]) <= set(load_sources())
    for card, row in zip(cards, reference["cards"], strict=True):
        label = row["memory_label_gb"]
        assert card.memory_bytes_label == (None if label is None else label * 10**9)
        assert card.memory_bytes_nominal == row["memory_bytes_nominal"]
        assert card.memory_bytes_reported == row["memory_bytes_reported"]
        assert card.bandwidth_bytes_per_s == row["bandwidth_bytes_s"]
        rates = {name: None if rate is None else rate * 1e12 for name, rate in row["dense_tflops"].items()}
        assert card.dense_flops_per_s == rates
        alternative = (row["fp8_alternative"] or {}).get("fp16_accumulate")
        assert {name: rate.value for name, rate in card.fp16_accumulate_tflops.items()} == (
            {} if alternative is None else {"fp8": alternative}
        )
        assert (card.tdp_w.value if card.tdp_w else None) == row["tdp_w"]
        assert (card.compute_capability or "-") == (row["compute_capability"] or "-")
        assert (list(card.native_formats), card.official) == (row["native_formats"], row["official"])
        assert set(row["via"]) <= set(card.sources)


def test_a_few_rows_by_heart() -> None:
    h100, ada, l4 = load_cards(["h100-sxm5-80gb", "RTX 4090", "l4"])
    assert (h100.memory_bytes_nominal, h100.memory_bytes_reported) == (85_899_345_920, 85_520_809_984)
    assert (h100.bandwidth_bytes_per_s, h100.dense_flops_per_s["fp4"]) == (3.35e12, None)
    assert (ada.dense_flops_per_s["bf16"], ada.fp16_accumulate_tflops["fp8"].value) == (165.2e12, 660.6)
    assert f"{h100.ridge_flops_per_byte():.0f} {ada.ridge_flops_per_byte():.0f} {l4.ridge_flops_per_byte():.0f}" == "295 164 403"


def test_every_figure_has_known_sources_and_the_date_of_its_first_source() -> None:
    sources = load_sources()
    for card in load_cards("all"):
        assert set(card.sources) <= set(sources)
        for name, figure in figures(card).items():
            assert figure.date is not None, (card.slug, name)
            assert set(figure.sources) <= set(card.sources), (card.slug, name)
            assert sources[figure.sources[0]].endswith(f"{figure.date})"), (card.slug, name)


def test_prices_are_the_source_texts_assumptions_and_nothing_else() -> None:
    priced = {card.slug: card.price for card in load_cards("all") if card.price is not None}
    assert {slug: price.per_hour for slug, price in priced.items()} == {"h100-sxm5-80gb": 2.5, "l4": 0.8, "rtx-4090": 1.0}
    for price in priced.values():
        assert (price.assumed, price.currency, price.sources, price.date) == (True, "USD", ("seed",), date(2026, 10, 5))


def test_unconfirmed_figures_are_marked() -> None:
    marked = {card.slug for card in load_cards("all") if any(figure.unconfirmed for figure in figures(card).values())}
    assert marked == {"a10", "a100-40gb", "rtx-6000-ada"}


def test_names_are_read_in_any_spelling_order_kept_and_each_once() -> None:
    assert [card.slug for card in load_cards("l4, RTX 4090,rtx4090")] == ["l4", "rtx-4090"]
    assert [card.slug for card in load_cards(["rtx_4090", "h200 sxm 141gb"])] == ["rtx-4090", "h200-sxm-141gb"]
    assert load_cards(["l4", "all"])[0].slug == "l4"
    assert len(load_cards(["l4", "all"])) == len(load_cards("all"))


@pytest.mark.parametrize(
    "name, suggestion",
    [
        ("h100", "h100-sxm5-80gb or h100-pcie-80gb?"),
        ("rtx-4900", "rtx-4090"),
        ("mi300", "mi300x"),
        ("zzz", "there are h100-sxm5-80gb, "),
    ],
)
def test_an_unknown_card_gets_the_nearest_names(name: str, suggestion: str) -> None:
    with pytest.raises(UsageError, match=f"no card named '{name}'") as caught:
        load_cards(["l4", name])
    assert suggestion in str(caught.value)


@pytest.mark.parametrize("names", ["", " , ", []])
def test_no_card_is_an_error(names: str | list[str]) -> None:
    with pytest.raises(UsageError, match="no card chosen"):
        load_cards(names)


def test_an_unknown_memory_basis_is_an_error() -> None:
    (l4,) = load_cards("l4")
    assert [l4.memory_bytes(basis) for basis in MEMORY_BASES] == [24_000_000_000, 25_769_803_776, 24_148_453_621]  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="label-binary"):
        l4.memory_bytes("GiB")  # type: ignore[arg-type]


def test_an_own_file_with_bare_numbers(tmp_path: Path) -> None:
    path = own_file(tmp_path)
    for given in (path, str(path), [path]):
        (card,) = load_cards(given)
        assert (card.slug, card.bandwidth_bytes_per_s, card.memory_bytes_label) == ("lab-box", 5e11, 16_000_000_000)
        assert card.bandwidth == Figure(5e11, ("own",), None)
        assert card.price is not None
        assert (card.price.per_hour, card.price.currency, card.price.assumed) == (0.25, "EUR", False)
    assert [card.slug for card in load_cards(["l4", path])] == ["l4", "lab-box"]


@pytest.mark.parametrize(
    "old, new, part",
    [
        ("bandwidth_bytes_per_s = 5e11\n", "", "cards.lab-box.bandwidth_bytes_per_s: field required"),
        ("5e11", "-1", "bandwidth_bytes_per_s.value: input should be greater than 0"),
        ("5e11", "inf", "bandwidth_bytes_per_s.value: input should be a finite number"),
        ("5e11", "true", "bandwidth_bytes_per_s"),
        ("5e11", '"fast"', "bandwidth_bytes_per_s"),
        ("memory_label_gb", "memory_gb", "cards.lab-box.memory_gb: extra inputs are not permitted"),
        ("dense_tflops.bf16", "dense_tflops.bf17", "dense_tflops.bf17"),
        (", date = 2026-11-01 }\n\n[sources]", " }\n\n[sources]", "cards.lab-box.price.date: field required"),
        ('["sheet"]', '["rumour"]', "the source 'rumour'"),
        ("[cards.lab-box]", "[cards.lab-box", "is not valid TOML"),
        ("[cards.lab-box]", "[card.lab-box]", "cards: field required"),
    ],
)
def test_faults_of_an_own_file_are_one_sentence_that_names_the_place(tmp_path: Path, old: str, new: str, part: str) -> None:
    assert old in OWN
    with pytest.raises(UsageError) as caught:
        load_cards(own_file(tmp_path, OWN.replace(old, new, 1)))
    message = str(caught.value)
    assert part in message
    assert "my.toml" in message
    assert "\n" not in message


def test_an_own_file_that_is_not_there_or_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such card file"):
        load_cards(tmp_path / "none.toml")
    with pytest.raises(UsageError, match="cannot read"):
        load_cards(tmp_path)


def test_an_own_card_may_not_hide_a_shipped_one(tmp_path: Path) -> None:
    path = own_file(tmp_path, OWN.replace("cards.lab-box", "cards.l4"))
    assert load_cards(path)[0].name == "Lab box"
    with pytest.raises(UsageError, match="two different cards are named l4"):
        load_cards(["l4", path])


def test_shipped_sources_may_be_named_in_an_own_file(tmp_path: Path) -> None:
    (card,) = load_card_file(own_file(tmp_path, OWN.replace('["sheet"]', '["stas"]')))
    assert card.memory_label is not None
    assert card.memory_label.sources == ("stas",)
    assert CARDS_FILE.is_file()
