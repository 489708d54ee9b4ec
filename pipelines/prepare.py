"""Everything that is checked before any work: source, recipe, fates, cards, output folder, text and windows.

Problems of separate things are collected and told at once. No torch or transformers is imported here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from calib.corpora import Corpus, load_corpus
from calib.distinct import calibration_notes
from calib.tokenizer import TextTokenizer
from calib.windows import Windows, calibration_windows, check_disjoint, tokenise
from eval.capacity.cards import Card, load_cards
from eval.capacity.model_shape import ModelShape
from eval.perplexity import check_positions
from formats.checkpoint import Checkpoint
from formats.engine_config import fused_differences, output_config
from formats.fates import Quantise, TensorPlan
from formats.kv_files import KvPlan, engine_sentence, plan_kv, with_kv_shard
from formats.output import check_output
from formats.planning import plan_fates, plan_notes
from formats.shards import ShardPlan, plan_shards
from formats.sources import Source, resolve
from pipelines.problems import Problems
from pipelines.progress import announce
from pipelines.request import Request
from quant.errors import SourceError, UsageError

MANIFEST_ROOM_BYTES = 2_000_000


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request whose every input has been found and checked."""

    request: Request
    source: Source
    checkpoint: Checkpoint
    plans: tuple[TensorPlan, ...]
    shards: tuple[ShardPlan, ...]
    corpus: Corpus
    tokenizer: TextTokenizer
    evaluation: Windows
    calibration: Windows | None
    overlap: float | None
    cards: tuple[Card, ...]
    shape: ModelShape | None
    system_prompt: str | None
    kv: KvPlan | None = None

    @property
    def notes(self) -> tuple[tuple[str, str], ...]:
        """(kind, sentence) of what is odd before anything is done."""
        found = [("source", text) for text in self.checkpoint.notes]
        found += [("fused-siblings", text) for text in fused_differences(self.plans)]
        found += plan_notes(self.plans)
        if self.kv is not None:
            found.append(("kv-cache", engine_sentence(self.kv.scheme)))
        if self.calibration is not None and self.request.needs_calibration:
            found += calibration_notes(self.calibration.ids, self.plans, self.request.self_written_windows)
        return tuple(found)


def prepare(request: Request) -> Prepared:
    """Find and check everything. Raises a BitledgerError with all problems that could be found."""
    problems = Problems()
    cards: list[Card] = []
    prompt: str | None = None
    with problems.collect():
        cards = [] if request.cards == "none" else load_cards(request.cards)
    with problems.collect():
        prompt = _system_prompt(request.system_prompt)
    source, checkpoint, corpus = _inputs(request, problems)
    planned = _Planned((), (), None) if checkpoint is None else _planned(request, checkpoint, problems, with_shape=bool(cards))
    windows: tuple[TextTokenizer, Windows, Windows | None, float | None] | None = None
    if checkpoint is not None and corpus is not None:
        with problems.collect():
            windows = _windows(request, checkpoint, corpus)
    problems.settle()
    assert source is not None
    assert checkpoint is not None
    assert corpus is not None
    assert windows is not None
    tokenizer, evaluation, calibration, overlap = windows
    return Prepared(
        request,
        source,
        checkpoint,
        planned.plans,
        planned.shards,
        corpus,
        tokenizer,
        evaluation,
        calibration,
        overlap,
        tuple(cards),
        planned.shape,
        prompt,
        planned.kv,
    )


def _inputs(request: Request, problems: Problems) -> tuple[Source | None, Checkpoint | None, Corpus | None]:
    """What the run reads; without a readable checkpoint the output folder is checked here, as far as that goes."""
    source: Source | None = None
    corpus: Corpus | None = None
    checkpoint: Checkpoint | None = None
    with problems.collect():
        source = resolve(request.model, report=announce)
    with problems.collect():
        corpus = load_corpus(request.corpus, join=request.convention.join, report=announce)
    if source is not None:
        with problems.collect():
            checkpoint = Checkpoint.open(source.folder)
    if checkpoint is None:
        with problems.collect():
            check_output(request.output, None if source is None else source.folder, 0, request.force)
    return source, checkpoint, corpus


@dataclass(frozen=True, slots=True)
class _Planned:
    """What follows from headers and recipe: fates, files, and the shape that the cards are worked out with."""

    plans: tuple[TensorPlan, ...]
    shards: tuple[ShardPlan, ...]
    shape: ModelShape | None
    kv: KvPlan | None = None


def planned_shards(request: Request, plans: Sequence[TensorPlan], kv: KvPlan | None) -> tuple[ShardPlan, ...]:
    """All weight files of a run, under the names and with the bytes that they will have."""
    metadata = header_metadata(request.method.name, plans)
    return with_kv_shard(plan_shards([plan.stored for plan in plans], metadata, request.shard_bytes), kv, metadata)


def _planned(request: Request, checkpoint: Checkpoint, problems: Problems, *, with_shape: bool) -> _Planned:
    plans: tuple[TensorPlan, ...] = ()
    shards: tuple[ShardPlan, ...] = ()
    shape: ModelShape | None = None
    kv: KvPlan | None = None
    if request.kv_scheme is not None:
        with problems.collect():
            kv = plan_kv(checkpoint.plain_config(), checkpoint.tensors, request.kv_scheme)
    with problems.collect():
        plans = plan_fates(checkpoint, request.rules)
        _check_runnable(request, plans)
        shards = planned_shards(request, plans, kv)
        if request.target is not None:
            request.target.budget(plans, sum(shard.nbytes for shard in shards))
    with problems.collect():
        check_output(request.output, checkpoint.folder, _needed_bytes(checkpoint, shards), request.force)
    if with_shape:
        with problems.collect():
            shape = ModelShape.from_config(output_config(checkpoint.plain_config(), plans))
    return _Planned(plans, shards, shape, kv)


def _check_runnable(request: Request, plans: Sequence[TensorPlan]) -> None:
    """Raise SourceError where the run needs more of a mixture of experts than single experts on their own tokens can give."""
    experts = [plan.module for plan in plans if isinstance(plan.fate, Quantise) and ".experts." in plan.name]
    ways = {
        "learned rounding": request.method.learned,
        "--tune": request.tune_steps > 0,
        "a size target": request.target is not None,
        "--asymmetric": request.streams > 1 and not request.method.learned,
        "--activations": any(isinstance(plan.fate, Quantise) and plan.fate.activations is not None for plan in plans),
    }
    wanted = [way for way, asked in ways.items() if asked]
    if experts and wanted:
        raise SourceError(
            f"{wanted[0]} does not work with the {len(experts)} matrices of experts yet (the first is {experts[0]}): leave it "
            "out, or keep them in float with a recipe rule"
        )


def _system_prompt(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the system prompt {path}: {error}") from None


def _check_ids(ids: NDArray[np.int64], vocabulary: object, folder: Path) -> None:
    """Raise SourceError where the tokenizer makes ids that the model has no row for."""
    largest = int(ids.max()) if len(ids) else 0
    if isinstance(vocabulary, int) and largest >= vocabulary:
        raise SourceError(
            f"{folder}: the tokenizer makes token id {largest:,}, but config.json gives a vocabulary of {vocabulary:,}: "
            "the tokenizer belongs to another model"
        )


def _windows(
    request: Request, checkpoint: Checkpoint, corpus: Corpus
) -> tuple[TextTokenizer, Windows, Windows | None, float | None]:
    convention, count = request.convention, request.evaluation_windows
    config = checkpoint.plain_config()
    config = config.get("text_config", config)
    check_positions(convention.window, config.get("max_position_embeddings", config.get("n_positions")))
    tokenizer = TextTokenizer.from_folder(checkpoint.folder)
    wanted = 0 if count == "all" else count
    wanted += request.calibration_windows if request.calibrates else 0
    tokens = tokenise(corpus, tokenizer, at_least=wanted * (convention.window - 1))
    _check_ids(tokens.ids, config.get("vocab_size"), checkpoint.folder)
    bos = convention.start_token(tokens.adds_bos)
    evaluation = convention.windows(tokens, count=count, start=request.evaluation_start)
    if not request.calibrates:
        return tokenizer, evaluation, None, None
    calibration = calibration_windows(
        tokens,
        count=request.calibration_windows,
        length=convention.window,
        start=request.calibration_start,
        evaluation=evaluation,
        bos=bos,
    )
    return tokenizer, evaluation, calibration, check_disjoint(calibration, evaluation)


def _needed_bytes(checkpoint: Checkpoint, shards: Sequence[ShardPlan]) -> int:
    side = sum((checkpoint.folder / name).stat().st_size for name in checkpoint.side_files())
    return sum(shard.nbytes for shard in shards) + side + MANIFEST_ROOM_BYTES


def header_metadata(method: str, plans: Sequence[TensorPlan]) -> dict[str, str]:
    """What every shard's header says of the whole artefact: schemes with their counts, and bytes by role. Strings only."""
    schemes: dict[str, int] = {}
    roles: dict[str, int] = {}
    for plan in plans:
        if isinstance(plan.fate, Quantise):
            key = f"{plan.fate} {plan.fate.codec}"
            schemes[key] = schemes.get(key, 0) + 1
        for spec in plan.stored:
            roles[spec.role] = roles.get(spec.role, 0) + spec.nbytes
    found = {"format": "pt", "bitledger.method": method}
    found["bitledger.schemes"] = "; ".join(f"{name} x {count}" for name, count in sorted(schemes.items()))
    return found | {f"bitledger.{role}_bytes": str(count) for role, count in sorted(roles.items())}
