"""The network that pictures are fetched through: it connects to addresses it has checked.

The check and the connection are one step. A name is resolved once, and what is connected to is
the address that was found, so a name that changes its answer in between changes nothing.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

import httpcore

from rekindle.media.addresses import Address, AllowList
from rekindle.media.errors import MediaRefused

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
