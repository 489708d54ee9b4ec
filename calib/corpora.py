"""Texts to calibrate and to evaluate on, each with its hash, its origin and the way its rows were joined.

A number measured on a text means nothing without these: two tools read 5.68 and 5.90 from one model because one joined the rows
of WikiText-2 by a blank line and the other did not. Every defect of a file is a CorpusError raised before anything heavy is
imported. Sources: WikiText-2 (Merity et al. 2016) as published in Salesforce/wikitext; CPython's own help topics.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from calib.hub_dataset import PREFIX, SPELLING, read_hub_rows
from formats.hub import Unreachable, fetch_file
from quant.errors import CorpusError, HubUnreachable

WIKITEXT2_REPO = "Salesforce/wikitext"
WIKITEXT2_FILE = "wikitext-2-raw-v1/test-00000-of-00001.parquet"
WIKITEXT2_REVISION = "b08601e04326c79dfdd32d625aee71d232d685c3"


_SEPARATORS = {"\n\n": "rows joined by a blank line", "": "rows as they stand", "\n": "rows joined by a newline"}


@dataclass(frozen=True, slots=True)
class Join:
    """How rows become one text: what stands between two of them, and what stands for an empty one."""

    between: str
    empty_row: str = ""

    def __call__(self, rows: Iterable[str]) -> str:
        return self.between.join(row or self.empty_row for row in rows)

    def __str__(self) -> str:
        said = _SEPARATORS.get(self.between, f"rows joined by {self.between!r}")
        return f"{said}, empty ones as {self.empty_row!r}" if self.empty_row else said


BLANK_LINE = Join("\n\n")
# The published files of WikiText, wiki.test.raw and the others: each row brings its line end, and an empty line is a space.
WIKITEXT_FILE = Join("", " \n")


@dataclass(frozen=True, slots=True)
class Corpus:
    """One text. ``sha256`` is of its UTF-8 bytes; ``join`` says how rows became one text; ``revision`` pins a hub data set."""

    name: str
    text: str
    sha256: str
    origin: str
    join: str
    revision: str | None = None


def load_corpus(
    name_or_path: str, *, field: str = "text", join: Join = BLANK_LINE, report: Callable[[str], None] | None = None
) -> Corpus:
    """The corpus of that name, or the file at that path.

    Args:
        name_or_path: ``pydoc``, ``wikitext2``, ``hub:ORG/NAME[@REVISION][:CONFIG][:SPLIT]``, or the path of a .parquet, .jsonl
            (one object a line) or .txt file (UTF-8).
        field: the column of a data set or parquet file, or the key of a jsonl object, that holds the text.
        join: how rows become one text; a .txt file has none.
        report: called with one line before a data set is loaded from the hub.

    Raises:
        CorpusError: no such corpus or file, an unreadable file, a bad line (numbered), a text that is empty or only white space.
        SourceError: the hub has no such data set or revision.
        HubUnreachable: what is to come from the hub is not in its cache and the hub does not answer.
    """
    if name_or_path in NAMED:
        return NAMED[name_or_path](join)
    if name_or_path.startswith(PREFIX):
        return _hub(name_or_path, field, join, report)
    path = _existing_file(name_or_path)
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise CorpusError(f"{path} is none of {', '.join(_READERS)}: rename or convert the corpus to one of these")
    try:
        text = reader(path, field, join)
    except OSError as error:
        raise CorpusError(f"the corpus {path} cannot be read: {error.strerror or error}") from error
    if path.suffix.lower() == ".txt":
        return _corpus(path.name, text, str(path), None)
    return _corpus(path.name, text, f"{path}, field {field}", join)


def _hub(name: str, field: str, join: Join, report: Callable[[str], None] | None) -> Corpus:
    found = read_hub_rows(name, field, report)
    text = join(_checked(row, f"{found.label}, row {number}", field) for number, row in enumerate(found.rows, 1))
    return _corpus(found.name, text, f"{found.label}, field {field}", join, found.commit)


def _pydoc(join: Join) -> Corpus:
    """CPython's help topics in the order of their keys: a text that is on every machine, though it changes with the version."""
    from pydoc_data.topics import topics

    text = join(topics[key] for key in sorted(topics))
    return _corpus("pydoc", text, f"pydoc_data.topics of CPython {platform.python_version()}", join)


def _wikitext2(join: Join) -> Corpus:
    """The raw WikiText-2 test split, 4,358 rows, at the pinned revision of the hub."""
    try:
        path = fetch_file(WIKITEXT2_REPO, WIKITEXT2_FILE, WIKITEXT2_REVISION, repo_type="dataset")
    except Unreachable as error:
        raise HubUnreachable(
            f"wikitext2 could not be fetched: {error}; three ways on: --corpus PATH with a parquet, jsonl or text file, a copy "
            f"of {WIKITEXT2_REPO} at {WIKITEXT2_REVISION} in the hub's cache (HF_HOME), or the embedded --corpus pydoc"
        ) from error
    text = _parquet(path, "text", join)
    return _corpus("wikitext2", text, f"{WIKITEXT2_REPO}/{WIKITEXT2_FILE}", join, WIKITEXT2_REVISION)


NAMED: dict[str, Callable[[Join], Corpus]] = {"pydoc": _pydoc, "wikitext2": _wikitext2}


def _corpus(name: str, text: str, origin: str, join: Join | None, revision: str | None = None) -> Corpus:
    if not text.strip():
        raise CorpusError(f"the corpus {origin} {'is empty' if not text else 'holds only white space'}: give one with text in it")
    said = "one text" if join is None else str(join)
    return Corpus(name, text, hashlib.sha256(text.encode("utf-8")).hexdigest(), origin, said, revision)


def _existing_file(name: str) -> Path:
    path = Path(os.path.expanduser(name))  # os.path: an unknown ~user or an overlong name is no such file, not an exception
    if os.path.isdir(path):
        raise CorpusError(f"the corpus {name} is a folder: give one file of it ({', '.join(_READERS)})")
    if os.path.isfile(path):
        return path
    beside = [str(path.parent / other.name) for other in _listed(path.parent)]
    near = difflib.get_close_matches(name, [*NAMED, *beside], n=1)
    raise CorpusError(
        f"no such corpus: {name} is neither {' nor '.join(NAMED)} nor a file"
        + (f"; did you mean {near[0]}?" if near else f": give the path of a parquet, jsonl or text file, or {SPELLING}")
    )


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _plain(path: Path, field: str, join: Join) -> str:
    del field, join  # a text file is one text already
    return _utf8(path.read_bytes(), path)


def _utf8(data: bytes, path: Path) -> str:
    """Text without a byte order mark, line ends kept as they are."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CorpusError(f"{path} is not UTF-8 text (byte {error.start}): convert it, or give another file") from error


def _jsonl(path: Path, field: str, join: Join) -> str:
    def rows() -> Iterator[str]:
        # Not splitlines(): it also cuts at U+2028, which may stand inside a JSON string.
        for number, line in enumerate(_utf8(path.read_bytes(), path).split("\n"), 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise CorpusError(f"{where} is not JSON ({error}): a jsonl file holds one object a line") from error
            if not isinstance(row, dict) or field not in row:
                raise CorpusError(f"{where} has no field {field!r}: each line is an object with the text in that field")
            yield _checked(row[field], where, field)

    return join(rows())


def _checked(value: object, where: str, field: str) -> str:
    if not isinstance(value, str):
        raise CorpusError(f"{where} holds {type(value).__name__} in {field!r} where text is needed: mend or remove it")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise CorpusError(f"{where} holds half of a surrogate pair in {field!r}, which is no text: mend or remove it") from error
    return value


def _parquet(path: Path, field: str, join: Join) -> str:
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        columns = list(file.schema_arrow.names)
        if field not in columns:
            raise CorpusError(f"{path} has no column {field!r}, only {', '.join(columns)}: name the one that holds the text")
        rows = file.read(columns=[field])[field].to_pylist()
    except pyarrow.ArrowException as error:
        reason = str(error).splitlines()[0]
        raise CorpusError(f"{path} cannot be read as parquet ({reason}): it is damaged or of another kind") from error
    return join(_checked(row, f"{path}, row {number}", field) for number, row in enumerate(rows, 1))


_READERS: dict[str, Callable[[Path, str, Join], str]] = {".parquet": _parquet, ".jsonl": _jsonl, ".txt": _plain}
