"""A server on this machine that speaks the part of the Hugging Face hub's API that downloading a file needs."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """What the server has, how it behaves, and what it was asked for."""

    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """By repository and file name."""
    mood: str = "well"
    """well, hangs, garbage (a web page whatever is asked for), headless (no hub headers), broken (status 503), gated."""
    asked: list[tuple[str, str]] = field(default_factory=list)
    """(HEAD or GET, path)."""
    tokens: list[str] = field(default_factory=list)
    url: str = ""
    stopped: threading.Event = field(default_factory=threading.Event)

    def add(self, repository: str, name: str, content: Any) -> None:
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.files.setdefault(repository, {})[name] = raw

    def downloaded(self) -> list[str]:
        """The files that were fetched (the client also asks the API about itself)."""
        fetched = [path for method, path in self.asked if method == "GET" and "/resolve/" in path]
        return [path.split("/resolve/")[1].partition("/")[2] for path in fetched]


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _send(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def _answer(self) -> None:
            hub.asked.append((self.command, self.path))
            if token := self.headers.get("Authorization"):
                hub.tokens.append(token)
            if hub.mood == "hangs":
                hub.stopped.wait(60)
                return
            if hub.mood == "garbage":
                return self._send(200, b"<html>a login page</html>", ETag='"page"', X_Repo_Commit=COMMIT)
            if hub.mood == "broken":
                return self._send(503)
            if hub.mood == "gated":
                return self._send(403, X_Error_Code="GatedRepo", X_Repo_Commit=COMMIT)
            repository, _, rest = self.path.lstrip("/").partition("/resolve/")
            revision, _, name = rest.partition("/")
            if repository not in hub.files:
                return self._send(404, X_Error_Code="RepoNotFound")
            if revision not in ("main", "v1", COMMIT):
                return self._send(404, X_Error_Code="RevisionNotFound")
            if (body := hub.files[repository].get(name)) is None:
                return self._send(404, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
            if hub.mood == "headless":
                return self._send(200, body)
            return self._send(200, body, ETag=f'"{hashlib.sha1(body).hexdigest()}"', X_Repo_Commit=COMMIT)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    worker = threading.Thread(target=server.serve_forever, daemon=True)
    worker.start()
    try:
        yield hub
    finally:
        hub.stopped.set()
        server.shutdown()
        server.server_close()
