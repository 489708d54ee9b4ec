"""A text column of a data set on the hub, read by the ``datasets`` library at one known commit.

``datasets`` falls back to whatever version lies in its cache when the hub does not answer. Here the commit is asked for first, or
given, and what was built is refused unless it is of that commit. Data sets that need code of their own are never run: the library
has given that up, and nothing here asks for it.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from formats.hub import Unreachable, endpoint, find_commit, is_commit, is_offline, translate
from quant.errors import CorpusError, HubUnreachable

PREFIX = "hub:"
SPELLING = "hub:ORG/NAME[@REVISION][:CONFIG][:SPLIT]"
_NAME = re.compile(
    r"hub:(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?(:(?P<config>[^:]*))?(:(?P<split>[\w.]*))?"
)


@dataclass(frozen=True, slots=True)
class HubRows:
    """The rows of one column (not yet checked to be text), and where they are from: ``label`` names it in full."""

    rows: list[object]
    name: str
    label: str
    commit: str


def read_hub_rows(name: str, field: str, report: Callable[[str], None] | None = None) -> HubRows:
    """The column ``field`` of the data set ``hub:ORG/NAME[@REVISION][:CONFIG][:SPLIT]``.

    CONFIG and SPLIT may be left out where there is only one (or a default one). With HF_HUB_OFFLINE only a data set that was
    loaded before, named with the full hash of its commit, is read.

    Raises:
        CorpusError: a name of another form, no such configuration, split or column, or files that cannot be read.
        SourceError: the hub has no such data set or revision.
        HubUnreachable: the hub gave no answer within seconds.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise CorpusError(f"{name!r} names no hub data set: write {SPELLING}")
    repo, revision = match["repo"], match["revision"]
    try:
        commit = _commit(repo, revision)
        if report is not None:
            report(f"Loading the data set {repo} at {commit} from {'the cache' if is_offline() else endpoint()}")
        builder = _build(repo, commit, match["config"] or None)
        split = _split(name, builder, match["split"] or None)
        rows = _column(name, builder, split, field)
    except Unreachable as error:
        raise HubUnreachable(
            f"{name} could not be loaded: {error}; three ways on: --corpus PATH with a parquet, jsonl or text file, "
            f"{PREFIX}{repo}@COMMIT (its full hash) with HF_HUB_OFFLINE=1 where it was loaded before, or the embedded "
            "--corpus pydoc"
        ) from error
    place = f"{builder.config.name}:{split}"
    return HubRows(rows, f"{repo}:{place}", f"{PREFIX}{repo}@{commit}:{place}", commit)


def _commit(repo: str, revision: str | None) -> str:
    if is_offline() and revision is not None and is_commit(revision):
        return revision
    commit = find_commit(repo, revision, repo_type="dataset")
    if is_commit(revision) and commit != revision:
        raise CorpusError(f"{endpoint()} answered with {commit} for {repo}@{revision}: ask again, or use a copy")
    return commit


def _build(repo: str, commit: str, config: str | None) -> Any:
    """The library's builder of ``config``. Only the data set's metadata is asked for; files are fetched when it prepares them."""
    import datasets

    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # counted on a host of its own, which may not be reachable
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what is wrong is said in one sentence, by us
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        builder = datasets.load_dataset_builder(repo, config, revision=commit)
    except ValueError as error:
        names = [] if is_offline() else _configurations(repo, commit)
        if not names or config in names:
            _refuse(error, repo, commit)
        problem = f"has no configuration {config!r}" if config else "has several configurations"
        raise CorpusError(f"{repo} {problem}: name one of {', '.join(names)} in {SPELLING}") from error
    except Exception as error:  # noqa: BLE001 - the library and its transports raise unrelated types
        _refuse(error, repo, commit)
    if builder.hash != commit:  # the library's cache, which it takes when the hub stops answering
        raise Unreachable(f"the cache of data sets holds {repo} at {builder.hash} and not at {commit}")
    return builder


def _configurations(repo: str, commit: str) -> list[str]:
    import datasets

    try:
        return list(datasets.get_dataset_config_names(repo, revision=commit))
    except Exception as error:  # noqa: BLE001 - as above
        _refuse(error, repo, commit)


def _split(name: str, builder: Any, wanted: str | None) -> str:
    names = [str(split) for split in builder.config.data_files or builder.info.splits or ()]
    if wanted is None and len(names) == 1:
        return names[0]
    if wanted is None or (names and wanted not in names):
        problem = f"has no split {wanted!r}" if wanted else "does not say which split"
        raise CorpusError(f"{name} {problem}: name one of {', '.join(names)} in {SPELLING}")
    return wanted


def _column(name: str, builder: Any, split: str, field: str) -> list[object]:
    try:
        builder.download_and_prepare()
        table = builder.as_dataset(split=split)
    except Exception as error:  # noqa: BLE001 - as above
        _refuse(error, builder.repo_id, builder.hash)
    if field not in table.column_names:
        raise CorpusError(f"{name} has no column {field!r}, only {', '.join(table.column_names)}: name the one with the text")
    return list(table[field])


def _refuse(error: Exception, repo: str, commit: str) -> NoReturn:
    """Raise what ``error`` means: a fault of the data set, or else one of the way to it."""
    from datasets.data_files import EmptyDatasetError
    from datasets.exceptions import DatasetsError

    if is_offline():
        raise Unreachable("HF_HUB_OFFLINE is set, and the cache of data sets does not hold it") from error
    if isinstance(error, RuntimeError) and "script" in str(error):
        raise CorpusError(
            f"{repo} needs a script of its own, which is never run: use a parquet file of it, or the hub's own conversion, "
            f"{PREFIX}{repo}@refs/convert/parquet"
        ) from error
    if isinstance(error, DatasetsError | EmptyDatasetError | ValueError):  # Arrow's errors are ValueErrors
        raise _unreadable(error, repo, commit) from error
    translate(error, repo, commit)


def _unreadable(error: Exception, repo: str, commit: str) -> CorpusError:
    cause = error.__cause__ or error  # the library's own sentence is "An error occurred while generating the dataset"
    reason = str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
    return CorpusError(f"the data set {repo} at {commit} cannot be read ({reason}): use another, or a file of it")
