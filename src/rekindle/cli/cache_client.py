"""The cache of a running server, over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from rekindle.errors import RekindleError

PAGE_ENTRIES = 1000  # the most that a server gives at a time
TIMEOUT = httpx.Timeout(120, connect=5)

Json = dict[str, Any]


class NoServer(RekindleError):
    """Nothing answers there, or something that is not a Rekindle server."""


class RequestRefused(RekindleError):
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

    def export(self, key: str, path: Path) -> int:
        """Write the state of an entry into a file; how many tokens it is of."""
        with self._asking("GET", f"/cache/{quote(key, safe='')}/export") as answer:
            if not answer.is_success:
                answer.read()
                self._read(answer)
            part = path.with_name(path.name + ".part")
            try:
                with part.open("wb") as file:
                    for content in answer.iter_bytes():
                        file.write(content)
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)
            return int(answer.headers.get("x-token-count", 0))

    def import_state(self, parts: Iterator[bytes], **query: str | None) -> Json:
        """Have a server keep the state in a file as one's own."""
        given = {name: value for name, value in query.items() if value is not None}
        with self._asking("POST", "/cache/import", content=parts, params=given) as answer:
            answer.read()
            return self._read(answer)

    def tokenize(self, prompt: str, model: str | None) -> list[int]:
        """The tokens of a prompt, as mlx_lm.cache_prompt makes them."""
        known = {} if model is None else {"model": model}
        message = {"role": "user", "content": prompt}
        chat = {"messages": [message], "continue_final_message": True, **known}
        try:
            found = self._send("POST", "/tokenize", chat)
        except RequestRefused:  # a model without a template
            found = self._send("POST", "/tokenize", {"prompt": prompt, **known})
        tokens: list[int] = found["tokens"]
        return tokens

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
        with self._asking(method, path, json=body) as answer:
            answer.read()
            return self._read(answer)

    @contextmanager
    def _asking(self, method: str, path: str, **request: Any) -> Iterator[httpx.Response]:
        headers = dict(self._headers)
        if "content" in request:
            headers["Content-Type"] = "application/octet-stream"
        try:
            with (
                httpx.Client(timeout=TIMEOUT, transport=self._transport) as client,
                client.stream(method, self._base_url + path, headers=headers, **request) as answer,
            ):
                yield answer
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise NoServer(
                f"no server answers at {self._base_url} ({error}): start one with "
                "`rekindle serve`, or say where it is with --base-url"
            ) from None

    def _read(self, answer: httpx.Response) -> Json:
        try:
            content = answer.json()
        except ValueError:
            content = None
        match content:
            case {"error": {"message": str() as message}}:
                hint = " (with --api-key here)" if answer.status_code == 401 else ""
                raise RequestRefused(message + hint)
            case dict() if answer.is_success:
                return dict(content)
        raise NoServer(f"what answers at {self._base_url} is no Rekindle server, or an older one")


# ----------------------------------------------------------------------
# A prompt cache of mlx_lm's on its way to a server, with the tokens that its state is of.

SUFFIX = ".safetensors"
TOKENS = "0.rekindle_tokens"  # in the header's metadata; 0 is what mlx_lm calls metadata
_METADATA = "__metadata__"
_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 32 << 20
_PART_BYTES = 1 << 20


class PromptCacheFile:
    """A safetensors file as it is, but for the tokens in its header. Raises RekindleError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
                header = file.read(length) if length <= _MOST_HEADER_BYTES else b""
        except OSError as error:
            raise RekindleError(f"cannot read {path}: {error.strerror}") from None
        self._data_start = _LENGTH_BYTES + length
        try:
            self._header: dict[str, Any] = json.loads(header)
            self._metadata: dict[str, str] = self._header.setdefault(_METADATA, {})
            self.has_tokens = TOKENS in self._metadata
        except (ValueError, RecursionError, AttributeError, TypeError):
            raise RekindleError(f"{path} is no safetensors file") from None

    def name_tokens(self, tokens: list[int]) -> None:
        self._metadata[TOKENS] = json.dumps(tokens)

    def parts(self) -> Iterator[bytes]:
        """The file with its header as it is now."""
        header = json.dumps(self._header).encode()
        yield len(header).to_bytes(_LENGTH_BYTES, "little") + header
        with self._path.open("rb") as file:
            file.seek(self._data_start)
            while part := file.read(_PART_BYTES):
                yield part


def read_tokens(path: Path) -> list[int]:
    """A JSON list of token ids; raises RekindleError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RekindleError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise RekindleError(f"{path} is not JSON") from None
    if not isinstance(found, list) or not all(type(each) is int for each in found):
        raise RekindleError(f"{path} holds no list of token ids")
    return found
