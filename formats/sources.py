"""What ``--model`` means: a registered name, a folder, or a hub id with its revision. The result is always a checkpoint folder.

Nothing is ever substituted: a path that does not exist is an error about that path and is never looked up on the hub, and a hub
that does not answer is an error that names the ways on. ``Source.note`` is the first line of every summary.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache as remembered
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from formats import hub
from formats.embedded import embedded_model
from quant.errors import HubUnreachable, SourceError

Report = Callable[[str], None]
EMBEDDED = "smollm2-135m-instruct-q4_1"

_HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")
_FILE_SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".json")


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint folder and how it was found.

    Attributes:
        requested: what was asked for, word for word.
        folder: absolute path with config.json, safetensors and tokenizer files.
        repo, revision: hub repository and full commit hash, for the kind ``hub``.
        note: one line that says what is used.
        origin_files: (name, SHA-256) of files that the folder was made from, such as the embedded GGUF.
    """

    requested: str
    kind: Literal["folder", "hub", "embedded"]
    folder: Path
    repo: str | None
    revision: str | None
    note: str
    origin_files: tuple[tuple[str, str], ...] = ()


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class HubModel(_Strict):
    """An entry of models.toml that names a hub repository, pinned or not."""

    repo: str
    revision: str | None = None


class EmbeddedEntry(_Strict):
    """An entry of models.toml that names a GGUF file inside a Python package."""

    package: str
    file: str
    sha256: str


class _Registry(_Strict):
    models: dict[str, HubModel | EmbeddedEntry]


@remembered
def registered_models() -> dict[str, HubModel | EmbeddedEntry]:
    """The entries of models.toml by name."""
    return _Registry.model_validate(tomllib.loads(Path(__file__).with_name("models.toml").read_text("utf-8"))).models


def resolve(model: str, *, cache: Path | None = None, report: Report | None = None) -> Source:
    """Find, fetch or make the checkpoint folder that ``model`` names.

    Args:
        model: a name of models.toml (in any case), a folder, or ``org/name`` with an optional ``@revision``.
        cache: where the embedded model is kept (default ``$BITLEDGER_CACHE`` or ~/.cache/bitledger).
        report: called with one line before anything that takes long.

    Raises:
        SourceError: no such name, folder, repository or revision, or nothing usable in it.
        HubUnreachable: the hub gave no answer within seconds.
    """
    entry = registered_models().get(model.casefold())
    if isinstance(entry, EmbeddedEntry):
        return _from_package(model, entry, cache, report)
    if isinstance(entry, HubModel):
        return _from_hub(model, entry.repo, entry.revision, report)
    if _is_path(model):
        return _from_folder(model)
    match = _HUB_ID.fullmatch(model)
    if match is None:
        raise SourceError(f"unknown model {model!r}: {_nearest_name(model)}")
    return _from_hub(model, match["repo"], match["revision"], report)


def _nearest_name(model: str) -> str:
    near = difflib.get_close_matches(model.casefold(), registered_models(), n=1, cutoff=0.5)
    names = f"did you mean {near[0]}?" if near else f"the known names are {', '.join(registered_models())};"
    return f"{names} (a hub model is org/name or org/name@revision, a folder is ./path)"


def _is_path(model: str) -> bool:
    """Whether ``model`` is meant as a path: it exists, is written like one, or lies in a folder that exists."""
    if not model.strip():
        return False
    if model.startswith((".", "~")) or os.path.isabs(model) or os.path.exists(model):
        return True
    match = _HUB_ID.fullmatch(model)
    if match is None:
        return "/" in model or os.sep in model or model.endswith(_FILE_SUFFIXES)
    if match["revision"]:
        return False
    return model.endswith(_FILE_SUFFIXES) or os.path.isdir(os.path.dirname(model))


def _from_folder(model: str) -> Source:
    path = Path(os.path.expanduser(model))  # os.path: an unknown ~user or an overlong name is no such folder, not an exception
    if os.path.isfile(path):
        how = "convert it to safetensors (only the embedded GGUF is read) and" if path.suffix == ".gguf" else "instead"
        raise SourceError(f"{model} is a file, not a folder: {how} give the folder with config.json and safetensors")
    if not os.path.isdir(path):
        raise SourceError(f"No such folder: {model}{_nearest_folder(path)}{_or_hub(model)}")
    if not os.path.isfile(path / "config.json"):
        raise SourceError(f"{model} holds no config.json, so it is not a checkpoint folder: give the one with config.json in it")
    folder = path.absolute()
    return Source(model, "folder", folder, None, None, f"the folder {folder}")


def _nearest_folder(path: Path) -> str:
    """'; did you mean X?' with the likest name beside the first part of ``path`` that does not exist."""
    absolute = path.absolute()
    for part in reversed([absolute, *absolute.parents]):
        if os.path.exists(part):
            continue
        try:
            beside = [other.name for other in part.parent.iterdir() if other.is_dir()]
        except OSError:
            return ""
        near = difflib.get_close_matches(part.name, beside, n=1)
        return f"; did you mean {part.parent / near[0]}?" if near else ""
    return ""


def _or_hub(model: str) -> str:
    return f" (for a hub model of this name write {model}@main)" if _HUB_ID.fullmatch(model) else ""


def _from_package(model: str, entry: EmbeddedEntry, cache: Path | None, report: Report | None) -> Source:
    name = model.casefold()
    made = embedded_model(name, entry.package, entry.file, entry.sha256, cache=cache, report=report)
    note = f"{name}, the embedded model: {entry.file} of the Python package {entry.package}, dequantised to float32"
    return Source(model, "embedded", made.folder.absolute(), None, None, note, ((entry.file, made.gguf_sha256),))


def _from_hub(model: str, repo: str, revision: str | None, report: Report | None) -> Source:
    """A snapshot in the hub's cache: a pinned one that is there already is used unasked, anything else is asked for first."""
    label = repo if model.casefold().startswith(repo.casefold()) else f"{model} = {repo}"
    pinned = hub.is_commit(revision)
    cached = hub.cached_snapshot(repo, revision)
    if cached is not None and (pinned or hub.is_offline()):
        commit = cached.name
        doubt = "" if pinned else ", not pinned and not compared with the hub (HF_HUB_OFFLINE is set)"
        return Source(model, "hub", cached, repo, commit, f"{label} at {commit} from the hub's cache{doubt}")
    try:
        listing = hub.list_model(repo, revision)
        if pinned and listing.commit != revision:
            raise SourceError(f"{hub.endpoint()} answered with {listing.commit} for {repo}@{revision}: ask again, or use a copy")
        folder = hub.fetch_snapshot(repo, revision, listing, report)
    except hub.Unreachable as error:
        raise HubUnreachable(_ways_on(repo, revision, error, cached)) from error
    doubt = "" if pinned else f" (not pinned: this is what {revision or 'main'} is now)"
    return Source(model, "hub", folder, repo, listing.commit, f"{label} at {listing.commit} from {hub.endpoint()}{doubt}")


def _ways_on(repo: str, revision: str | None, error: Exception, cached: Path | None) -> str:
    at = f"{repo}@{revision}" if revision else repo
    if cached is not None:
        copy = f"--model {repo}@{cached.name}, which is in the hub's cache"
    else:
        copy = "a complete copy in the hub's cache (HF_HOME), which has none now"
    return (
        f"{at} could not be fetched: {error}; three ways on: --model FOLDER with config.json and safetensors, {copy}, "
        f"or the embedded --model {EMBEDDED}"
    )
