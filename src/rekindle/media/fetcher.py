"""Fetches images and videos over http(s), within limits, from allowed addresses only."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from ipaddress import ip_address
from typing import Any

import httpcore

from rekindle.errors import BadMedia, MediaRefused, TooManyRequests
from rekindle.media.addresses import (
    Address,
    AllowList,
    WebUrl,
    interface_addresses,
    parse_web_url,
)
from rekindle.version import __version__

Resolve = Callable[[str, bytes], Awaitable[list[Address]]]  # takes a host and the tenant
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
        own_addresses: Callable[[], frozenset[Address]] = interface_addresses,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self._limits = limits or FetchLimits()
        self._allowed = allowed
        self._resolve = resolve or SystemResolver()
        self._own_addresses = own_addresses
        self._given_context = ssl_context

    @cached_property
    def _ssl_context(self) -> ssl.SSLContext:
        """Created at the first use, because reading the system's certificates is slow."""
        return self._given_context or ssl.create_default_context()

    async def fetch(
        self,
        text: str,
        max_bytes: int,
        count: Count = lambda _bytes: None,
        *,
        tenant: bytes = b"",
    ) -> bytes:
        """Return the body at this URL. Raises BadMedia, or TooManyRequests.

        `count` receives the size of each part as it arrives, and may raise.
        """
        url = parse_web_url(text)
        own = await asyncio.to_thread(self._own_addresses)
        network = CheckedNetwork(self._allowed, self._resolve, own, tenant)
        try:
            async with asyncio.timeout(self._limits.total_s):
                for _ in range(self._limits.redirects + 1):
                    found = await self._get(url, network, max_bytes, count)
                    if isinstance(found, bytes):
                        return found
                    url = found
        except TimeoutError:
            raise BadMedia(
                f"{url.host} did not send the file within {self._limits.total_s:g} seconds."
            ) from None
        raise BadMedia(f"More than {self._limits.redirects} redirects, the last to {url.host}.")

    async def _get(
        self, url: WebUrl, network: CheckedNetwork, max_bytes: int, count: Count
    ) -> bytes | WebUrl:
        """Return the body, or the target of a redirect."""
        try:
            return await self._request(url, network, max_bytes, count)
        except httpcore.TimeoutException:
            raise BadMedia(
                f"{url.host} sent nothing for {self._limits.read_s:g} seconds."
            ) from None
        except httpcore.NetworkError:
            raise BadMedia(f"{url.host} cannot be reached, or closed the connection.") from None
        except (httpcore.ProtocolError, httpcore.UnsupportedProtocol):
            raise BadMedia(f"{url.host} did not send a valid HTTP response.") from None

    async def _request(
        self, url: WebUrl, network: CheckedNetwork, max_bytes: int, count: Count
    ) -> bytes | WebUrl:
        # A new pool, so that no connection is reused that was checked for another request.
        pool = httpcore.AsyncConnectionPool(
            ssl_context=self._ssl_context if url.scheme == "https" else None,
            network_backend=network,
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


LOOKUP_S = 5.0  # how long a request waits for a name
MAX_LOOKUPS = 64  # concurrently, including those that nobody waits for any more
MAX_TENANT_LOOKUPS = 16  # of them, for one tenant


class SystemResolver:
    """Resolves names by the system's rules, including /etc/hosts.

    The system's lookup cannot be cancelled and may take a minute. Each one has a daemon thread of
    its own, which goes on after the request has stopped waiting. It counts until it ends, so a
    tenant whose names never resolve can use up its own lookups, but not those of others.
    """

    def __init__(self, look_up: Callable[[str], list[str]] | None = None) -> None:
        self._look_up = look_up or _look_up
        self._running: Counter[bytes] = Counter()  # lookups by tenant

    async def __call__(self, host: str, tenant: bytes) -> list[Address]:
        """Resolve a host. Raises BadMedia if the lookup takes too long, and TooManyRequests if too
        many run."""
        if self._running[tenant] >= MAX_TENANT_LOOKUPS or self._running.total() >= MAX_LOOKUPS:
            raise TooManyRequests(
                "The host names of earlier images are still being looked up; try again later, or "
                "send `data:` URLs."
            )
        loop = asyncio.get_running_loop()
        found: asyncio.Future[list[str]] = loop.create_future()
        thread = threading.Thread(
            target=self._run, args=(host, tenant, loop, found), name="resolver", daemon=True
        )
        thread.start()
        self._running[tenant] += 1  # its end is counted on this loop, so not before this line
        try:
            async with asyncio.timeout(LOOKUP_S):
                addresses = await found
        except TimeoutError:
            raise BadMedia(f"{host} was not resolved within {LOOKUP_S:g} seconds.") from None
        return list(dict.fromkeys(map(ip_address, addresses)))

    def _run(
        self,
        host: str,
        tenant: bytes,
        loop: asyncio.AbstractEventLoop,
        found: asyncio.Future[list[str]],
    ) -> None:
        """Look up a name, on the thread."""
        addresses: list[str] = []
        with suppress(Exception):  # a name that cannot be looked up has no addresses
            addresses = self._look_up(host)
        with suppress(RuntimeError):  # the server has stopped, and the loop is closed
            loop.call_soon_threadsafe(self._finish, tenant, found, addresses)

    def _finish(
        self, tenant: bytes, found: asyncio.Future[list[str]], addresses: list[str]
    ) -> None:
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        if not found.done():  # the request still waits
            found.set_result(addresses)


def _look_up(host: str) -> list[str]:
    infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(sockaddr[0]) for *_, sockaddr in infos]


class CheckedNetwork(httpcore.AsyncNetworkBackend):
    """Connects to allowed addresses, or raises MediaRefused.

    It resolves a name once and connects to the resolved address, so a name server that changes its
    answer after the check gains nothing (DNS rebinding).
    """

    def __init__(
        self, allowed: AllowList, resolve: Resolve, own: frozenset[Address], tenant: bytes
    ) -> None:
        """`own` are the addresses of this machine."""
        self._allowed = allowed
        self._resolve = resolve
        self._own = own
        self._tenant = tenant
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
        addresses = _literal(host) or await self._resolve(host, self._tenant)
        allowed = (self._allowed.allows(host, each, self._own) for each in addresses)
        if not addresses or not all(allowed):
            # The same message in all cases, so that it does not reveal internal names.
            raise MediaRefused(
                f"{host} has no public address of another machine, and this server's operator has "
                "not listed it with --media-allow."
            )
        return addresses

    async def _check_peer(self, stream: httpcore.AsyncNetworkStream, host: str) -> None:
        """Check the address of the actual connection, which may have been diverted."""
        peer: Any = stream.get_extra_info("server_addr")
        local: Any = stream.get_extra_info("client_addr")
        # A connection between equal addresses stays on this machine, whatever its interfaces are.
        own = self._own | {ip_address(local[0])}
        if not self._allowed.allows(host, ip_address(peer[0]), own):
            await stream.aclose()
            raise MediaRefused(
                f"The connection to {host} led to an address that is not public, or to this "
                "server's own machine."
            )


def _literal(host: str) -> list[Address]:
    try:
        return [ip_address(host)]
    except ValueError:
        return []
