"""Reads and changes the cache of a running server over HTTP."""

from __future__ import annotations

import json
import re
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
ERRNO = re.compile(r"^\[Errno -?\d+\] ")  # how the messages of OSErrors begin

#: Kinds of names that the server accepts in place of a key.
NAME_KINDS = ("project", "message_id", "session_id", "kv_cache_session_id")

Json = dict[str, Any]


class NoServer(RekindleError):
    """No server answers at this URL."""

    def __init__(self, base_url: str, problem: Exception) -> None:
        self.reason = ERRNO.sub("", str(problem)).rstrip(".")
        super().__init__(
            f"no server answers at {base_url} ({self.reason}). Start one with `rekindle serve` in "
            "another terminal, or give the URL of a running one with --base-url."
        )


class RequestRefused(RekindleError):
    """The server answered with an error."""


def check_url(base_url: str) -> None:
    """Raise RekindleError unless this is the URL of a server."""
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL:
        url = httpx.URL()
    if url.scheme not in ("http", "https") or not url.host:
        raise RekindleError(
            f"--base-url: {base_url!r} is not the URL of a server. Give one such as "
            "http://127.0.0.1:8080/v1."
        )


def key_problem(base_url: str, api_key: str | None) -> str:
    """Say why a server refuses a key: it has to be given, or it is wrong."""
    if api_key:
        return f"the server at {base_url} does not know this API key. Check --api-key."
    return f"the server at {base_url} needs an API key. Give --api-key, or set REKINDLE_API_KEY."


@contextmanager
def connect(
    base_url: str,
    api_key: str | None,
    timeout: httpx.Timeout,
    transport: httpx.BaseTransport | None,
) -> Iterator[httpx.Client]:
    """Open a client. Raises NoServer, or RekindleError if this is not the URL of a server."""
    check_url(base_url)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with httpx.Client(headers=headers, timeout=timeout, transport=transport) as client:
            yield client
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise NoServer(base_url, error) from None


class CacheClient:
    def __init__(
        self,
        base_url: str,
        api_key: str | None,
        transport: httpx.BaseTransport | None = None,
        *,
        timeout_s: float = 120.0,
    ) -> None:
        self._base_url = base_url.rstrip("/")
        self._api_key = api_key
        self._transport = transport
        self._timeout = httpx.Timeout(timeout_s, connect=5)

    def listing(self) -> Json:
        """Return all entries, which are read page by page."""
        first_page = "/cache?limit=1000"  # the server's maximum
        page = self.send("GET", first_page)
        entries: list[Json] = page["entries"]
        while page.get("has_more"):
            page = self.send("GET", f"{first_page}&after={quote(page['next'])}")
            entries += page["entries"]
        return {"entries": entries, "count": len(entries)}

    def export(self, entry: str, path: Path) -> int:
        """Write the state of the entry at this path into a file. Returns its number of tokens."""
        with self._request("GET", entry + "/export") as answer:
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
        given = {name: value for name, value in query.items() if value is not None}
        headers = {"Content-Type": "application/octet-stream"}
        return self.send("POST", "/cache/import", content=parts, params=given, headers=headers)

    def tokenize(self, prompt: str, model: str | None) -> list[int]:
        """Tokenise a prompt as mlx_lm.cache_prompt does."""
        known = {} if model is None else {"model": model}
        message = {"role": "user", "content": prompt}
        chat = {"messages": [message], "continue_final_message": True, **known}
        try:
            found = self.send("POST", "/tokenize", json=chat)
        except RequestRefused:  # the model has no chat template
            found = self.send("POST", "/tokenize", json={"prompt": prompt, **known})
        tokens: list[int] = found["tokens"]
        return tokens

    def find(self, given: str) -> Json:
        """Return the entry with this key or name, or the only one whose key begins like this.
        Raises RekindleError."""
        entries: list[Json] = self.listing()["entries"]
        exact = [entry for entry in entries if entry["cache_key"] == given]
        named = [entry for entry in entries if given in _names(entry)]
        found = [entry for entry in entries if entry["cache_key"].startswith(given)]
        match exact or named or found:
            case [only]:
                return only
            case []:
                return self._unlisted(given)
            case several:
                keys = ", ".join(entry["cache_key"] for entry in several)
                raise RekindleError(f"{given!r} matches several entries, give one key: {keys}")

    def _unlisted(self, name: str) -> Json:
        """Return the entry of a project that the operator shares. Other tenants' lists lack it."""
        try:
            found = self.send("GET", entry_path(name))
        except RequestRefused:
            found = {}
        if "cache_key" not in found:  # a path such as /cache/stats is not an entry
            raise RekindleError(
                f"no entry has the name {name!r} or a key that begins with it; "
                "`rekindle cache ls` lists them"
            )
        return found

    def path(self, given: str) -> str:
        """Return the path of the entry with this key or name."""
        return entry_path(self.find(given)["cache_key"])

    def send(self, method: str, path: str, **options: Any) -> Json:
        with self._request(method, path, **options) as answer:
            answer.read()
            return self._read(answer)

    @contextmanager
    def _request(self, method: str, path: str, **options: Any) -> Iterator[httpx.Response]:
        with (
            connect(self._base_url, self._api_key, self._timeout, self._transport) as client,
            client.stream(method, self._base_url + path, **options) as answer,
        ):
            yield answer

    def _read(self, answer: httpx.Response) -> Json:
        try:
            content = answer.json()
        except ValueError:
            content = None
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            raise RequestRefused(key_problem(self._base_url, self._api_key))
        match content:
            case {"error": {"message": str() as message}} | {"error": str() as message}:
                raise RequestRefused(message)
            case dict() if answer.is_success:
                return dict(content)
        raise RekindleError(
            f"the server at {self._base_url} is not a Rekindle server, or an older version"
        )


def _names(entry: Json) -> list[str]:
    """The names of an entry that serve as its key."""
    names = (each for each in entry["names"] if each["kind"] in NAME_KINDS)
    return [each["name"] for each in names]


def entry_path(key: str) -> str:
    return f"/cache/{quote(key, safe='')}"


class PromptCacheFile:
    """A prompt cache of mlx_lm: a safetensors file. `name_tokens` adds token ids to its header.

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
