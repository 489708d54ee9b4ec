"""The model and data hub, asked briefly: an answer comes within seconds or the reason why there is none.

All traffic goes through ``huggingface_hub`` and so honours HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE. The library's own
timeouts add up to minutes (retries, name look-ups that hang in the system's resolver), so the first question, which names the
revision, has a deadline of its own; only after its answer is anything downloaded. A full commit hash that lies complete in the
cache is used without a question: its content cannot have changed.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Literal, NoReturn, TypeVar

from quant.errors import SourceError

T = TypeVar("T")
Report = Callable[[str], None]
RepoType = Literal["model", "dataset"]

ANSWER_SECONDS = 3.0  # for the first question: leaves room for start-up and the message within 5 s
INDEX = "model.safetensors.index.json"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
_KEPT = (".json", ".txt", ".jinja", ".model")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class Unreachable(Exception):
    """The hub gave no usable answer; the text says what was tried. Callers add the ways on."""


@dataclass(frozen=True, slots=True)
class Listing:
    """A repository at one commit: its hash, and name -> bytes (None where the hub does not say) of its files."""

    commit: str
    files: dict[str, int | None]


def is_commit(revision: str | None) -> bool:
    """Whether ``revision`` is a full commit hash, which always names the same bytes."""
    return revision is not None and _COMMIT.fullmatch(revision) is not None


def endpoint() -> str:
    """Address of the hub (``HF_ENDPOINT``)."""
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids asking the hub."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def list_model(repo: str, revision: str | None) -> Listing:
    """Commit and files of ``repo`` at ``revision`` (default: the main branch).

    Raises Unreachable when there is no answer within seconds, SourceError when the answer is no.
    """
    from huggingface_hub import HfApi

    def ask() -> Listing:
        info = HfApi().model_info(repo, revision=revision, timeout=ANSWER_SECONDS, files_metadata=True)
        return Listing(str(info.sha), {file.rfilename: file.size for file in info.siblings or ()})

    return _asked(repo, revision, ask)


def find_commit(repo: str, revision: str | None, *, repo_type: RepoType) -> str:
    """Full hash of the commit that ``revision`` (default: the main branch) of ``repo`` is now.

    Raises Unreachable when there is no answer within seconds, SourceError when the answer is no.
    """
    from huggingface_hub import HfApi

    return _asked(
        repo, revision, lambda: str(HfApi().repo_info(repo, revision=revision, repo_type=repo_type, timeout=ANSWER_SECONDS).sha)
    )


def wanted_files(repo: str, names: Iterable[str]) -> list[str]:
    """The files of a checkpoint among ``names``: config, tokenizer, templates and exactly one set of safetensors weights.

    Sub-folders (original weights, other runtimes) and second sets (``consolidated``, other precisions) are left where they are.
    Raises SourceError when there is no config.json or no safetensors file.
    """
    root = [name for name in names if "/" not in name and not name.startswith(".")]
    weights = [name for name in root if name.endswith(".safetensors")]
    if not weights:
        pickles = [name for name in root if name.endswith(_PICKLES)]
        found = f"only pickled ones ({pickles[0]}), which are never opened: convert them to safetensors" if pickles else "none"
        raise SourceError(f"{repo} holds no safetensors weights, {found}{'' if pickles else ': name another model'}")
    if "config.json" not in root:
        raise SourceError(f"{repo} holds no config.json, so it is not a transformers checkpoint: name another model")
    if INDEX in root:
        weights = [name for name in weights if _SHARD.fullmatch(name)]
    elif "model.safetensors" in weights:
        weights = ["model.safetensors"]
    return sorted([*weights, *(name for name in root if name.endswith(_KEPT))])


def cached_snapshot(repo: str, revision: str | None) -> Path | None:
    """The folder of ``repo`` at ``revision`` in the hub's cache when it is complete, else None. Asks nobody."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(repo, "config.json", revision=revision)
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    return folder if _is_complete(folder) else None


def _is_complete(folder: Path) -> bool:
    """Weights whole (every shard of the index) and a tokenizer: other programs leave snapshots with a few files only."""
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        return False
    if not (folder / INDEX).is_file():
        return any(folder.glob("*.safetensors"))
    try:
        shards = set(json.loads((folder / INDEX).read_text("utf-8"))["weight_map"].values())
        return bool(shards) and all((folder / shard).is_file() for shard in shards)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def fetch_snapshot(repo: str, revision: str | None, listing: Listing, report: Report | None = None) -> Path:
    """Download the checkpoint files of ``repo`` at ``listing.commit`` into the hub's cache and return their folder.

    The client is given the name that was asked for, so that its cache remembers where the branch stood and the same name works
    under HF_HUB_OFFLINE; should the branch have moved on since the listing, the listed commit is what is used.
    Raises Unreachable when the hub stops answering, SourceError for what it refuses and for a full disk.
    """
    from huggingface_hub import snapshot_download

    names = wanted_files(repo, listing.files)
    if report is not None:
        size = sum(listing.files[name] or 0 for name in names)
        report(f"Fetching {len(names)} files, {size / 1e9:.2f} GB, of {repo} at {listing.commit} from {endpoint()}")
    try:
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=names))
        if folder.name != listing.commit:
            folder = Path(snapshot_download(repo, revision=listing.commit, allow_patterns=names))
        return folder
    except Exception as error:  # noqa: BLE001 - the client, its transports and the disk raise unrelated types
        translate(error, repo, listing.commit)


def fetch_file(repo: str, name: str, revision: str, *, repo_type: RepoType) -> Path:
    """One file of a repository, from the cache when it is there at that commit, else from the hub.

    Raises Unreachable when there is no answer within seconds, SourceError when the answer is no.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache

    cached = try_to_load_from_cache(repo, name, revision=revision, repo_type=repo_type)
    if isinstance(cached, str) and is_commit(revision):
        return Path(cached)
    url = hf_hub_url(repo, name, repo_type=repo_type, revision=revision)
    _asked(repo, revision, lambda: get_hf_file_metadata(url, timeout=ANSWER_SECONDS))
    try:
        return Path(hf_hub_download(repo, name, repo_type=repo_type, revision=revision))
    except Exception as error:  # noqa: BLE001 - the client, its transports and the disk raise unrelated types
        translate(error, repo, revision)


def _asked(repo: str, revision: str | None, ask: Callable[[], T]) -> T:
    """The result of ``ask``, run in a thread that is left behind when the deadline passes: a name look-up cannot be stopped."""
    results: list[T] = []
    failures: list[Exception] = []

    def work() -> None:
        try:
            results.append(ask())
        except Exception as error:  # noqa: BLE001 - raised again below, in the thread that waits
            failures.append(error)

    thread = Thread(target=work, daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    if results:
        return results[0]
    if failures:
        translate(failures[0], repo, revision)
    raise Unreachable(f"{endpoint()} did not answer within {ANSWER_SECONDS:g} s")


def translate(error: Exception, repo: str, revision: str | None) -> NoReturn:
    """Raise what ``error``, an exception of the client or its transports, means to somebody who asked for ``repo``."""
    from huggingface_hub import errors

    at = f"{repo}@{revision}" if revision else repo
    if isinstance(error, errors.OfflineModeIsEnabled):
        raise Unreachable("HF_HUB_OFFLINE is set, so the hub was not asked") from error
    if isinstance(error, errors.GatedRepoError):
        raise SourceError(f"{repo} is gated: accept its licence on {endpoint()} and set HF_TOKEN") from error
    if isinstance(error, errors.RevisionNotFoundError):
        raise SourceError(f"{endpoint()} has {repo} but no revision {revision} of it: name another after the @") from error
    if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
        raise SourceError(f"{endpoint()} has no {repo} (or it is private, then set HF_TOKEN)") from error
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        if status == 429 or status >= 500:
            raise Unreachable(f"{endpoint()} answered {status}") from error
        raise SourceError(f"{endpoint()} refused {at} with status {status}: check the name and HF_TOKEN") from error
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
        raise SourceError(f"the hub's cache cannot take {at} ({error.strerror}): set HF_HOME to a folder with space") from error
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    raise Unreachable(f"{endpoint()} gave no answer ({reason})") from error
