"""A small HTTP server that answers as the Hugging Face hub does, with files that it makes up."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = 100_000
"""Files of this size and more are kept apart, as LFS does it, under their SHA-256."""


@dataclass
class Repository:
    files: dict[str, bytes]
    gated: bool = False
    private: bool = False
    config: dict[str, object] = field(default_factory=dict)


class FakeHub:
    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.token = "hf_right"
        self.requests: list[tuple[str, str, str]] = []
        """Method, path and range of each request."""
        self.break_after: int | None = None
        """Bytes of a large file after which the connection ends, as often as it is asked for."""
        self.requested = threading.Event()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments: object) -> None:
                pass

            def do_HEAD(self) -> None:
                hub.answer(self)

            do_GET = do_HEAD

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.partition("?")[0]
        self.requests.append((request.command, path, request.headers.get("Range", "")))
        self.requested.set()
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            parts = parts[2:]
        name = "/".join(parts[:2])
        repository = self.repositories.get(name)
        bearer = request.headers.get("authorization", "")
        if bearer and bearer != f"Bearer {self.token}":
            _send(request, 401, {"X-Error-Message": "Invalid credentials in Authorization header"})
        elif repository is None or (repository.private and not bearer):
            code = 404 if bearer else 401
            _send(request, code, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        elif "resolve" in parts and repository.gated:
            _send(request, 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"})
        elif "resolve" not in parts:
            revision = parts[3] if len(parts) > 3 else "main"
            if revision not in ("main", COMMIT):
                _send(request, 404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"})
            elif repository.gated and not bearer:
                _send(request, 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"})
            else:
                _send(request, 200, {"Content-Type": "application/json"}, self._info(name, repository))
        else:
            self._file(request, repository, "/".join(parts[4:]))

    def _info(self, name: str, repository: Repository) -> bytes:
        siblings = []
        for file, data in repository.files.items():
            sibling: dict[str, object] = {"rfilename": file, "size": len(data), "blobId": _git(data)}
            if len(data) >= LARGE:
                sibling["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
            siblings.append(sibling)
        info = {"_id": "1", "id": name, "modelId": name, "sha": COMMIT, "siblings": siblings, "tags": []}
        info |= {"config": repository.config, "cardData": {"license": "apache-2.0"}}
        return json.dumps(info).encode()

    def _file(self, request: BaseHTTPRequestHandler, repository: Repository, file: str) -> None:
        data = repository.files.get(file)
        if data is None:
            _send(request, 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            return
        large = len(data) >= LARGE
        etag = hashlib.sha256(data).hexdigest() if large else _git(data)
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"', "X-Linked-Size": str(len(data))}
        begin, code = 0, 200
        if wanted := request.headers.get("Range"):
            begin, code = int(wanted.removeprefix("bytes=").split("-")[0]), 206
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        cut = self.break_after if large and request.command == "GET" else None
        _send(request, code, headers, data[begin:], cut)


def _git(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _send(
    request: BaseHTTPRequestHandler, code: int, headers: dict[str, str], body: bytes = b"", cut: int | None = None
) -> None:
    """``cut``: after so many bytes the connection ends, though more were promised."""
    request.send_response(code)
    for name, value in headers.items():
        request.send_header(name, value)
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    if request.command == "GET":
        request.wfile.write(body[:cut])
        request.wfile.flush()
    if cut is not None and cut < len(body):
        request.close_connection = True
        request.connection.close()
