"""Which addresses may be fetched from: those of the public internet, and what the operator lists.

`ipaddress` knows the registries of special addresses; what it counts as global and yet leads back
inside is listed here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
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

from rekindle.media.errors import BadMedia, MediaRefused

Address: TypeAlias = IPv4Address | IPv6Address
Network: TypeAlias = IPv4Network | IPv6Network

HOST_NAME = re.compile(r"[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*\.?", re.ASCII)
MOST_HOST_CHARACTERS = 253

#: IPv6 addresses that stand for an IPv4 address, which a gateway would connect to instead.
TRANSLATED = (
    "::/96",  # compatible
    "::ffff:0:0/96",  # mapped
    "::ffff:0:0:0/96",  # translated
    "64:ff9b::/96",  # NAT64
    "64:ff9b:1::/48",
    "2001::/23",  # Teredo, and other assignments to protocols
    "2002::/16",  # 6to4
)
NOT_PUBLIC = (
    "192.88.99.0/24",  # relays of 6to4
    "192.0.0.0/24",  # assignments to protocols
    "100.64.0.0/10",  # behind a carrier's NAT
    "2001:db8::/32",  # documentation
    "3fff::/20",
    "5f00::/16",  # segment routing
    "fc00::/7",  # unique local
    "fec0::/10",  # site-local
)
_REFUSED = tuple(ip_network(each) for each in (*TRANSLATED, *NOT_PUBLIC))
_GLOBAL_IPV6 = IPv6Network("2000::/3")


def is_public(address: Address) -> bool:
    """Whether anybody on the internet may answer at this address, and nobody inside."""
    if isinstance(address, IPv6Address) and (address not in _GLOBAL_IPV6 or address.scope_id):
        return False
    return (
        address.is_global
        and not (address.is_multicast or address.is_reserved or address.is_unspecified)
        and not any(address in network for network in _REFUSED)
    )


class AllowList:
    """What the operator lists: host names, addresses and networks. The public is always in."""

    def __init__(self, listed: Iterable[str] = ()) -> None:
        parsed = [parse_listed(each) for each in listed]
        self._hosts = {each for each in parsed if isinstance(each, str)}
        self._networks = [each for each in parsed if not isinstance(each, str)]

    def allows(self, host: str, address: Address) -> bool:
        """Whether `host`, which was found to be at `address`, may be connected to there."""
        return (
            is_public(address)
            or host in self._hosts
            or any(address in network for network in self._networks)
        )


def parse_listed(written: str) -> Network | str:
    """A network, an address as the network of it alone, or a host name; else ValueError."""
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
    return len(text) <= MOST_HOST_CHARACTERS and HOST_NAME.fullmatch(text) is not None


def ends_in_number(host: str) -> bool:
    """Whether resolvers read the host as an IPv4 address, in one of its many spellings."""
    last = host.rstrip(".").rpartition(".")[2]
    return re.fullmatch(r"[0-9]+|0x[0-9a-f]*", last) is not None


# ----------------------------------------------------------------------
# An http(s) URL, taken apart once and strictly.
#
# What was checked is what is connected to: no other parser sees the URL's text, and whatever
# parsers are known to read differently (user names, backslashes, odd numbers) is refused.

MOST_CHARACTERS = 8192
PORTS = {"http": 80, "https": 443}
_URL = re.compile(r"(https?)://([^/?#]*)([^#]*)(?:#.*)?", re.IGNORECASE | re.DOTALL)
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:@%]+)(?::([0-9]{1,5}))?")
_UNSAFE = re.compile(r"[\x00-\x20\x7f\\]")
_KEPT = "%/?:@!$&'()*+,;=-._~[]|"  # of the target; the rest is percent-encoded


@dataclass(frozen=True, slots=True)
class WebUrl:
    scheme: str
    host: str  # a name in lower case, or an address in its usual spelling
    port: int
    target: str  # path and query

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host_header}{self.target}"

    def joined(self, location: str) -> WebUrl:
        """Where a redirect leads."""
        try:
            return parse_web_url(urljoin(str(self), location))
        except ValueError:  # brackets that do not match
            raise BadMedia(f"{self.host} redirects to something that is no URL.") from None


def parse_web_url(text: str) -> WebUrl:
    """Raises BadMedia, or MediaRefused where a URL is spelled to deceive."""
    if len(text) > MOST_CHARACTERS:
        raise BadMedia(f"A URL may have at most {MOST_CHARACTERS} characters.")
    if _UNSAFE.search(text):
        raise MediaRefused("A URL may hold no spaces, control characters or backslashes.")
    match = _URL.fullmatch(text)
    if match is None:
        raise MediaRefused("Pictures and videos are fetched from http:// and https:// URLs alone.")
    scheme, authority, target = match.groups()
    found = _AUTHORITY.fullmatch(authority)
    if found is None:
        raise MediaRefused("A URL takes a host and a port there, with no user name or password.")
    host, port = found.groups()
    scheme = scheme.lower()
    path = target if target.startswith("/") else f"/{target}"
    return WebUrl(scheme, _host(host.lower()), _port(port, scheme), quote(path, safe=_KEPT))


def _host(written: str) -> str:
    try:
        if written.startswith("["):
            return str(IPv6Address(written[1:-1]))
        if ends_in_number(written):
            return str(IPv4Address(written))  # four plain numbers, without leading zeros
    except AddressValueError:
        raise MediaRefused(
            "The URL's host looks like an address and is not spelled as one: "
            "write 192.0.2.7 or [2001:db8::7]."
        ) from None
    if not is_host_name(written):
        raise MediaRefused("The URL's host is not a host name in ASCII letters.")
    return written.rstrip(".")


def _port(written: str | None, scheme: str) -> int:
    port = PORTS[scheme] if written is None else int(written)
    if not 0 < port < 1 << 16:
        raise MediaRefused("The URL's port is not a number from 1 to 65535.")
    return port
