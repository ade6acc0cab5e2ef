"""The cache of a running server, over HTTP."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import httpx

from rekindle.errors import RekindleError

PAGE_ENTRIES = 1000  # the most that a server gives at a time
TIMEOUT = httpx.Timeout(120, connect=5)

Json = dict[str, Any]


class NoServer(RekindleError):
    """Nothing answers there, or something that is not a Rekindle server."""


class Refused(RekindleError):
    """The server answered with an error."""


class UnknownKey(RekindleError):
    """No entry, or more than one, has a key that begins so."""


class CacheClient:
    def __init__(
        self, base_url: str, api_key: str | None, transport: httpx.BaseTransport | None = None
    ) -> None:
        self._base_url = base_url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._transport = transport

    def listing(self) -> Json:
        """All entries, read page by page."""
        page = self._send("GET", f"/cache?limit={PAGE_ENTRIES}")
        entries: list[Json] = page["entries"]
        while page.get("has_more"):
            page = self._send("GET", f"/cache?limit={PAGE_ENTRIES}&after={quote(page['next'])}")
            entries += page["entries"]
        return {"entries": entries, "count": len(entries)}

    def stats(self) -> Json:
        return self._send("GET", "/cache/stats")

    def entry(self, key: str) -> Json:
        return self._send("GET", f"/cache/{quote(key, safe='')}")

    def pin(self, key: str) -> Json:
        return self._send("POST", f"/cache/{quote(key, safe='')}/pin", {})

    def unpin(self, key: str) -> Json:
        return self._send("POST", f"/cache/{quote(key, safe='')}/unpin", {})

    def remove(self, key: str) -> Json:
        return self._send("DELETE", f"/cache/{quote(key, safe='')}")

    def collect(self) -> Json:
        return self._send("POST", "/cache/gc", {})

    def validate(self, request: Json) -> Json:
        return self._send("POST", "/cache/validate", request)

    def find(self, prefix: str) -> Json:
        """The one entry whose key begins so; raises UnknownKey."""
        entries: list[Json] = self.listing()["entries"]
        found = [entry for entry in entries if entry["cache_key"].startswith(prefix)]
        exact = [entry for entry in found if entry["cache_key"] == prefix]
        match exact or found:
            case [only]:
                return only
            case []:
                raise UnknownKey(f"no entry has a key that begins with {prefix!r}")
            case several:
                keys = ", ".join(entry["cache_key"] for entry in several)
                raise UnknownKey(f"{prefix!r} may mean any of {keys}: write more of it")

    def _send(self, method: str, path: str, body: Json | None = None) -> Json:
        try:
            with httpx.Client(timeout=TIMEOUT, transport=self._transport) as client:
                answer = client.request(
                    method, self._base_url + path, json=body, headers=self._headers
                )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise NoServer(
                f"no server answers at {self._base_url} ({error}): start one with "
                "`rekindle serve`, or say where it is with --base-url"
            ) from None
        return self._read(answer)

    def _read(self, answer: httpx.Response) -> Json:
        try:
            content = answer.json()
        except ValueError:
            content = None
        match content:
            case {"error": {"message": str() as message}}:
                hint = " (with --api-key here)" if answer.status_code == 401 else ""
                raise Refused(message + hint)
            case dict() if answer.is_success:
                return dict(content)
        raise NoServer(f"what answers at {self._base_url} is no Rekindle server, or an older one")
