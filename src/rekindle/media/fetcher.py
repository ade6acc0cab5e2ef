"""Fetches a picture or a video over http(s), within limits, from where it is allowed to."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from ipaddress import ip_address
from typing import Any

import httpcore

from rekindle.media.addresses import Address, AllowList, WebUrl, parse_web_url
from rekindle.media.errors import BadMedia, MediaRefused
from rekindle.version import __version__

# ----------------------------------------------------------------------
# The network that pictures are fetched through: it connects to addresses it has checked.
#
# The check and the connection are one step. A name is resolved once, and what is connected to is
# the address that was found, so a name that changes its answer in between changes nothing.

RESOLVER_THREADS = 4  # a name server that hangs holds up pictures, and nothing else
MOST_ADDRESSES = 3  # that are tried

Resolve = Callable[[str], Awaitable[list[Address]]]


class SystemResolver:
    """Names by the system's own rules, /etc/hosts included."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(RESOLVER_THREADS, "resolver")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def __call__(self, host: str) -> list[Address]:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._threads, _look_up, host)
        except (OSError, UnicodeError):
            return []
        return list(dict.fromkeys(ip_address(address) for address in found))


def _look_up(host: str) -> list[str]:
    infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(sockaddr[0]) for *_, sockaddr in infos]


class CheckedNetwork(httpcore.AsyncNetworkBackend):
    """Connects to public addresses and to what the operator listed, or raises MediaRefused."""

    def __init__(self, allowed: AllowList, resolve: Resolve) -> None:
        self._allowed = allowed
        self._resolve = resolve
        self._network = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        addresses = await self._addresses(host)
        for address in addresses[:MOST_ADDRESSES]:
            with suppress(httpcore.ConnectError, httpcore.ConnectTimeout):
                stream = await self._network.connect_tcp(str(address), port, timeout)
                await self._check_peer(stream, host)
                return stream
        raise httpcore.ConnectError(f"no address of {host} answers")

    async def _addresses(self, host: str) -> list[Address]:
        """All that the host has; one that is not allowed makes the whole host suspect."""
        addresses = _literal(host) or await self._resolve(host)
        if not addresses or not all(self._allowed.allows(host, each) for each in addresses):
            # One sentence for both: whether an internal name exists is nobody's business.
            raise MediaRefused(
                f"{host} has no public address, and this server's operator has not listed it "
                "with --media-allow."
            )
        return addresses

    async def _check_peer(self, stream: httpcore.AsyncNetworkStream, host: str) -> None:
        """Of the connection really made, whatever came between."""
        peer: Any = stream.get_extra_info("server_addr")
        if not self._allowed.allows(host, ip_address(peer[0])):
            await stream.aclose()
            raise MediaRefused(f"The connection to {host} led to an address that is not public.")


def _literal(host: str) -> list[Address]:
    try:
        return [ip_address(host)]
    except ValueError:
        return []


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
