"""Parses the URLs of images and videos, and decides which addresses the server may fetch from.

URLs are parsed once and strictly. No other parser sees the text, and everything that parsers are
known to read differently (user names, backslashes, odd numbers) is refused, so the server connects
to exactly the address that was checked.
"""

from __future__ import annotations

import ctypes
import re
import socket
import sys
from collections.abc import Container, Iterable
from dataclasses import dataclass
from ipaddress import (
    AddressValueError,
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_network,
)
from typing import TypeAlias
from urllib.parse import quote, urljoin

from rekindle.errors import BadMedia, MediaRefused

Address: TypeAlias = IPv4Address | IPv6Address
Network: TypeAlias = IPv4Network | IPv6Network

#: Networks that `ipaddress` counts as global, but that may lead to internal hosts.
NOT_PUBLIC = tuple(
    map(
        ip_network,
        (
            # IPv6 addresses that stand for an IPv4 address. A gateway would connect to that one.
            "::/96",  # compatible
            "::ffff:0:0/96",  # mapped
            "::ffff:0:0:0/96",  # translated
            "64:ff9b::/96",  # NAT64
            "64:ff9b:1::/48",
            "2001::/23",  # Teredo, and other protocol assignments
            "2002::/16",  # 6to4
            # Special purposes
            "192.88.99.0/24",  # 6to4 relays
            "192.0.0.0/24",  # protocol assignments
            "100.64.0.0/10",  # carrier-grade NAT
            "2001:db8::/32",  # documentation
            "3fff::/20",
            "5f00::/16",  # segment routing
            "fc00::/7",  # unique local
            "fec0::/10",  # site-local
        ),
    )
)


def is_public(address: Address) -> bool:
    """Whether the address belongs to the public internet."""
    if isinstance(address, IPv6Address) and (
        address not in IPv6Network("2000::/3") or address.scope_id
    ):
        return False
    return (
        address.is_global
        and not (address.is_multicast or address.is_reserved or address.is_unspecified)
        and not any(address in network for network in NOT_PUBLIC)
    )


class AllowList:
    """The hosts, addresses and networks that the operator allows.

    Public addresses of other machines are always allowed.
    """

    def __init__(self, listed: Iterable[str] = ()) -> None:
        parsed = [parse_listed(each) for each in listed]
        self._hosts = {each for each in parsed if isinstance(each, str)}
        self._networks = [each for each in parsed if not isinstance(each, str)]

    def allows(self, host: str, address: Address, own: Container[Address] = ()) -> bool:
        """Whether the server may connect to `host`, which resolved to `address`.

        `own` are the addresses of this machine. A service that listens on a public one may trust
        local clients.
        """
        return (
            (is_public(address) and address not in own)
            or host in self._hosts
            or any(address in network for network in self._networks)
        )


def interface_addresses() -> frozenset[Address]:
    """Return the addresses of all network interfaces of this machine, through `getifaddrs`.

    Python has no function for it, and the name of a machine often resolves only to loopback.
    """
    library = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Interface)()
    if library.getifaddrs(ctypes.byref(first)):
        raise OSError(ctypes.get_errno(), "the addresses of this machine cannot be listed")
    try:
        found, each = set(), first
        while each:
            if address := _interface_address(each.contents.address):
                found.add(address)
            each = each.contents.next
        return frozenset(found)
    finally:
        library.freeifaddrs(first)


class _Interface(ctypes.Structure):
    """The first fields of `struct ifaddrs`."""


_Interface._fields_ = [
    ("next", ctypes.POINTER(_Interface)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


def _interface_address(sockaddr: int | None) -> Address | None:
    if not sockaddr:
        return None
    header = ctypes.string_at(sockaddr, 2)
    # BSD and macOS write the length and the family in one byte each, Linux the family in two.
    family = int.from_bytes(header, sys.byteorder) if sys.platform == "linux" else header[1]
    if family == socket.AF_INET:
        return IPv4Address(ctypes.string_at(sockaddr + 4, 4))
    if family == socket.AF_INET6:
        return IPv6Address(ctypes.string_at(sockaddr + 8, 16))
    return None


def parse_listed(written: str) -> Network | str:
    """Parse a network, an address or a host name. Raises ValueError."""
    text = written.strip().lower().removeprefix("[").removesuffix("]")
    try:
        return ip_network(text)
    except ValueError:
        if ends_in_number(text) or not is_host_name(text):
            raise ValueError(
                "takes a host name, an address or a network such as 10.0.0.0/8"
            ) from None
    return text.rstrip(".")


def is_host_name(text: str) -> bool:
    pattern = r"[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*\.?"
    return len(text) <= 253 and re.fullmatch(pattern, text, re.ASCII) is not None


def ends_in_number(host: str) -> bool:
    """Whether resolvers read the host as an IPv4 address, in one of its many spellings."""
    last = host.rstrip(".").rpartition(".")[2]
    return re.fullmatch(r"[0-9]+|0x[0-9a-f]*", last) is not None


MAX_URL_CHARACTERS = 8192
DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class WebUrl:
    """A parsed http(s) URL."""

    scheme: str
    host: str  # a lower-case name, or an address in its canonical form
    port: int
    target: str  # path and query

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host_header}{self.target}"

    def joined(self, location: str) -> WebUrl:
        """Return the target of a redirect."""
        try:
            return parse_web_url(urljoin(str(self), location))
        except ValueError:  # unbalanced brackets
            raise BadMedia(f"{self.host} redirects to an invalid URL.") from None


def parse_web_url(text: str) -> WebUrl:
    """Raises BadMedia, or MediaRefused if the URL is spelled to deceive."""
    if len(text) > MAX_URL_CHARACTERS:
        raise BadMedia(f"A URL may have at most {MAX_URL_CHARACTERS} characters.")
    if re.search(r"[\x00-\x20\x7f\\]", text):
        raise MediaRefused("A URL may not contain spaces, control characters or backslashes.")
    url = re.fullmatch(r"(https?)://([^/?#]*)([^#]*)(?:#.*)?", text, re.IGNORECASE | re.DOTALL)
    if url is None:
        raise MediaRefused("Images and videos are only fetched from http:// and https:// URLs.")
    scheme, authority, target = url.groups()
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:@%]+)(?::([0-9]{1,5}))?", authority)
    if found is None:
        raise MediaRefused("A URL may have a host and a port, but no user name or password.")
    host, port = found.groups()
    scheme = scheme.lower()
    path = target if target.startswith("/") else f"/{target}"
    encoded = quote(path, safe="%/?:@!$&'()*+,;=-._~[]|")
    return WebUrl(scheme, _host(host.lower()), _port(port, scheme), encoded)


def _host(written: str) -> str:
    try:
        if written.startswith("["):
            return str(IPv6Address(written[1:-1]))
        if ends_in_number(written):
            return str(IPv4Address(written))  # only four plain numbers, without leading zeros
    except AddressValueError:
        raise MediaRefused(
            "The URL's host looks like an address, but is not spelled as one: "
            "write 192.0.2.7 or [2001:db8::7]."
        ) from None
    if not is_host_name(written):
        raise MediaRefused("The URL's host is not a host name in ASCII letters.")
    return written.rstrip(".")


def _port(written: str | None, scheme: str) -> int:
    port = DEFAULT_PORTS[scheme] if written is None else int(written)
    if not 0 < port < 1 << 16:
        raise MediaRefused("The URL's port is not a number from 1 to 65535.")
    return port
