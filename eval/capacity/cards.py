"""Cards: the target devices, each figure with its sources and its date.

``cards.toml`` beside this module holds the shipped cards; a person's own file has the same tables. The file is checked once, here
(unknown keys, sources that do not exist, figures that are not positive numbers), and becomes frozen dataclasses.

Memory has three readings, because the "GB" of a label is ambiguous: ``label-decimal`` (label x 10^9, the conservative default of
the source text), ``label-binary`` (label x 2^30, what the chips hold) and ``reported`` (what a driver showed on a real machine).
"""

from __future__ import annotations

import datetime
import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from quant.errors import UsageError

MemoryBasis = Literal["label-decimal", "label-binary", "reported"]
OperandFormat = Literal["bf16", "fp8", "int8", "fp4", "int4"]
MEMORY_BASES: tuple[str, ...] = get_args(MemoryBasis)
OPERAND_FORMATS: tuple[str, ...] = get_args(OperandFormat)
CARDS_FILE = Path(__file__).with_name("cards.toml")
OWN_SOURCE = "own"  # the source of a bare number in a person's own file


@dataclass(frozen=True, slots=True)
class Figure:
    """One number with where it was read and when; ``date`` is that of the first source."""

    value: float
    sources: tuple[str, ...]
    date: datetime.date | None
    unconfirmed: bool = False

    def record(self) -> dict[str, Any]:
        """A JSON-ready dict; the date in ISO form."""
        date = self.date.isoformat() if self.date else None
        return {"value": self.value, "sources": list(self.sources), "date": date, "unconfirmed": self.unconfirmed}


@dataclass(frozen=True, slots=True)
class Price:
    """Price of one device for one hour, in ``currency``. ``assumed``: an assumption to compare with, not a quote."""

    per_hour: float
    currency: str
    sources: tuple[str, ...]
    date: datetime.date | None
    assumed: bool = False

    def record(self) -> dict[str, Any]:
        """A JSON-ready dict; the date in ISO form."""
        return {
            "per_hour": self.per_hour,
            "currency": self.currency,
            "sources": list(self.sources),
            "date": self.date.isoformat() if self.date else None,
            "assumed": self.assumed,
        }


@dataclass(frozen=True, slots=True)
class Card:
    """A target device. Everything but the bandwidth may be unknown; unknown is None or absent, never 0."""

    slug: str
    name: str
    bandwidth: Figure  # bytes per second
    memory_label: Figure | None  # GB on the label
    memory_reported: Figure | None  # bytes
    dense_tflops: Mapping[str, Figure]  # operand format -> dense TFLOP/s, fp32 accumulate where a part distinguishes
    fp16_accumulate_tflops: Mapping[str, Figure]
    tdp_w: Figure | None
    price: Price | None
    compute_capability: str | None
    native_formats: tuple[str, ...]
    official: str
    sources: tuple[str, ...]
    notes: str

    @property
    def bandwidth_bytes_per_s(self) -> float:
        return self.bandwidth.value

    @property
    def memory_bytes_label(self) -> int | None:
        """Bytes of the label read as decimal gigabytes."""
        return None if self.memory_label is None else round(self.memory_label.value * 1e9)

    @property
    def memory_bytes_nominal(self) -> int | None:
        """Bytes of the label read as binary gigabytes: label x 2^30."""
        return None if self.memory_label is None else round(self.memory_label.value * 2**30)

    @property
    def memory_bytes_reported(self) -> int | None:
        """Bytes that a driver or a tool showed."""
        return None if self.memory_reported is None else round(self.memory_reported.value)

    @property
    def dense_flops_per_s(self) -> dict[str, float | None]:
        """Dense FLOP/s by operand format, every known format a key; None where the card has or states no such rate."""
        rates = {name: self.dense_tflops.get(name) for name in OPERAND_FORMATS}
        return {name: None if rate is None else rate.value * 1e12 for name, rate in rates.items()}

    def memory_bytes(self, basis: MemoryBasis) -> int | None:
        """Bytes of memory in the given reading, None where the card does not state it. Raises UsageError: unknown basis."""
        if basis not in MEMORY_BASES:
            raise UsageError(f"no memory basis {basis!r}: choose one of {', '.join(MEMORY_BASES)}")
        if basis == "reported":
            return self.memory_bytes_reported
        return self.memory_bytes_label if basis == "label-decimal" else self.memory_bytes_nominal

    def ridge_flops_per_byte(self, operand_format: OperandFormat = "bf16") -> float | None:
        """FLOPs per byte above which the card is bound by compute; None where its rate is unknown."""
        rate = self.dense_flops_per_s[operand_format]
        return None if rate is None else rate / self.bandwidth.value


def _figure_table(value: object) -> object:
    """A bare number stands for a figure of the person's own; booleans and texts are left for pydantic to refuse."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {"value": value, "sources": [OWN_SOURCE]}
    return value


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _SourceTable(_Strict):
    date: datetime.date
    text: str
    dated: str = "read"


class _FigureTable(_Strict):
    value: float = Field(gt=0, allow_inf_nan=False)
    sources: list[str] = Field(default=[OWN_SOURCE], min_length=1)
    date: datetime.date | None = None
    unconfirmed: bool = False

    def figure(self) -> Figure:
        return Figure(self.value, tuple(self.sources), self.date, self.unconfirmed)


class _PriceTable(_Strict):
    per_hour: float = Field(ge=0, allow_inf_nan=False)
    currency: str
    sources: list[str] = Field(default=[OWN_SOURCE], min_length=1)
    date: datetime.date  # a price without a date says nothing
    assumed: bool = False


_Figure = Annotated[_FigureTable, BeforeValidator(_figure_table)]


class _CardTable(_Strict):
    name: str
    bandwidth_bytes_per_s: _Figure
    memory_label_gb: _Figure | None = None
    memory_reported_bytes: _Figure | None = None
    dense_tflops: dict[OperandFormat, _Figure] = {}
    fp16_accumulate_tflops: dict[OperandFormat, _Figure] = {}
    tdp_w: _Figure | None = None
    price: _PriceTable | None = None
    compute_capability: str | None = None
    native_formats: list[str] = []
    official: str = ""
    sources: list[str] = []
    notes: str = ""

    def card(self, slug: str) -> Card:
        def figure(table: _FigureTable | None) -> Figure | None:
            return None if table is None else table.figure()

        price = self.price
        return Card(
            slug=slug,
            name=self.name,
            bandwidth=self.bandwidth_bytes_per_s.figure(),
            memory_label=figure(self.memory_label_gb),
            memory_reported=figure(self.memory_reported_bytes),
            dense_tflops={name: rate.figure() for name, rate in self.dense_tflops.items()},
            fp16_accumulate_tflops={name: rate.figure() for name, rate in self.fp16_accumulate_tflops.items()},
            tdp_w=figure(self.tdp_w),
            price=None if price is None else Price(**{**price.model_dump(), "sources": tuple(price.sources)}),
            compute_capability=self.compute_capability,
            native_formats=tuple(self.native_formats),
            official=self.official,
            sources=tuple(self.sources),
            notes=self.notes,
        )

    def source_keys(self) -> set[str]:
        """Every source named anywhere on the card."""
        tables = [self.bandwidth_bytes_per_s, self.memory_label_gb, self.memory_reported_bytes, self.tdp_w, self.price]
        tables += [*self.dense_tflops.values(), *self.fp16_accumulate_tflops.values()]
        return {key for table in tables if table is not None for key in table.sources} | set(self.sources)


class _CardsFile(_Strict):
    cards: dict[str, _CardTable] = Field(min_length=1)
    sources: dict[str, _SourceTable] = {}


def _read(path: Path) -> _CardsFile:
    """The checked tables of one file; every fault is one sentence with the file, the place and what is wrong."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"no such card file: {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the card file {path}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from None
    try:
        return _CardsFile.model_validate(tables)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"] if part != "[key]") or "the file"
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise UsageError(f"{path}: {place}: {first['msg'][:1].lower()}{first['msg'][1:]}{more}") from None


def load_card_file(path: Path) -> list[Card]:
    """All cards of one TOML file, in its order. Raises UsageError: unreadable, unknown keys, bad figures, unknown sources."""
    tables = _read(path)
    known = {OWN_SOURCE, *tables.sources}
    if path != CARDS_FILE:
        known |= set(load_sources())
    for slug, table in tables.cards.items():
        unknown = sorted(table.source_keys() - known)
        if unknown:
            raise UsageError(f"{path}: cards.{slug} names the source {unknown[0]!r}, which no [sources] table explains")
    return [table.card(slug) for slug, table in tables.cards.items()]


def load_sources() -> dict[str, str]:
    """What each source key of the shipped cards means, with its date: key -> text."""
    return {key: f"{table.text} ({table.dated} {table.date})" for key, table in _read(CARDS_FILE).sources.items()}


def _key(name: str) -> str:
    """Spelling without case, spaces and punctuation, so that 'RTX 4090', 'rtx-4090' and 'rtx4090' are one name."""
    return re.sub(r"[^a-z0-9]+", "", name.lower())


def _find(name: str, cards: Sequence[Card]) -> Card:
    """The card of that slug or name, else UsageError with the nearest names."""
    wanted = _key(name)
    by_key = {_key(alias): card for card in cards for alias in (card.slug, card.name)}
    if wanted in by_key:
        return by_key[wanted]
    near = [card.slug for card in cards if wanted and wanted in _key(card.slug)]
    if not near:
        near = [by_key[key].slug for key in difflib.get_close_matches(wanted, by_key, n=3, cutoff=0.5)]
    if near:
        raise UsageError(f"no card named {name!r}; did you mean {' or '.join(dict.fromkeys(near))}?")
    raise UsageError(f"no card named {name!r}; there are {', '.join(c.slug for c in cards)}, or a path to your own .toml file")


def load_cards(names: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[Card]:
    """The chosen cards, in the order asked for, each once.

    Args:
        names: "all"; a slug or a name; several with commas between; a path to one's own TOML file; or a list of these.

    Raises:
        UsageError: an unknown name (the nearest ones are suggested), nothing chosen, or a faulty file.
    """
    items = [names] if isinstance(names, str | os.PathLike) else list(names)
    words = [word for item in items for word in (item.split(",") if isinstance(item, str) else [os.fspath(item)])]
    shipped = load_card_file(CARDS_FILE)
    chosen: dict[str, Card] = {}
    for word in (word.strip() for word in words if word.strip()):
        if word == "all":
            found = shipped
        elif word.endswith(".toml") or os.sep in word:
            found = load_card_file(Path(word).expanduser())
        else:
            found = [_find(word, shipped)]
        for card in found:
            if chosen.setdefault(card.slug, card) != card:
                raise UsageError(f"two different cards are named {card.slug}: rename yours in {word}")
    if not chosen:
        raise UsageError("no card chosen: name at least one, or all")
    return list(chosen.values())
