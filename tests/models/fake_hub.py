"""A model hub on loopback with listings, downloads and faults."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """The content of the hub, its faults, and its requests."""

    address: str = ""
    commit: str = COMMIT
    fails_at: str | None = None  # the name of a file that it answers with 503
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    token: str | None = None  # what a private repository asks for
    licence: str | None = None
    corrupt: bool = False
    cut_after: int | None = None  # bytes of the next file sent before the connection ends
    status_after_cut: int | None = None
    download_status: int | None = None
    list_status: int | None = None
    list_body: bytes | None = None
    redirect_to: str | None = None
    ignores_ranges: bool = False
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)

    @property
    def downloads(self) -> list[dict[str, str]]:
        """The headers of each file request, in order."""
        return [headers for path, headers in self.asked if "/resolve/" in path]

    @property
    def ranges(self) -> list[str | None]:
        return [headers.get("range") for headers in self.downloads]


class HubServer(ThreadingHTTPServer):
    def __init__(self, hub: FakeHub) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.hub = hub
        hub.address = f"http://127.0.0.1:{self.server_port}"


class HubHandler(BaseHTTPRequestHandler):
    server: HubServer

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        hub = self.server.hub
        hub.asked.append((path, headers))
        if hub.token is not None and headers.get("authorization") != f"Bearer {hub.token}":
            self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"})  # as if there were none
        elif path.startswith("/api/models/"):
            self._list(path.removeprefix("/api/models/"))
        else:
            repo, _, name = path[1:].partition(f"/resolve/{hub.commit}/")
            self._download(repo, name)

    def _list(self, repo: str) -> None:
        hub = self.server.hub
        if hub.list_status is not None:
            self._send(hub.list_status, b"{}")
        elif hub.list_body is not None:
            self._send(200, hub.list_body)
        elif repo not in hub.repos:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        else:
            self._send(200, json.dumps(_info(hub, repo)).encode())

    def _download(self, repo: str, name: str) -> None:
        hub = self.server.hub
        if name == hub.fails_at:
            self._send(503, b"")
        elif hub.download_status is not None:
            self._send(hub.download_status, b"")
        elif hub.redirect_to is not None:
            location, hub.redirect_to = hub.redirect_to + self.path, None
            self._send(302, b"", {"Location": location})
        else:
            content = hub.repos[repo][name]
            self._send_range(bytes(len(content)) if hub.corrupt else content)

    def _send_range(self, content: bytes) -> None:
        hub, start = self.server.hub, 0
        if (wanted := self.headers.get("Range")) and not hub.ignores_ranges:
            start = int(wanted.removeprefix("bytes=").split("-")[0])
        headers = {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
        cut_after, hub.cut_after = hub.cut_after, None
        if cut_after is not None:
            hub.download_status = hub.status_after_cut
        rest = content[start:]
        self._send(206 if start else 200, rest, headers if start else {}, cut_after=cut_after)

    def _send(
        self,
        status: int,
        body: bytes,
        headers: dict[str, str] | None = None,
        *,
        cut_after: int | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[:cut_after])

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def running_hub() -> Iterator[FakeHub]:
    hub = FakeHub()
    with HubServer(hub) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


def _info(hub: FakeHub, repo: str) -> dict[str, object]:
    return {
        "id": repo,
        "sha": hub.commit,
        "tags": ["gguf", f"license:{hub.licence}"] if hub.licence else ["gguf"],
        "siblings": [_sibling(name, content) for name, content in hub.repos[repo].items()],
    }


def _sibling(name: str, content: bytes) -> dict[str, object]:
    if not name.endswith((".gguf", ".safetensors")):
        return {"rfilename": name, "size": len(content)}
    digest = sha256(content).hexdigest()
    lfs = {"size": len(content), "sha256": digest, "pointerSize": 134}
    return {"rfilename": name, "size": len(content), "lfs": lfs}
