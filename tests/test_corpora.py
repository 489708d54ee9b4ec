"""Texts from names and files: what is joined how, what is refused with which line, and nothing heavy on the way."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from calib.corpora import WIKITEXT2_FILE, WIKITEXT2_REPO, WIKITEXT2_REVISION, Join, load_corpus
from quant.errors import CorpusError
from tests.hub_server import HubServer, Repository

ROOT = Path(__file__).resolve().parents[1]
ROWS = ["", " = Robert Boulter = \n", "naïve café\u2028 line separator", "\U0001d11e"]

CLIENT = """
import json, sys
from calib.corpora import load_corpus
from quant.errors import BitledgerError
for name in sys.argv[1:]:
    try:
        corpus = load_corpus(name)
        answer = {"text": corpus.text, "origin": corpus.origin, "join": corpus.join, "revision": corpus.revision}
    except BitledgerError as error:
        answer = {"error": type(error).__name__, "message": str(error)}
    print(json.dumps({**answer, "heavy": sorted({"torch", "transformers", "datasets", "pandas"} & set(sys.modules))}))
"""


def client(names: Sequence[str], **environment: str) -> list[dict[str, Any]]:
    """Load each corpus in a process of its own, as a command would; one answer for each."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, *names],
        cwd=ROOT,
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def write_parquet(path: Path, rows: Sequence[Any], column: str = "text") -> Path:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"id": list(range(len(rows))), column: rows}), path)
    return path


def write_jsonl(path: Path, rows: Sequence[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({field: row}, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return path


def test_rows_are_joined_by_a_blank_line_from_every_kind_of_file(tmp_path: Path) -> None:
    expected = "\n\n".join(ROWS)
    files = [write_parquet(tmp_path / "a.parquet", ROWS), write_jsonl(tmp_path / "a.jsonl", ROWS), tmp_path / "a.txt"]
    files[2].write_bytes(expected.encode())
    for file in files:
        corpus = load_corpus(str(file))
        assert corpus.text == expected
        assert corpus.sha256 == hashlib.sha256(expected.encode()).hexdigest()
        assert corpus.name == file.name
        assert str(file) in corpus.origin
    assert [load_corpus(str(file)).join for file in files] == ["rows joined by a blank line"] * 2 + ["one text"]


def test_join_is_a_choice_that_is_told(tmp_path: Path) -> None:
    """R58: rows as they stand are the file that other tools read; the blank line is the published convention."""
    file = write_parquet(tmp_path / "a.parquet", ROWS)
    found = {join: load_corpus(str(file), join=Join(join)) for join in ("\n\n", "", "\n", "--")}
    assert {join: corpus.text for join, corpus in found.items()} == {join: join.join(ROWS) for join in found}
    assert len({corpus.sha256 for corpus in found.values()}) == 4
    told = [corpus.join for corpus in found.values()]
    assert told == ["rows joined by a blank line", "rows as they stand", "rows joined by a newline", "rows joined by '--'"]


def test_text_keeps_its_line_ends_and_loses_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    assert load_corpus(str(file)).text == "one\r\ntwo\n"


def test_another_field_can_be_named(tmp_path: Path) -> None:
    for file in (write_parquet(tmp_path / "a.parquet", ["one"], "body"), write_jsonl(tmp_path / "a.jsonl", ["one"], "body")):
        assert load_corpus(str(file), field="body").text == "one"
        assert "field body" in load_corpus(str(file), field="body").origin


def test_pydoc_is_on_every_machine_and_tells_its_version() -> None:
    from pydoc_data.topics import topics

    corpus = load_corpus("pydoc")
    assert corpus.text.startswith(topics[min(topics)] + "\n\n")
    assert corpus.text.endswith(topics[max(topics)])
    assert len(corpus.text) == sum(map(len, topics.values())) + 2 * (len(topics) - 1)
    assert corpus.origin == f"pydoc_data.topics of CPython {platform.python_version()}"
    assert corpus.revision is None


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.txt", b"", r"a\.txt is empty: give one with text in it"),
        ("a.txt", b" \n\n\t\n", r"a\.txt holds only white space"),
        ("a.txt", b"caf\xe9", r"a\.txt is not UTF-8 text \(byte 3\)"),
        ("a.jsonl", b"", r"a\.jsonl, field text is empty"),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": \n', r"a\.jsonl, line 3 is not JSON"),
        ("a.jsonl", b'{"text": "a"}\n["a"]\n', r"line 2 has no field 'text'"),
        ("a.jsonl", b'{"body": "a"}\n', r"line 1 has no field 'text'"),
        ("a.jsonl", b'{"text": 3}\n', r"line 1 holds int in 'text' where text is needed"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\\ud800"}\n', r"line 2 holds half of a surrogate pair"),
        ("a.jsonl", b"[" * 100_000, r"line 1 is not JSON"),
        ("a.parquet", b"", r"a\.parquet cannot be read as parquet"),
        ("a.parquet", b"PAR1 but no more", r"a\.parquet cannot be read as parquet"),
        ("a.csv", b"text\na\n", r"a\.csv is none of \.parquet, \.jsonl, \.txt: rename or convert"),
    ],
)
def test_bad_file_is_one_sentence_that_names_the_place(name: str, data: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(CorpusError, match=said) as caught:
        load_corpus(str(tmp_path / name))
    assert "\n" not in str(caught.value)


def test_bad_parquet_rows_and_columns_are_named(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"has no column 'text', only id, body"):
        load_corpus(str(write_parquet(tmp_path / "a.parquet", ["one"], "body")))
    with pytest.raises(CorpusError, match=r"row 2 holds NoneType in 'text'"):
        load_corpus(str(write_parquet(tmp_path / "b.parquet", ["one", None])))
    with pytest.raises(CorpusError, match=r"row 1 holds int in 'text'"):
        load_corpus(str(write_parquet(tmp_path / "c.parquet", [1, 2])))
    with pytest.raises(CorpusError, match=r"d\.parquet, field text is empty"):
        load_corpus(str(write_parquet(tmp_path / "d.parquet", [""])))


def test_missing_corpus_names_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "stories.txt").write_text("a")
    monkeypatch.chdir(tmp_path)
    for name, said in {
        "wikitext": r"no such corpus: wikitext is neither pydoc nor wikitext2 nor a file; did you mean wikitext2\?",
        "texts/storys.txt": r"did you mean texts/stories\.txt\?",
        "/no/such.txt": r"no such corpus: /no/such\.txt",
        "texts": r"the corpus texts is a folder: give one file of it",
        "": r"no such corpus|is a folder",
        "x" * 300: r"no such corpus: x{300}",
    }.items():
        with pytest.raises(CorpusError, match=said):
            load_corpus(name)


def test_bad_corpora_are_refused_before_anything_heavy(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "bad.jsonl").write_text("{")
    started = time.monotonic()
    answers = client(["no-such", str(tmp_path / "empty.txt"), str(tmp_path / "bad.jsonl")])
    assert time.monotonic() - started < 2
    assert [answer["error"] for answer in answers] == ["CorpusError"] * 3
    assert [answer["heavy"] for answer in answers] == [[]] * 3


def test_wikitext2_comes_from_the_hub_at_its_pinned_revision(tmp_path: Path) -> None:
    data = write_parquet(tmp_path / "rows.parquet", ROWS).read_bytes()
    other = write_parquet(tmp_path / "other.parquet", ["another revision"]).read_bytes()
    newest = "c" * 40
    repository = Repository({WIKITEXT2_REVISION: {WIKITEXT2_FILE: data}, newest: {WIKITEXT2_FILE: other}}, {"main": newest})
    with HubServer({f"datasets/{WIKITEXT2_REPO}": repository}) as server:
        environment = {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "home")}
        first = client(["wikitext2"], **environment)[0]
        assert any(line.startswith("GET /datasets/Salesforce/wikitext/resolve/b08601e0") for line in server.log)
        server.log.clear()
        assert client(["wikitext2"], **environment)[0] == first
        assert server.log == [], "what lies in the cache at that revision is not asked for again"
    assert first["text"] == "\n\n".join(ROWS)
    assert first["revision"] == WIKITEXT2_REVISION == "b08601e04326c79dfdd32d625aee71d232d685c3"
    assert first["origin"] == "Salesforce/wikitext/wikitext-2-raw-v1/test-00000-of-00001.parquet"
    assert first["join"] == "rows joined by a blank line"


@pytest.mark.parametrize("hangs", [True, False], ids=["hangs", "refuses"])
def test_wikitext2_without_a_hub_says_the_three_ways_on_within_five_seconds(hangs: bool, tmp_path: Path) -> None:
    with HubServer({}, hangs=hangs) as server:
        if not hangs:
            server.__exit__()
        started = time.monotonic()
        answer = client(["wikitext2"], HF_ENDPOINT=server.url, HF_HOME=str(tmp_path))[0]
        assert time.monotonic() - started < 5
    assert answer["error"] == "HubUnreachable"
    assert answer["heavy"] == []
    for part in (
        server.url,
        "did not answer within 3 s" if hangs else "Connection refused",
        "--corpus PATH",
        "HF_HOME",
        "--corpus pydoc",
    ):
        assert part in answer["message"]


def test_published_text(shared_folder: Path) -> None:
    """The WikiText-2 test split of the published figures: 4,358 rows."""
    import pandas

    path = shared_folder / "data" / "wikitext-2-raw-v1-test.parquet"
    rows = pandas.read_parquet(path)["text"].tolist()
    assert len(rows) == 4358
    corpus = load_corpus(str(path))
    assert corpus.text == "\n\n".join(rows)
    assert corpus.sha256 == "696cca6b65a171b0a358a4be6732cdfdf2dd6164a32e20fd70e3c13fc4dfae83"
