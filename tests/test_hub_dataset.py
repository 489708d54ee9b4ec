"""Data sets through the real ``datasets`` client, against a hub on loopback: pinned, moved, cached, away, and what is refused."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from calib.corpora import load_corpus
from quant.errors import CorpusError
from tests.hub_server import HubServer, Repository

ROOT = Path(__file__).resolve().parents[1]
OLD, NEW = "a" * 40, "b" * 40

CARD = b"""---
configs:
- config_name: plain
  data_files:
  - split: train
    path: plain/train-*
  - split: test
    path: plain/test-*
- config_name: single
  data_files:
  - split: test
    path: single/test-*
---
"""

# Loads each argument in turn; one JSON line for each: the corpus or its error, what was reported, what heavy was imported.
CLIENT = """
import json, sys
from calib.corpora import load_corpus
from quant.errors import BitledgerError
for name in sys.argv[1:]:
    said = []
    try:
        corpus = load_corpus(name, report=said.append)
        answer = {key: getattr(corpus, key) for key in ("name", "text", "sha256", "origin", "join", "revision")}
    except BitledgerError as error:
        answer = {"error": type(error).__name__, "message": str(error)}
    heavy = sorted({"torch", "transformers", "datasets"} & set(sys.modules))
    print(json.dumps({**answer, "said": said, "heavy": heavy}))
"""


def client(url: str, home: Path, *names: str, **environment: str) -> list[dict[str, Any]]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, *names],
        cwd=ROOT,
        env={**inherited, "HF_ENDPOINT": url, "HF_HOME": str(home), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "the library's own bars and warnings are not for a pipe"
    return [json.loads(line) for line in done.stdout.splitlines()]


def parquet(rows: list[Any], column: str = "text") -> bytes:
    import pyarrow
    from pyarrow import parquet as writer

    data = io.BytesIO()
    writer.write_table(pyarrow.table({"id": list(range(len(rows))), column: rows}), data)
    return data.getvalue()


def dataset_files(mark: str) -> dict[str, bytes]:
    return {
        "README.md": CARD,
        "plain/train-00000-of-00001.parquet": parquet([f"train {mark}"]),
        "plain/test-00000-of-00002.parquet": parquet([f" = {mark} = \n", ""]),
        "plain/test-00001-of-00002.parquet": parquet(["naïve \u2028 café"]),
        "single/test-00000-of-00001.parquet": parquet([f"single {mark}"]),
    }


def served(files: Mapping[str, bytes]) -> dict[str, Repository]:
    return {"datasets/org/data": Repository({OLD: files}, {"main": OLD})}


def test_revision_is_resolved_recorded_and_pinned(tmp_path: Path) -> None:
    repository = Repository({OLD: dataset_files("old"), NEW: dataset_files("new")}, {"main": NEW, "v1": OLD})
    names = ["hub:org/data:plain:test", f"hub:org/data@{OLD}:plain:test", "hub:org/data@v1:plain:train", "hub:org/data:single"]
    with HubServer({"datasets/org/data": repository}) as server:
        main, pinned, branch, single = answers = client(server.url, tmp_path, *names)
        assert not any("/resolve/main/" in line or "/resolve/v1/" in line for line in server.log), "only commits are fetched"
        server.log.clear()
        again, moved = client(server.url, tmp_path, names[1], names[2], HF_HUB_OFFLINE="1")
        assert server.log == []
    assert [answer["revision"] for answer in answers] == [NEW, OLD, OLD, NEW]
    assert main["text"] == " = new = \n\n\n\n\nnaïve \u2028 café"
    assert pinned["text"] == main["text"].replace("new", "old")
    assert (branch["text"], single["text"]) == ("train old", "single new")
    assert pinned["sha256"] == hashlib.sha256(pinned["text"].encode()).hexdigest()
    assert pinned["origin"] == f"hub:org/data@{OLD}:plain:test, field text"
    assert (pinned["name"], single["name"]) == ("org/data:plain:test", "org/data:single:test")
    assert pinned["join"] == "rows joined by a blank line"
    assert main["said"] == [f"Loading the data set org/data at {NEW} from {server.url}"]
    assert "torch" not in main["heavy"]
    assert again == {**pinned, "said": [f"Loading the data set org/data at {OLD} from the cache"]}
    assert moved["error"] == "HubUnreachable", "where a branch stood is not guessed"
    assert "HF_HUB_OFFLINE is set, so the hub was not asked" in moved["message"]


def test_another_commit_in_the_cache_is_never_taken_instead(tmp_path: Path) -> None:
    with HubServer(served(dataset_files("old"))) as server:
        client(server.url, tmp_path, "hub:org/data:single")
        names = [f"hub:org/data@{NEW}:single", f"hub:org/data@{OLD}:plain:test", f"hub:org/none@{OLD}"]
        wrong, *absent = client(server.url, tmp_path, *names, HF_HUB_OFFLINE="1")
    assert {answer["error"] for answer in (wrong, *absent)} == {"HubUnreachable"}
    assert f"the cache of data sets holds org/data at {OLD} and not at {NEW}" in wrong["message"]
    for answer in absent:
        assert "HF_HUB_OFFLINE is set, and the cache of data sets does not hold it" in answer["message"]


def test_what_cannot_be_chosen_is_named(tmp_path: Path) -> None:
    with HubServer(served(dataset_files("old"))) as server:
        expected = {
            "hub:org/data": "org/data has several configurations: name one of plain, single in hub:ORG/NAME[@REVISION][:CONFIG]",
            "hub:org/data:none": "org/data has no configuration 'none': name one of plain, single",
            "hub:org/data:plain": "hub:org/data:plain does not say which split: name one of train, test",
            "hub:org/data:plain:dev": "hub:org/data:plain:dev has no split 'dev': name one of train, test",
            "hub:org/other": "has no org/other",
            f"hub:org/data@{NEW}": f"has org/data but no revision {NEW} of it",
        }
        answers = client(server.url, tmp_path, *expected)
        assert not any(line.endswith(".parquet") for line in server.log), "nothing is fetched for it"
    for answer, said in zip(answers, expected.values(), strict=True):
        assert said in answer["message"]
        assert "\n" not in answer["message"]


def test_bad_data_sets_are_one_sentence_each(tmp_path: Path) -> None:
    bad = {
        "column": (
            {"a.parquet": parquet(["one"], "body")},
            "hub:org/column has no column 'text', only id, body: name the one with the text",
        ),
        "row": ({"a.parquet": parquet(["one", None])}, f"hub:org/row@{OLD}:default:train, row 2 holds NoneType in 'text'"),
        "blank": ({"a.parquet": parquet([""])}, f"hub:org/blank@{OLD}:default:train, field text is empty"),
        "damaged": ({"a.parquet": b"PAR1 but no more"}, "cannot be read (Parquet magic bytes not found in footer"),
        "nothing": ({"README.md": b"no data"}, f"the data set org/nothing at {OLD} cannot be read"),
        "script": (
            {"script.py": b"raise SystemExit('never run')"},
            "needs a script of its own, which is never run: use a parquet",
        ),
    }
    repositories = {f"datasets/org/{name}": Repository({OLD: files}, {"main": OLD}) for name, (files, _) in bad.items()}
    with HubServer(repositories) as server:
        answers = client(server.url, tmp_path, *(f"hub:org/{name}" for name in bad))
    assert [answer["error"] for answer in answers] == ["CorpusError"] * len(bad)
    for answer, (_, said) in zip(answers, bad.values(), strict=True):
        assert said in answer["message"]
        assert "\n" not in answer["message"]


def test_the_command_says_what_it_loads_on_standard_error(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    options = ["--corpus", "hub:org/data:single", "--window", "8", "--evaluation-windows", "1", "--cards", "none"]
    command = [sys.executable, "-m", "pipelines.run", "rtn", "--model", str(tiny_model("llama")), *options, "--dry-run", "--json"]
    with HubServer(served(dataset_files("old"))) as server:
        environment = {**os.environ, "HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path)}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=True)
        assert done.stderr == f"Loading the data set org/data at {OLD} from {server.url}\n"
    assert json.loads(done.stdout)["evaluation"].startswith("org/data:single:test, tokens 0 to 8: 1 x 8")


@pytest.mark.parametrize("hangs", [True, False], ids=["hangs", "refuses"])
def test_without_a_hub_the_ways_on_are_said_within_five_seconds(hangs: bool, tmp_path: Path) -> None:
    with HubServer({}, hangs=hangs) as server:
        if not hangs:
            server.__exit__()
        started = time.monotonic()
        answer = client(server.url, tmp_path, "hub:org/data")[0]
        assert time.monotonic() - started < 5
    assert (answer["error"], answer["heavy"]) == ("HubUnreachable", [])
    reason = "did not answer within 3 s" if hangs else "Connection refused"
    for part in ("hub:org/data could not be loaded", reason, "--corpus PATH", "hub:org/data@COMMIT", "--corpus pydoc"):
        assert part in answer["message"]


@pytest.mark.parametrize(
    "name", ["hub:", "hub:data", "hub:org/data:a:b:c", "hub:org/data:a:train[:10%]", "hub:../data", "hub:org/data@"]
)
def test_other_spellings_are_refused_unasked(name: str) -> None:
    with pytest.raises(CorpusError, match=r"names no hub data set: write hub:ORG/NAME\[@REVISION\]\[:CONFIG\]\[:SPLIT\]"):
        load_corpus(name)
