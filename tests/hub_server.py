"""A small model and data hub on loopback, for the real ``huggingface_hub`` client pointed at it by HF_ENDPOINT.

It serves the four routes that the client uses (repository at a revision, file tree, HEAD and GET of one file, ranges included)
with the headers the client reads (ETag, X-Repo-Commit, X-Error-Code), and keeps a log of what was asked. It can also misbehave.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

_API = re.compile(
    r"/api/(?P<kind>models|datasets)/(?P<repo>[^/]+/[^/]+)(/(?P<what>revision|tree)/(?P<revision>[^/?]+)(/(?P<folder>.+))?)?/?"
)
_FILE = re.compile(r"/(?P<kind>datasets/)?(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<name>.+)")


@dataclass
class Repository:
    """Files by commit, and commits by branch. ``revisions[commit][name]`` is the bytes of a file."""

    revisions: Mapping[str, Mapping[str, bytes]]
    branches: Mapping[str, str]
    gated: bool = False


@dataclass
class HubServer:
    """Use as a context manager; ``url`` is the endpoint, ``log`` the requests as 'METHOD path'.

    ``status`` makes every answer that HTTP status; ``hangs`` makes every request wait until the server stops; ``claims`` is
    the commit that the repository route answers with instead of the true one.
    """

    repositories: Mapping[str, Repository]
    status: int | None = None
    hangs: bool = False
    claims: str | None = None
    log: list[str] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> HubServer:
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        server.daemon_threads = True
        self._server = server
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"


def blob_id(data: bytes) -> str:
    """Git's hash of a file, which the hub uses as its ETag."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _tree(files: Mapping[str, bytes], folder: str | None, recursive: bool) -> list[dict[str, Any]]:
    """The entries below ``folder`` (default: the root), folders included; only the direct ones unless ``recursive``."""
    prefix = f"{folder}/" if folder else ""
    inside = sorted(name for name in files if name.startswith(prefix))
    parents = {str(parent) for name in inside for parent in PurePosixPath(name).parents}
    entries = [{"type": "file", "path": n, "size": len(files[n]), "oid": blob_id(files[n])} for n in inside]
    entries += [{"type": "directory", "path": p, "oid": blob_id(p.encode())} for p in sorted(parents) if p.startswith(prefix)]
    entries = [entry for entry in entries if entry["path"] != "."]
    return [entry for entry in entries if recursive or "/" not in str(entry["path"]).removeprefix(prefix)]


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing to standard error: the log is in the server."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.log.append(f"{self.command} {path}")
        if self.hub.hangs:
            self.hub.stopped.wait(60)
            self.close_connection = True
        elif self.hub.status is not None:
            self._answer(self.hub.status, b"{}")
        elif match := _API.fullmatch(path):
            self._api(match)
        elif match := _FILE.fullmatch(path):
            self._file(match)
        else:
            self._answer(404, b"{}")

    def _find(self, match: re.Match[str]) -> tuple[str, Mapping[str, bytes]] | None:
        """(commit, files), or None after an error has been answered."""
        prefix = "datasets/" if (match["kind"] or "").startswith("datasets") else ""
        repository = self.hub.repositories.get(prefix + match["repo"])
        if repository is None:
            self._answer(401, b"{}", {"X-Error-Code": "RepoNotFound"})
            return None
        if repository.gated:
            self._answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
            return None
        revision = match["revision"] or "main"
        commit = repository.branches.get(revision, revision)
        if commit not in repository.revisions:
            self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return None
        return commit, repository.revisions[commit]

    def _api(self, match: re.Match[str]) -> None:
        found = self._find(match)
        if found is None:
            return
        commit, files = found
        if match["what"] == "tree":
            recursive = parse_qs(urlsplit(self.path).query).get("recursive", ["false"])[0].casefold() == "true"
            self._answer(200, json.dumps(_tree(files, match["folder"], recursive)).encode())
            return
        siblings = [{"rfilename": n, "size": len(d), "blobId": blob_id(d)} for n, d in sorted(files.items())]
        info = {"id": match["repo"], "sha": self.hub.claims or commit, "siblings": siblings, "tags": [], "private": False}
        self._answer(200, json.dumps(info).encode())

    def _file(self, match: re.Match[str]) -> None:
        found = self._find(match)
        if found is None:
            return
        commit, files = found
        data = files.get(match["name"])
        if data is None:
            self._answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        headers = {"ETag": f'"{blob_id(data)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if part := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, stop = int(part[1]), min(int(part[2] or len(data) - 1) + 1, len(data))
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
            self._answer(206, data[start:stop], headers)
        else:
            self._answer(200, data, headers)

    def _answer(self, status: int, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
