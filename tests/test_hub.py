"""Models through the real hub client, against a hub on loopback: pinned, moved, away, refusing, half cached."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from formats import hub
from formats.checkpoint import Checkpoint
from formats.sources import EMBEDDED
from tests.hub_server import HubServer, Repository

ROOT = Path(__file__).resolve().parents[1]
OLD, NEW = "a" * 40, "b" * 40

# Resolves each argument in turn; one JSON line for each: its source or its error, what was reported, what heavy was imported.
CLIENT = """
import json, sys
from formats.sources import resolve
from quant.errors import BitledgerError
for model in sys.argv[1:]:
    said = []
    try:
        source = resolve(model, report=said.append)
        answer = {"folder": str(source.folder), "note": source.note, "revision": source.revision, "repo": source.repo}
    except BitledgerError as error:
        answer = {"error": type(error).__name__, "message": str(error)}
    heavy = sorted({"torch", "transformers", "datasets", "pandas", "pyarrow", "gguf"} & set(sys.modules))
    print(json.dumps({**answer, "said": said, "heavy": heavy}))
"""


@dataclass(frozen=True)
class Ran:
    answers: list[dict[str, Any]]
    seconds: float


def client(url: str, home: Path, *models: str, **environment: str) -> Ran:
    """Resolve ``models`` in a process of its own, as a command would: HF_ENDPOINT is read when the client is imported."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TRANSFORMERS_"))}
    env = {**inherited, "HF_ENDPOINT": url, "HF_HOME": str(home), **environment}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, *models], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    seconds = time.monotonic() - started
    assert done.returncode == 0, done.stderr
    return Ran([json.loads(line) for line in done.stdout.splitlines()], seconds)


def model_files(mark: int) -> dict[str, bytes]:
    """A repository as they are on the hub: the wanted files, and others that must stay there."""
    return {
        "config.json": json.dumps({"mark": mark}).encode(),
        "model.safetensors": bytes([mark]) * 40_000,
        "tokenizer.json": b"{}",
        "tokenizer.model": b"model",
        "chat_template.jinja": b"{{ messages }}",
        "merges.txt": b"a b\n",
        "README.md": b"a card",
        ".gitattributes": b"",
        "pytorch_model.bin": b"a pickle",
        "consolidated.safetensors": b"the same weights again",
        "original/params.json": b"{}",
        "onnx/model.onnx": b"another runtime",
    }


def test_revisions_are_pinned_and_only_wanted_files_are_fetched(tmp_path: Path) -> None:
    repository = Repository({OLD: model_files(1), NEW: model_files(2)}, {"main": NEW, "v1": OLD})
    with HubServer({"org/model": repository}) as server:
        ran = client(server.url, tmp_path, "org/model", f"org/model@{OLD}", "org/model@v1")
        main, pinned, branch = ran.answers
        fetched = {line.rsplit("/", 1)[1] for line in server.log if "/resolve/" in line}
        server.log.clear()
        again = client(server.url, tmp_path, f"org/model@{OLD}").answers[0]
        assert server.log == [], "a pinned revision in the cache is used without a question"

    assert (main["revision"], pinned["revision"], branch["revision"]) == (NEW, OLD, OLD)
    for answer, mark in ((main, 2), (pinned, 1), (branch, 1), (again, 1)):
        folder = Path(answer["folder"])
        assert (folder / "model.safetensors").read_bytes() == bytes([mark]) * 40_000
        assert json.loads((folder / "config.json").read_text()) == {"mark": mark}
        assert answer["heavy"] == []
    wanted = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer.model", "chat_template.jinja", "merges.txt"}
    assert fetched == wanted == {path.name for path in Path(main["folder"]).iterdir()}
    assert f"org/model at {NEW}" in main["note"]
    assert "not pinned: this is what main is now" in main["note"]
    assert "not pinned: this is what v1 is now" in branch["note"]
    assert "not pinned" not in pinned["note"]
    assert "from the hub's cache" in again["note"]
    assert main["said"] == [f"Fetching 6 files, 0.00 GB, of org/model at {NEW} from {server.url}"]


def test_snapshot_is_a_checkpoint_folder(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """The cache holds links to blobs outside the snapshot; the checkpoint reader takes them, shards and index included."""
    source = tiny_model("sharded")
    files = {path.name: path.read_bytes() for path in source.iterdir() if path.is_file()}
    with HubServer(
        {"org/sharded": Repository({OLD: {**files, "model.fp16.safetensors": b"a variant"}}, {"main": OLD})}
    ) as server:
        folder = Path(client(server.url, tmp_path, "org/sharded").answers[0]["folder"])
    assert (folder / "model.safetensors.index.json").is_symlink()
    theirs, ours = Checkpoint.open(folder), Checkpoint.open(source)
    assert len(ours.weight_files) > 1
    assert list(theirs.tensors) == list(ours.tensors)
    assert all((theirs.raw(name) == ours.raw(name)).all() for name in ours.tensors)


@pytest.mark.parametrize(
    ("hangs", "reason"),
    [(True, "did not answer within 3 s"), (False, "gave no answer .*Connection refused")],
    ids=["hangs", "refuses"],
)
def test_unreachable_hub_is_one_message_within_five_seconds(hangs: bool, reason: str, tmp_path: Path) -> None:
    server = HubServer({}, hangs=hangs)
    with server:
        url = server.url
        if hangs:
            ran = client(url, tmp_path, "smollm2-135m")
            assert server.log, "the request arrived and was left hanging"
    if not hangs:  # the port is closed now
        ran = client(url, tmp_path, "smollm2-135m")
    assert ran.seconds < 5
    answer = ran.answers[0]
    assert answer["error"] == "HubUnreachable"
    tried = rf"HuggingFaceTB/SmolLM2-135M@93efa2f\w+ could not be fetched: {url} {reason}"
    ways = rf"three ways on: --model FOLDER .*cache.*, or the embedded --model {EMBEDDED}"
    assert re.fullmatch(rf"{tried}.*; {ways}", answer["message"])
    assert answer["heavy"] == []


def test_hub_that_says_no_is_told_apart_from_one_that_is_away(tmp_path: Path) -> None:
    pickled = {name: data for name, data in model_files(1).items() if not name.endswith(".safetensors")}
    bare = {"config.json": b"{}"}
    no_config = {"model.safetensors": b"x"}
    repositories = {
        "org/good": Repository({OLD: model_files(1)}, {"main": OLD}),
        "org/pickled": Repository({OLD: pickled}, {"main": OLD}),
        "org/bare": Repository({OLD: bare}, {"main": OLD}),
        "org/no-config": Repository({OLD: no_config}, {"main": OLD}),
        "org/gated": Repository({}, {}, gated=True),
    }
    said = {
        "org/none": r"http://\S+ has no org/none \(or it is private, then set HF_TOKEN\)",
        "org/good@v9": r"has org/good but no revision v9 of it",
        "org/pickled": r"org/pickled holds no safetensors weights, only pickled ones \(pytorch_model\.bin\).*convert them",
        "org/bare": r"org/bare holds no safetensors weights, none: name another model",
        "org/no-config": r"org/no-config holds no config\.json",
        "org/gated": r"org/gated is gated: accept its licence .* and set HF_TOKEN",
    }
    with HubServer(repositories) as server:
        answers = client(server.url, tmp_path, *said).answers
    for pattern, answer in zip(said.values(), answers, strict=True):
        assert answer["error"] == "SourceError"
        assert "\n" not in answer["message"]
        assert re.search(pattern, answer["message"])
    with HubServer(repositories, status=503) as server:
        away = client(server.url, tmp_path, "org/good").answers[0]
    assert (away["error"], f"{server.url} answered 503" in away["message"]) == ("HubUnreachable", True)
    with HubServer(repositories, claims=NEW) as server:
        other = client(server.url, tmp_path, f"org/good@{OLD}").answers[0]
    assert other["error"] == "SourceError"
    assert f"answered with {NEW} for org/good@{OLD}" in other["message"]


def test_cache_is_named_or_used_as_asked_but_never_in_silence(tmp_path: Path) -> None:
    with HubServer({"org/model": Repository({NEW: model_files(2)}, {"main": NEW})}) as server:
        folder = client(server.url, tmp_path, "org/model").answers[0]["folder"]
    away, pinned = client(server.url, tmp_path, "org/model", f"org/model@{NEW}").answers
    assert away["error"] == "HubUnreachable"
    assert f"--model org/model@{NEW}, which is in the hub's cache" in away["message"]
    assert pinned["folder"] == folder

    offline, absent = client(server.url, tmp_path, "org/model", "org/other", HF_HUB_OFFLINE="1").answers
    assert (offline["folder"], offline["revision"]) == (folder, NEW)
    assert "not pinned and not compared with the hub (HF_HUB_OFFLINE is set)" in offline["note"]
    assert absent["error"] == "HubUnreachable"
    assert "HF_HUB_OFFLINE is set, so the hub was not asked" in absent["message"]


@pytest.mark.parametrize("lost", ["model.safetensors", "tokenizer.json"])
def test_partial_snapshot_of_another_program_is_completed(lost: str, tmp_path: Path) -> None:
    files = {name: model_files(1)[name] for name in ("config.json", "model.safetensors", "tokenizer.json")}
    with HubServer({"org/model": Repository({OLD: files}, {"main": OLD})}) as server:
        folder = Path(client(server.url, tmp_path, f"org/model@{OLD}").answers[0]["folder"])
        (folder / lost).unlink()
        assert client(server.url, tmp_path, f"org/model@{OLD}").answers[0]["folder"] == str(folder)
    assert (folder / lost).read_bytes() == files[lost]


def test_shards_of_the_index_decide_whether_a_snapshot_is_complete(tmp_path: Path) -> None:
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = {"weight_map": {"a": shards[0], "b": shards[1]}}
    for name, data in (("tokenizer.json", "{}"), (hub.INDEX, json.dumps(index)), (shards[0], "x")):
        (tmp_path / name).write_text(data)
    assert not hub._is_complete(tmp_path)
    (tmp_path / shards[1]).write_text("x")
    assert hub._is_complete(tmp_path)
    (tmp_path / hub.INDEX).write_text("[]")
    assert not hub._is_complete(tmp_path)
    assert hub.wanted_files("r", ["config.json", hub.INDEX, *shards, "model.safetensors", "x/config.json"]) == sorted(
        ["config.json", hub.INDEX, *shards]
    )
