"""Reads and changes the cache of a running server over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from rekindle.errors import RekindleError

SUFFIX = ".safetensors"
TOKENS = "0.rekindle_tokens"  # key in the file's metadata; mlx_lm gives its metadata the prefix 0
MAX_HEADER_BYTES = 32 << 20

Json = dict[str, Any]


class NoServer(RekindleError):
    """No server answers, or it is not a Rekindle server."""


class RequestRefused(RekindleError):
    """The server answered with an error."""


class UnknownKey(RekindleError):
    """No entry or several entries have a key with this prefix."""


class CacheClient:
    def __init__(
        self, base_url: str, api_key: str | None, transport: httpx.BaseTransport | None = None
    ) -> None:
        self._base_url = base_url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._transport = transport

    def listing(self) -> Json:
        """Return all entries, which are read page by page."""
        first_page = "/cache?limit=1000"  # the server's maximum
        page = self._send("GET", first_page)
        entries: list[Json] = page["entries"]
        while page.get("has_more"):
            page = self._send("GET", f"{first_page}&after={quote(page['next'])}")
            entries += page["entries"]
        return {"entries": entries, "count": len(entries)}

    def stats(self) -> Json:
        return self._send("GET", "/cache/stats")

    def entry(self, key: str) -> Json:
        return self._send("GET", _path(key))

    def pin(self, key: str) -> Json:
        return self._send("POST", _path(key) + "/pin", {})

    def unpin(self, key: str) -> Json:
        return self._send("POST", _path(key) + "/unpin", {})

    def remove(self, key: str) -> Json:
        return self._send("DELETE", _path(key))

    def collect(self) -> Json:
        return self._send("POST", "/cache/gc", {})

    def validate(self, request: Json) -> Json:
        return self._send("POST", "/cache/validate", request)

    def export(self, key: str, path: Path) -> int:
        """Write the state of an entry into a file, and return its number of tokens."""
        with self._request("GET", _path(key) + "/export") as answer:
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
        """Upload the state in a file as a new entry."""
        given = {name: value for name, value in query.items() if value is not None}
        with self._request("POST", "/cache/import", content=parts, params=given) as answer:
            answer.read()
            return self._read(answer)

    def tokenize(self, prompt: str, model: str | None) -> list[int]:
        """Tokenise a prompt as mlx_lm.cache_prompt does."""
        known = {} if model is None else {"model": model}
        message = {"role": "user", "content": prompt}
        chat = {"messages": [message], "continue_final_message": True, **known}
        try:
            found = self._send("POST", "/tokenize", chat)
        except RequestRefused:  # the model has no chat template
            found = self._send("POST", "/tokenize", {"prompt": prompt, **known})
        tokens: list[int] = found["tokens"]
        return tokens

    def find(self, prefix: str) -> Json:
        """Return the only entry whose key has this prefix. Raises UnknownKey."""
        entries: list[Json] = self.listing()["entries"]
        found = [entry for entry in entries if entry["cache_key"].startswith(prefix)]
        exact = [entry for entry in found if entry["cache_key"] == prefix]
        match exact or found:
            case [only]:
                return only
            case []:
                raise UnknownKey(
                    f"no cache key begins with {prefix!r}; `rekindle cache ls` lists them"
                )
            case several:
                keys = ", ".join(entry["cache_key"] for entry in several)
                raise UnknownKey(f"{prefix!r} matches several keys, type more of it: {keys}")

    def _send(self, method: str, path: str, body: Json | None = None) -> Json:
        with self._request(method, path, json=body) as answer:
            answer.read()
            return self._read(answer)

    @contextmanager
    def _request(self, method: str, path: str, **options: Any) -> Iterator[httpx.Response]:
        headers, timeout = dict(self._headers), httpx.Timeout(120, connect=5)
        if "content" in options:
            headers["Content-Type"] = "application/octet-stream"
        try:
            with (
                httpx.Client(timeout=timeout, transport=self._transport) as client,
                client.stream(method, self._base_url + path, headers=headers, **options) as answer,
            ):
                yield answer
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise NoServer(
                f"no server answers at {self._base_url} ({error}): start one with "
                "`rekindle serve`, or give its URL with --base-url"
            ) from None

    def _read(self, answer: httpx.Response) -> Json:
        try:
            content = answer.json()
        except ValueError:
            content = None
        match content:
            case {"error": {"message": str() as message}}:
                hint = " (use --api-key here)" if answer.status_code == 401 else ""
                raise RequestRefused(message + hint)
            case dict() if answer.is_success:
                return dict(content)
        raise NoServer(
            f"the server at {self._base_url} is not a Rekindle server, or an older version"
        )


def _path(key: str) -> str:
    return f"/cache/{quote(key, safe='')}"


class PromptCacheFile:
    """A prompt cache of mlx_lm, a safetensors file whose header can be given token ids.

    Raises RekindleError if the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                self._data_start = file.tell() + length
                header = file.read(length) if length <= MAX_HEADER_BYTES else b""
        except OSError as error:
            raise RekindleError(f"cannot read {path}: {error.strerror}") from None
        try:
            self._header: dict[str, Any] = json.loads(header)
            self._metadata: dict[str, str] = self._header.setdefault("__metadata__", {})
            self.has_tokens = TOKENS in self._metadata
        except (ValueError, RecursionError, AttributeError, TypeError):
            raise RekindleError(f"{path} is not a safetensors file") from None

    def name_tokens(self, tokens: list[int]) -> None:
        self._metadata[TOKENS] = json.dumps(tokens)

    def parts(self) -> Iterator[bytes]:
        """Yield the content of the file with the current header."""
        header = json.dumps(self._header).encode()
        yield len(header).to_bytes(8, "little") + header
        with self._path.open("rb") as file:
            file.seek(self._data_start)
            while part := file.read(1 << 20):
                yield part


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RekindleError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise RekindleError(f"{path} is not UTF-8 text") from None


def read_json(path: Path) -> Any:
    try:
        return json.loads(read_text(path))
    except (ValueError, RecursionError):
        raise RekindleError(f"{path} is not JSON") from None


def read_tokens(path: Path) -> list[int]:
    found = read_json(path)
    if not isinstance(found, list) or not all(type(each) is int for each in found):
        raise RekindleError(f"{path} must contain a JSON list of token ids")
    return found
