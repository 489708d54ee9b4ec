"""The records of a manifest: pydantic at the edge, unknown keys refused, units in the field names.

``*_bytes`` and ``nbytes`` are bytes, ``*_tokens`` tokens. A record is never changed once made; ``formats.manifest`` puts them
together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue

from quant.errors import CoverageError
from quant.kvscheme import KvScheme

_QUANTISED_ROLES = ("codes", "scales", "zeros")

Role = Literal["codes", "scales", "zeros", "shape", "kept", "kv_scales", "input_scales"]


def _inside(name: str) -> str:
    """File names come from outside: they must stay below the folder."""
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise ValueError(f"{name!r} is not a relative file name inside the folder")
    return name


FileName = Annotated[str, AfterValidator(_inside)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
Json = dict[str, JsonValue]


class Record(BaseModel):
    """Base of all records: unknown keys forbidden, no coercion, no NaN, not changed once made."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class HashedFile(Record):
    """A source file; ``nbytes`` is None for files known only by hash (what a cached conversion was made from)."""

    name: str
    nbytes: Count | None = None
    sha256: Sha256


class SourceRecord(Record):
    """Where the weights came from: what was asked for, and what it resolved to."""

    requested: str
    kind: Literal["folder", "hub", "embedded"]
    repo: str | None = None
    revision: str | None = None
    note: str = ""
    files: list[HashedFile] = []
    origin_files: list[HashedFile] = []


class PartRecord(Record):
    """One stored tensor: ``dtype`` is the safetensors name."""

    name: str
    file: FileName
    dtype: str
    shape: list[Count]
    nbytes: Count
    role: Role


class TensorRecord(Record):
    """The fate of one source tensor.

    ``quantised`` has a scheme, a codec and parts; ``kept`` (bytes as in the source, or rounded to the type of its part) and
    ``folded`` (float values changed by a transform) have one part; ``alias`` has none and names the tensor that is stored.
    ``copy_of`` names the source tensor whose values a second one was made from, where a tied pair is stored as two.
    ``quantizer`` made the codes; ``activations`` is how the matrix's inputs are rounded when the model runs. ``nbytes`` is the
    sum of the parts, ``bits_per_weight`` counts codes, scales and zeros, ``relative_error`` is ||W - Q|| / ||W||.
    ``module_class`` is the class of the module that owns the tensor (``Linear``), by which engines find what a configuration
    targets.
    """

    name: str
    dtype: str
    shape: list[Count]
    fate: Literal["quantised", "kept", "folded", "alias"]
    module_class: str | None = None
    scheme: str | None = None
    codec: str | None = None
    quantizer: str | None = None
    activations: str | None = None
    alias_of: str | None = None
    copy_of: str | None = None
    reason: str = ""
    parts: list[PartRecord] = []
    nbytes: Count
    bits_per_weight: float | None = None
    relative_error: float | None = None
    notes: list[str] = []

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def check(self) -> None:
        """Raise CoverageError unless the record is consistent with its own fate and parts."""
        stored = {"quantised": len(self.parts) >= 1, "alias": not self.parts}.get(self.fate, len(self.parts) == 1)
        quantised = self.fate == "quantised"
        named = (self.scheme is not None, self.codec is not None) == (quantised, quantised)
        if not stored or not named or (self.alias_of is not None) != (self.fate == "alias"):
            raise CoverageError(f"{self.name}: a {self.fate} tensor cannot have these parts, scheme, codec and alias_of")
        total = sum(part.nbytes for part in self.parts)
        if self.nbytes != total:
            raise CoverageError(f"{self.name}: {self.nbytes} bytes recorded, but its parts have {total}")
        expected = stored_bits_per_weight(self.parts, self.elements) if quantised else None
        if self.bits_per_weight != expected:
            raise CoverageError(f"{self.name}: {self.bits_per_weight} bits per weight recorded, but its parts give {expected}")


class LedgerLine(Record):
    """The bytes of one weight file, by what they are for; ``header_bytes`` counts the length field and the padding."""

    file: FileName
    codes_bytes: Count
    scales_bytes: Count
    zeros_bytes: Count
    shape_bytes: Count
    kept_bytes: Count
    header_bytes: Count
    total_bytes: Count
    kv_scales_bytes: Count = 0
    input_scales_bytes: Count = 0


class KvCacheRecord(Record):
    """How the cache is meant to be stored, with its exact bytes, and the calibrated scales, which no source tensor became.

    ``file`` holds the scales: a weight file where engines read them (they are then in the ledger), a side file otherwise, None
    where the scheme has none. ``bytes_per_token`` counts codes and the scales that come with a token over all layers;
    ``calibration_tokens`` is how many tokens the scales were calibrated on.
    """

    scheme: str
    layers: Count
    kv_heads: Count
    head_dim: Count
    bytes_per_token: Count
    static_bytes: Count
    calibration_tokens: Count = 0
    file: FileName | None = None
    parts: list[PartRecord] = []

    def check(self) -> None:
        """Raise CoverageError unless the bytes are those of the scheme and the parts lie in the file."""
        scheme = KvScheme.parse(self.scheme)
        per_token = scheme.bytes_per_token(self.layers, self.kv_heads, self.head_dim)
        static = scheme.static_bytes(self.layers, self.kv_heads, self.head_dim)
        if (self.bytes_per_token, self.static_bytes) != (per_token, static):
            raise CoverageError(
                f"{self.scheme}: {self.bytes_per_token} bytes per token and {self.static_bytes} of calibrated scales recorded, "
                f"but the scheme gives {per_token} and {static}"
            )
        stored = sum(part.nbytes for part in self.parts)
        places = {(part.file, part.role) for part in self.parts}
        if stored != static or places != ({(self.file, "kv_scales")} if self.parts else set()):
            raise CoverageError(
                f"{self.scheme}: its {len(self.parts)} scales have {stored} bytes in {self.file}, expected {static}"
            )


class BitsPerWeight(Record):
    """``quantised`` = 8 (codes + scales + zeros) / quantised elements; ``whole_file`` = 8 x all weight files / all elements.

    All elements are those of the source: an alias and a copy are counted once, with the tensor whose values they have.
    """

    quantised: float | None
    whole_file: float
    quantised_elements: Count
    all_elements: Count


class FileRecord(Record):
    """A file of the artefact; all but the manifest itself are listed."""

    name: FileName
    nbytes: Count
    sha256: Sha256
    role: Literal["weights", "index", "config", "side"]


class WindowsRecord(Record):
    """Which tokens of which corpus: ``span_tokens`` is half open, ``count`` includes a short last window.

    ``first_scored`` is the position in each window of the first token whose prediction counts.

    ``eval.measurement.windows_record`` makes it of the windows that were used.
    """

    digest: str
    span_tokens: list[Count] = Field(min_length=2, max_length=2)
    length_tokens: Count
    stride_tokens: Count
    count: Count
    bos: str
    first_scored: Count = 1
    corpus_sha256: str
    tokenizer_digest: str
    corpus: str = ""
    origin: str = ""
    join: str = ""
    revision: str | None = None


class Digests(Record):
    """What the run read besides weights. ``ngram_overlap``: share of evaluation 13-grams that calibration contains."""

    tokenizer: str | None = None
    calibration: WindowsRecord | None = None
    evaluation: WindowsRecord | None = None
    ngram_overlap: float | None = None


class IntervalRecord(Record):
    low: float
    high: float
    level: float
    method: str


class MeasurementRecord(Record):
    """What ``eval.measurement.Measurement.record`` gives: a value that is not finite is null and its flag says why.

    ``part`` is the part of an evaluation that it belongs to; empty: it was measured by the run that made the artefact.
    """

    name: str
    part: str = ""
    value: float | None
    unit: str
    n: Count
    standard_error: float | None = None
    interval: IntervalRecord | None = None
    flag: str | None = None
    inputs: dict[str, str] = {}
    subject: dict[str, str] = {}
    settings: dict[str, str] = {}


class EvaluationRecord(Record):
    """One part of an evaluation made after the run: when, how long, by what, and where its rows lie.

    ``rows`` is a parquet file of the artefact with a row for every window or item; ``subject`` are the files that were evaluated.
    """

    part: str
    rows: FileName | None = None
    finished_utc: str
    seconds: float
    versions: dict[str, str]
    subject: dict[str, Sha256]
    settings: dict[str, str] = {}
    notes: list[str] = []


class NoteRecord(Record):
    """Something that did not go the plain way: where, what, and how often."""

    kind: str
    where: str
    text: str
    count: Count = 1


class Deployment(Record):
    """What else decides the answers: the engine it was tested with, sampling defaults, system prompt, chat template."""

    engine: str | None = None
    engine_version: str | None = None
    tested: bool = False
    sampling: Json = {}
    system_prompt: str | None = None
    chat_template_sha256: str | None = None


class RunRecord(Record):
    """The only part that differs between two runs of the same recipe; comparisons leave it out."""

    started_utc: str
    seconds: dict[str, float] = {}
    quantise_peak_rss_bytes: Count = 0
    peak_rss_bytes: Count = 0
    threads: Count = 0


def stored_bits_per_weight(parts: Iterable[PartRecord], elements: int) -> float:
    """8 x (codes + scales + zeros) / elements. Raises CoverageError for a matrix without elements."""
    if not elements:
        raise CoverageError("a matrix without elements has no bits per weight: keep it instead of quantising it")
    return 8 * sum(part.nbytes for part in parts if part.role in _QUANTISED_ROLES) / elements
