"""Fetches images and videos over http(s), within limits, from allowed addresses only."""

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

from rekindle.errors import BadMedia, MediaRefused
from rekindle.media.addresses import Address, AllowList, WebUrl, parse_web_url
from rekindle.version import __version__

Resolve = Callable[[str], Awaitable[list[Address]]]
Count = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class FetchLimits:
    total_s: float = 20.0  # from the first lookup to the last byte, including redirects
    read_s: float = 5.0  # to connect, and between two parts of a response
    redirects: int = 3


class Fetcher:
    """Uses no proxies, cookies or credentials, and a new connection for each request.

    httpcore rejects a status line and headers of more than 100 KiB.
    """

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
        """Created at the first use, because reading the system's certificates is slow."""
        return self._given_context or ssl.create_default_context()

    async def fetch(self, text: str, max_bytes: int, count: Count = lambda _bytes: None) -> bytes:
        """Return the body at this URL. Raises BadMedia.

        `count` receives the size of each part as it arrives, and may raise.
        """
        url = parse_web_url(text)
        try:
            async with asyncio.timeout(self._limits.total_s):
                for _ in range(self._limits.redirects + 1):
                    found = await self._get(url, max_bytes, count)
                    if isinstance(found, bytes):
                        return found
                    url = found
        except TimeoutError:
            raise BadMedia(
                f"{url.host} did not send the file within {self._limits.total_s:g} seconds."
            ) from None
        raise BadMedia(f"More than {self._limits.redirects} redirects, the last to {url.host}.")

    async def _get(self, url: WebUrl, max_bytes: int, count: Count) -> bytes | WebUrl:
        """Return the body, or the target of a redirect."""
        try:
            return await self._request(url, max_bytes, count)
        except httpcore.TimeoutException:
            raise BadMedia(
                f"{url.host} sent nothing for {self._limits.read_s:g} seconds."
            ) from None
        except httpcore.NetworkError:
            raise BadMedia(f"{url.host} cannot be reached, or closed the connection.") from None
        except (httpcore.ProtocolError, httpcore.UnsupportedProtocol):
            raise BadMedia(f"{url.host} did not send a valid HTTP response.") from None

    async def _request(self, url: WebUrl, max_bytes: int, count: Count) -> bytes | WebUrl:
        # A new pool, so that no connection is reused that was checked for another request.
        pool = httpcore.AsyncConnectionPool(
            ssl_context=self._ssl_context if url.scheme == "https" else None,
            network_backend=self._network,
        )
        target = httpcore.URL(
            scheme=url.scheme.encode(),
            host=url.host.encode(),
            port=url.port,
            target=url.target.encode(),
        )
        wait = dict.fromkeys(("connect", "read", "write", "pool"), self._limits.read_s)
        extensions = {"timeout": wait}
        async with (
            pool,
            pool.stream("GET", target, headers=_headers(url), extensions=extensions) as response,
        ):
            headers = {name.lower(): value for name, value in response.headers}
            if response.status in (301, 302, 303, 307, 308) and b"location" in headers:
                return url.joined(headers[b"location"].decode("latin-1"))
            _check_response(url, response.status, headers, max_bytes)
            return await _read(response, max_bytes, count)


def _headers(url: WebUrl) -> list[tuple[bytes, bytes]]:
    return [
        (b"Host", url.host_header.encode()),
        (b"User-Agent", f"rekindle/{__version__}".encode()),
        (b"Accept", b"image/*, video/*;q=0.9"),
        (b"Accept-Encoding", b"identity"),
        (b"Connection", b"close"),
    ]


def _check_response(url: WebUrl, status: int, headers: dict[bytes, bytes], max_bytes: int) -> None:
    if status != 200:
        raise BadMedia(f"{url.host} answered with status {status}.")
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise BadMedia(f"{url.host} sent the file compressed, which was not requested.")
    length = headers.get(b"content-length", b"0")
    if length.isdigit() and int(length[:20]) > max_bytes:
        raise _too_large(max_bytes)


async def _read(response: httpcore.Response, max_bytes: int, count: Count) -> bytes:
    body = bytearray()
    async for part in response.aiter_stream():
        body += part
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
        count(len(part))
    return bytes(body)


def _too_large(max_bytes: int) -> BadMedia:
    return BadMedia(f"A fetched file may have at most {max_bytes >> 20} MiB.")


class SystemResolver:
    """Resolves names by the system's rules, including /etc/hosts."""

    def __init__(self) -> None:
        # Own threads, so that a hanging name server delays nothing but media.
        self._threads = ThreadPoolExecutor(4, "resolver")

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
    """Connects to allowed addresses, or raises MediaRefused.

    It resolves a name once and connects to the resolved address, so a name server that changes its
    answer after the check gains nothing (DNS rebinding).
    """

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
        for address in addresses[:3]:
            with suppress(httpcore.ConnectError, httpcore.ConnectTimeout):
                stream = await self._network.connect_tcp(str(address), port, timeout)
                await self._check_peer(stream, host)
                return stream
        raise httpcore.ConnectError(f"no address of {host} answers")

    async def _addresses(self, host: str) -> list[Address]:
        """Resolve the host. If one of its addresses is not allowed, the host is not."""
        addresses = _literal(host) or await self._resolve(host)
        if not addresses or not all(self._allowed.allows(host, each) for each in addresses):
            # The same message in both cases, so that it does not reveal internal names.
            raise MediaRefused(
                f"{host} has no public address, and this server's operator has not listed it "
                "with --media-allow."
            )
        return addresses

    async def _check_peer(self, stream: httpcore.AsyncNetworkStream, host: str) -> None:
        """Check the address of the actual connection, which may have been diverted."""
        peer: Any = stream.get_extra_info("server_addr")
        if not self._allowed.allows(host, ip_address(peer[0])):
            await stream.aclose()
            raise MediaRefused(f"The connection to {host} led to an address that is not public.")


def _literal(host: str) -> list[Address]:
    try:
        return [ip_address(host)]
    except ValueError:
        return []
