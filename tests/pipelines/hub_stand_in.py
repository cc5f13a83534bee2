"""A stand-in for the hub's HTTP interface: repositories of files in memory, on a port of this machine."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """files: bytes by repository and path. cut: of a path, after how many bytes of an answer the connection is closed, one a
    request. wrong: paths that come with other bytes than their hash says. gated, down: every repository is.
    """

    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    revisions: tuple[str, ...] = ("main", COMMIT)
    cut: dict[str, list[int]] = field(default_factory=dict)
    wrong: set[str] = field(default_factory=set)
    gated: bool = False
    down: bool = False
    # What was asked for: method, path, and the header Range.
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)
    url: str = ""

    def fetched(self) -> list[str]:
        """Paths of files whose bytes were asked for."""
        return [path for method, path, _ in self.asked if method == "GET" and not path.startswith("api:")]


def etag_of(path: str, data: bytes) -> str:
    """Large files, which are weights here, are known by sha256, others by the hash of git's blob."""
    if path.endswith((".safetensors", ".gguf")):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


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
            siblings = [{"rfilename": name, "size": len(data)} for name, data in repository.items()]
            return self._send(200, json.dumps({"id": found[1], "sha": COMMIT, "siblings": siblings}).encode(), {})
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
        if (wanted := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))) and self.command == "GET":
            start = int(wanted[1])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            return self._send(206, data[start:], headers, file[3])
        return self._send(200, data, headers, file[3])

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
