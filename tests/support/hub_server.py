"""A model hub on loopback: answers huggingface_hub as the real one does, or with faults on demand.

    with HubServer() as hub:
        repository = hub.add("org/name", {"config.json": b"{}", "model.safetensors": weights})
        hub.fault("model.safetensors", Fault.cut(after=1000), times=2)
        ...  # HF_ENDPOINT=hub.url

Served: `/api/models/ID`, `/api/models/ID/revision/REV` (with `?blobs=true`), `/api/models/ID/tree/REV`, HEAD and GET of
`/ID/resolve/REV/FILE` with ranges. Files of LFS are redirected to another host name, as to a CDN, which must never be
shown the token. Everything that is asked is kept in `requests`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

_LFS_SUFFIXES = (".safetensors", ".bin", ".model")
_CHUNK = 16 * 1024
_STALL_S = 120.0
"""Longer than any client waits; the server's end wakes a stalled transfer."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong in one answer. `after`: bytes of the body that are sent before."""

    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    after: int | None = None
    stalls: bool = False
    is_corrupt: bool = False
    chunk: int = _CHUNK
    pause_s: float = 0.0
    claimed_size: int | None = None

    @classmethod
    def answer(cls, status: int, **headers: str) -> Fault:
        """An error instead of an answer; `Retry_After="1"` becomes the header Retry-After."""
        return cls(status=status, headers={name.replace("_", "-"): value for name, value in headers.items()})

    @classmethod
    def cut(cls, after: int) -> Fault:
        """The connection is closed early."""
        return cls(after=after)

    @classmethod
    def stall(cls, after: int) -> Fault:
        """Nothing more comes, and nothing is closed."""
        return cls(after=after, stalls=True)

    @classmethod
    def corrupt(cls) -> Fault:
        """The right number of wrong bytes."""
        return cls(is_corrupt=True)

    @classmethod
    def drip(cls, chunk: int, pause_s: float) -> Fault:
        """Right, but slow."""
        return cls(chunk=chunk, pause_s=pause_s)

    @classmethod
    def claim(cls, size: int) -> Fault:
        """A file that says it is larger than it is."""
        return cls(claimed_size=size)


@dataclass
class Request:
    """What a client asked, and how many bytes of body were sent to it so far."""

    method: str
    path: str
    token: str | None
    range: str | None
    host: str
    sent: int = 0


@dataclass
class Repository:
    """`commits`: files by commit; `refs`: branches and tags. `readers`: tokens that may read; None: everybody may."""

    id: str
    commits: dict[str, dict[str, bytes]]
    refs: dict[str, str]
    is_gated: bool = False
    is_private: bool = False
    readers: frozenset[str] = frozenset()

    def commit(self, files: Mapping[str, bytes], *refs: str) -> str:
        """A new commit with these files; `refs` (default: main) point to it."""
        seed = json.dumps([self.id, len(self.commits), sorted(files)]).encode()
        sha = hashlib.sha1(seed).hexdigest()
        self.commits[sha] = dict(files)
        self.refs.update(dict.fromkeys(refs or ("main",), sha))
        return sha

    def files(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        sha = self.refs.get(revision, revision)
        return (sha, self.commits[sha]) if sha in self.commits else None


def is_lfs(name: str, data: bytes) -> bool:
    return name.endswith(_LFS_SUFFIXES) or len(data) > 2**20


def etag(name: str, data: bytes) -> str:
    """sha256 of a file in LFS, else git's name of the blob."""
    if is_lfs(name, data):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class HubServer:
    """A context manager; `url` is what HF_ENDPOINT must be."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.tokens: set[str] = set()
        self.requests: list[Request] = []
        self.ended = threading.Event()
        self._faults: dict[str, list[Fault]] = {}
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.hub = self

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()

    def add(self, model_id: str, files: Mapping[str, bytes], **settings: Any) -> Repository:
        repository = Repository(model_id, {}, {}, **settings)
        repository.commit(files)
        self.repositories[model_id] = repository
        self.tokens |= repository.readers
        return repository

    def fault(self, place: str, fault: Fault, *, times: int = 1) -> None:
        """The next `times` transfers of a file, or requests for metadata, go wrong.

        `place`: the end of a path; `/api/models/org/name` for listings, `config.json#head` for HEAD requests.
        """
        with self._lock:
            self._faults.setdefault(place, []).extend([fault] * times)

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """For a process that is to use this hub and no other, and a cache below `home`."""
        return {
            "HF_ENDPOINT": self.url, "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1,localhost",
            "HF_HOME": str(home), "HF_HUB_CACHE": str(home / "hub"), "HF_HUB_DISABLE_TELEMETRY": "1",
            **dict.fromkeys(("HF_TOKEN", "HF_API_TOKEN", "HUGGING_FACE_HUB_TOKEN"), ""), **more,
        }  # fmt: skip

    def sent(self, name: str) -> int:
        """Bytes of a file that were sent in all."""
        with self._lock:
            return sum(r.sent for r in self.requests if r.method == "GET" and r.path.endswith("/" + name))

    def gets(self, name: str) -> list[Request]:
        """Transfers of a file, redirections apart."""
        with self._lock:
            kept = [r for r in self.requests if r.method == "GET" and r.path.startswith("/")]
            return [r for r in kept if r.path.endswith("/" + name)]

    def take_fault(self, place: str) -> Fault | None:
        with self._lock:
            waiting = next((faults for key, faults in self._faults.items() if faults and place.endswith(key)), None)
            return waiting.pop(0) if waiting else None

    def note(self, request: Request) -> None:
        with self._lock:
            self.requests.append(request)


class _Server(ThreadingHTTPServer):
    hub: HubServer
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go away are part of the tests."""


class _Refusal(Exception):
    def __init__(self, status: int, code: str = "", message: str = "", **headers: str) -> None:
        self.status = status
        self.headers = {"X-Error-Code": code, "X-Error-Message": message, **headers}


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        try:
            if path.startswith("/cdn/"):
                _, _, model_id, sha, name = path.split("/", 4)
                self._send_file(path, name, self.server.hub.repositories[unquote(unquote(model_id))].commits[sha][name])
            elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/(.+))?", path):
                self._send_listing(path, match[1], match[2], match[3] or "main")
            elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", urlsplit(self.path).path):
                self._resolve(path, match[1], unquote(match[2]), unquote(match[3]))
            else:
                raise _Refusal(404)
        except _Refusal as refusal:
            self._note(path)
            self._send(refusal.status, b'{"error": "refused"}', refusal.headers)

    def _token(self) -> str | None:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None

    def _readable(self, model_id: str, revision: str, *, content: bool) -> tuple[Repository, str, dict[str, bytes]]:
        hub, token = self.server.hub, self._token()
        if token is not None and token not in hub.tokens:
            raise _Refusal(401, "", "Invalid credentials in Authorization header")
        repository = hub.repositories.get(model_id)
        if repository is None or (repository.is_private and token not in repository.readers):
            raise _Refusal(401 if token is None else 404, "RepoNotFound", "Repository not found")
        if content and repository.is_gated and token not in repository.readers:
            raise _Refusal(401 if token is None else 403, "GatedRepo", "Access to this model is restricted.")
        found = repository.files(revision)
        if found is None:
            raise _Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return repository, *found

    def _send_listing(self, path: str, model_id: str, kind: str | None, revision: str) -> None:
        self._fail_if_told(path)
        _, sha, files = self._readable(model_id, revision, content=False)
        if kind == "tree":
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": etag(name, data)}
                for name, data in files.items()
            ]
            body = json.dumps(tree).encode()
        else:
            with_sizes = "blobs" in parse_qs(urlsplit(self.path).query)
            siblings = [self._sibling(name, data, with_sizes) for name, data in sorted(files.items())]
            body = json.dumps({"id": model_id, "sha": sha, "siblings": siblings}).encode()
        self._note(path, len(body))
        self._send(200, body, {"Content-Type": "application/json"})

    def _sibling(self, name: str, data: bytes, with_sizes: bool) -> dict[str, Any]:
        if not with_sizes:
            return {"rfilename": name}
        claim = next((f for f in self.server.hub._faults.get(name, []) if f.claimed_size is not None), None)
        size = len(data) if claim is None else claim.claimed_size
        sibling: dict[str, Any] = {"rfilename": name, "size": size, "blobId": hashlib.sha1(data).hexdigest()}
        if is_lfs(name, data):
            sibling["lfs"] = {"sha256": etag(name, data), "size": size, "pointerSize": 135}
        return sibling

    def _resolve(self, path: str, model_id: str, revision: str, name: str) -> None:
        if self.command == "HEAD":
            self._fail_if_told(f"{path}#head")
        _, sha, files = self._readable(model_id, revision, content=True)
        if name not in files:
            raise _Refusal(404, "EntryNotFound", "Entry not found", **{"X-Repo-Commit": sha})
        data = files[name]
        headers = {"X-Repo-Commit": sha, "ETag": f'"{etag(name, data)}"', "Accept-Ranges": "bytes"}
        if is_lfs(name, data):
            headers |= {"X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{etag(name, data)}"'}
            model = quote(quote(model_id, safe=""), safe="")
            port = self.server.hub.port
            headers["Location"] = f"http://localhost:{port}/cdn/{model}/{sha}/{quote(name)}"
            self._note(f"redirected {path}")
            self._send(302, b"", headers)
        else:
            self._send_file(path, name, data, headers)

    def _send_file(self, path: str, name: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        headers = {"Accept-Ranges": "bytes", **(headers or {})}
        if self.command == "HEAD":
            self._note(path)
            self._send(200, b"", {**headers, "Content-Length": str(len(data))})
            return
        fault = self.server.hub.take_fault(f"/{name}") or Fault()
        if fault.status is not None:
            raise _Refusal(fault.status, **dict(fault.headers))
        start, asked = 0, re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        status = 200
        if asked:
            start, status = int(asked[1]), 206
            if start >= len(data):
                raise _Refusal(416, **{"Content-Range": f"bytes */{len(data)}"})
            headers = {**headers, "Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
        body = bytes(byte ^ 0xFF for byte in data[start:]) if fault.is_corrupt else data[start:]
        with contextlib.suppress(OSError):
            self._send_body(path, status, headers, body, fault)

    def _send_body(self, path: str, status: int, headers: Mapping[str, str], body: bytes, fault: Fault) -> None:
        request = self._note(path)
        self._send(status, None, {**headers, "Content-Length": str(len(body))})
        for piece in _pieces(body if fault.after is None else body[: fault.after], fault.chunk):
            request.sent += len(piece)
            self.wfile.write(piece)
            if fault.pause_s and self.server.hub.ended.wait(fault.pause_s):
                return
        if fault.stalls:
            self.server.hub.ended.wait(_STALL_S)
        if fault.after is not None:
            self.close_connection = True

    def _fail_if_told(self, place: str) -> None:
        fault = self.server.hub.take_fault(place)
        if fault is not None and fault.stalls:
            self.server.hub.ended.wait(_STALL_S)
        if fault is not None and fault.status is not None:
            raise _Refusal(fault.status, **dict(fault.headers))

    def _note(self, path: str, sent: int = 0) -> Request:
        host = self.headers.get("Host") or ""
        request = Request(self.command, path, self._token(), self.headers.get("Range"), host, sent)
        self.server.hub.note(request)
        return request

    def _send(self, status: int, body: bytes | None, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if value:
                self.send_header(name, value)
        if body is not None and "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if body and self.command != "HEAD":
            self.wfile.write(body)


def _pieces(data: bytes, size: int) -> Iterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


def wait_until(condition: Any, what: str, limit_s: float = 60.0) -> None:
    """Raises AssertionError if `condition()` does not become true in time."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {limit_s:g} s: {what}")
        time.sleep(0.02)
