"""Fetches a picture or a video over http(s), within limits, from where it is allowed to."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import httpcore

from rekindle.media.addresses import AllowList
from rekindle.media.errors import BadMedia
from rekindle.media.network import CheckedNetwork, Resolve, SystemResolver
from rekindle.media.web_url import WebUrl, parse_web_url
from rekindle.version import __version__

Count = Callable[[int], None]

REDIRECTS = (301, 302, 303, 307, 308)


@dataclass(frozen=True, slots=True)
class FetchLimits:
    total_s: float = 20.0  # from the first lookup to the last byte, redirects included
    read_s: float = 5.0  # to connect, and between two pieces of an answer
    redirects: int = 3


class Fetcher:
    """No proxies, cookies or credentials; no connection outlives its fetch. A status line and
    headers of more than 100 KiB are not HTTP for httpcore."""

    def __init__(
        self,
        allowed: AllowList,
        *,
        limits: FetchLimits | None = None,
        resolve: Resolve | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self._limits = limits or FetchLimits()
        self._resolver = SystemResolver()
        self._network = CheckedNetwork(allowed, resolve or self._resolver)
        self._given_context = ssl_context

    def close(self) -> None:
        self._resolver.close()

    @cached_property
    def _ssl_context(self) -> ssl.SSLContext:
        """Reading the system's certificates takes a while."""
        return self._given_context or ssl.create_default_context()

    async def fetch(self, text: str, most_bytes: int, count: Count = lambda _bytes: None) -> bytes:
        """The body at this URL; `count` gets the size of each piece as it comes, and may refuse it.
        Raises BadMedia."""
        url = parse_web_url(text)
        try:
            async with asyncio.timeout(self._limits.total_s):
                return await self._follow(url, most_bytes, count)
        except TimeoutError:
            raise BadMedia(
                f"{url.host} did not send all of it within {self._limits.total_s:g} seconds."
            ) from None

    async def _follow(self, url: WebUrl, most_bytes: int, count: Count) -> bytes:
        for _ in range(self._limits.redirects + 1):
            found = await self._get(url, most_bytes, count)
            if isinstance(found, bytes):
                return found
            url = found
        raise BadMedia(f"More than {self._limits.redirects} redirects, the last to {url.host}.")

    async def _get(self, url: WebUrl, most_bytes: int, count: Count) -> bytes | WebUrl:
        """The body, or where it is instead."""
        try:
            return await self._answer(url, most_bytes, count)
        except httpcore.TimeoutException:
            raise BadMedia(
                f"{url.host} sent nothing for {self._limits.read_s:g} seconds."
            ) from None
        except httpcore.NetworkError:
            raise BadMedia(f"{url.host} cannot be reached, or ended the connection.") from None
        except (httpcore.ProtocolError, httpcore.UnsupportedProtocol):
            raise BadMedia(f"{url.host} does not answer as HTTP servers do.") from None

    async def _answer(self, url: WebUrl, most_bytes: int, count: Count) -> bytes | WebUrl:
        # A pool of its own: no connection is used again that was checked for another request.
        pool = httpcore.AsyncConnectionPool(
            ssl_context=self._ssl_context if url.scheme == "https" else None,
            network_backend=self._network,
        )
        wait = dict.fromkeys(("connect", "read", "write", "pool"), self._limits.read_s)
        async with (
            pool,
            pool.stream(
                "GET", _target(url), headers=_headers(url), extensions={"timeout": wait}
            ) as response,
        ):
            headers = {name.lower(): value for name, value in response.headers}
            if response.status in REDIRECTS and b"location" in headers:
                return url.joined(headers[b"location"].decode("latin-1"))
            _check_answer(url, response.status, headers, most_bytes)
            return await _read(response, most_bytes, count)


def _target(url: WebUrl) -> httpcore.URL:
    return httpcore.URL(
        scheme=url.scheme.encode(),
        host=url.host.encode(),
        port=url.port,
        target=url.target.encode(),
    )


def _headers(url: WebUrl) -> list[tuple[bytes, bytes]]:
    return [
        (b"Host", url.host_header.encode()),
        (b"User-Agent", f"rekindle/{__version__}".encode()),
        (b"Accept", b"image/*, video/*;q=0.9"),
        (b"Accept-Encoding", b"identity"),
        (b"Connection", b"close"),
    ]


def _check_answer(url: WebUrl, status: int, headers: dict[bytes, bytes], most_bytes: int) -> None:
    if status != 200:
        raise BadMedia(f"{url.host} answered with status {status}.")
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise BadMedia(f"{url.host} sent it compressed, although nobody asked for that.")
    length = headers.get(b"content-length", b"0")
    if length.isdigit() and int(length[:20]) > most_bytes:
        raise _too_large(most_bytes)


async def _read(response: httpcore.Response, most_bytes: int, count: Count) -> bytes:
    body = bytearray()
    async for part in response.aiter_stream():
        body += part
        if len(body) > most_bytes:
            raise _too_large(most_bytes)
        count(len(part))
    return bytes(body)


def _too_large(most_bytes: int) -> BadMedia:
    return BadMedia(f"A file to fetch may have at most {most_bytes >> 20} MiB.")
