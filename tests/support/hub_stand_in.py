"""A local server that answers like HF's hub, with repositories of files in memory."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """The repositories and faults of a hub.

    files: bytes by repository and path. cut: path -> the number of bytes after which the connection
    of each answer closes. wrong: paths whose bytes differ from their hash. endless: paths whose body
    never ends. answer: function that changes the API's description of a repository. gated, down:
    whether every request is answered so. asked: method, path and Range header of each request.
    """

    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    revisions: tuple[str, ...] = ("main", COMMIT)
    cut: dict[str, list[int]] = field(default_factory=dict)
    wrong: set[str] = field(default_factory=set)
    endless: set[str] = field(default_factory=set)
    answer: Callable[[dict], Any] = lambda answer: answer
    gated: bool = False
    down: bool = False
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)
    url: str = ""

    def fetched(self) -> list[str]:
        """Return the paths of the files that clients downloaded."""
        return [path for method, path, _ in self.asked if method == "GET" and not path.startswith("api:")]


def etag_of(path: str, data: bytes) -> str:
    """Return the hub's ETag: the sha256 of a large file (weights), or git's hash of a small one."""
    if path.endswith((".safetensors", ".gguf")):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _sibling(path: str, data: bytes) -> dict:
    sha256 = etag_of(path, data)
    lfs = {"lfs": {"sha256": sha256, "size": len(data), "pointerSize": 134}} if len(sha256) == 64 else {}
    return {"rfilename": path, "size": len(data), "blobId": "0" * 40, **lfs}


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_) -> None:
        pass

    def _answer(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        found = api or file
        hub.asked.append((self.command, file[3] if file else f"api:{path}", self.headers.get("Range")))
        if hub.down:
            return self._refuse(503, "")
        if not found or found[1] not in hub.files:
            return self._refuse(401, "RepoNotFound")
        if hub.gated and self.headers.get("Authorization") != "Bearer right":
            return self._refuse(401, "GatedRepo")
        if (found[2] or "main") not in hub.revisions:
            return self._refuse(404, "RevisionNotFound")
        repository = hub.files[found[1]]
        if api:
            siblings = [_sibling(name, data) for name, data in repository.items()]
            answer = hub.answer({"id": found[1], "sha": COMMIT, "siblings": siblings})
            return self._send(200, json.dumps(answer).encode(), {})
        assert file
        if file[3] not in repository:
            return self._refuse(404, "EntryNotFound")
        data = repository[file[3]]
        etag = etag_of(file[3], data)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}
        if len(etag) == 64:
            headers |= {"X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{etag}"', "Accept-Ranges": "bytes"}
        if file[3] in hub.wrong:
            data = data[::-1]
        if file[3] in hub.endless and self.command == "GET":
            return self._send_endless(headers)
        if (wanted := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))) and self.command == "GET":
            start = int(wanted[1])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            return self._send(206, data[start:], headers, file[3])
        return self._send(200, data, headers, file[3])

    def _send_endless(self, headers: dict[str, str]) -> None:
        """Send chunks until the client closes the connection."""
        self.protocol_version = "HTTP/1.1"
        self.send_response(200)
        for name, value in {"Transfer-Encoding": "chunked", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        piece = bytes(1 << 20)
        self.close_connection = True
        with suppress(OSError):
            while True:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code} if code else {})

    def _send(self, status: int, data: bytes, headers: dict[str, str], path: str = "") -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            cuts = self.hub.cut.get(path)
            self.wfile.write(data[: cuts.pop(0)] if cuts else data)
        self.close_connection = True
