"""An http(s) URL, taken apart once and strictly.

What was checked is what is connected to: no other parser sees the URL's text, and whatever
parsers are known to read differently (user names, backslashes, odd numbers) is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from urllib.parse import quote, urljoin

from rekindle.media.addresses import ends_in_number, is_host_name
from rekindle.media.errors import BadMedia, MediaRefused

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
