"""Which web pages may call this server from a browser, by their origin (CORS)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response

from rekindle.errors import Forbidden
from rekindle.server.auth import LOOPBACK

ANY = "*"
METHODS = "GET, HEAD, POST, DELETE, OPTIONS"
EXPOSED = "x-request-id, retry-after"  # to the page's script, beside what it always sees
MAX_AGE_S = 600

_NAMES = re.compile(r"[\w!#$%&'*+.^`|~, -]{1,1024}", re.ASCII)  # of headers


class OriginNotAllowed(Forbidden):
    code = "origin_not_allowed"

    def __init__(self) -> None:
        super().__init__("Pages of this origin may not call the server: see --cors-origin.")


class Cors:
    """Pages of these origins, and on a server of this machine those of this machine."""

    def __init__(self, origins: Iterable[str], *, loopback: bool) -> None:
        self._origins = frozenset(origins)
        self._loopback = loopback

    def headers(self, origin: str | None) -> dict[str, str]:
        """What every answer to a page of this origin says; nothing to a program."""
        if origin is None:
            return {}
        if not self._allows(origin):
            return {"vary": "Origin"}
        return {
            "vary": "Origin",
            "access-control-allow-origin": origin,
            "access-control-expose-headers": EXPOSED,
        }

    def preflight(self, headers: Headers) -> Response:
        """The answer to a browser that asks before it sends; it sends no key with that."""
        if not self._allows(headers["origin"]):
            raise OriginNotAllowed
        allowed = {
            "access-control-allow-methods": METHODS,
            "access-control-max-age": str(MAX_AGE_S),
        }
        names = headers.get("access-control-request-headers", "")
        if _NAMES.fullmatch(names):
            allowed["access-control-allow-headers"] = names
        if headers.get("access-control-request-private-network") == "true":
            allowed["access-control-allow-private-network"] = "true"
        return Response(status_code=204, headers=allowed)

    def _allows(self, origin: str) -> bool:
        if ANY in self._origins or origin in self._origins:
            return True
        return self._loopback and _is_of_this_machine(origin)


def is_preflight(method: str, headers: Headers) -> bool:
    asks = "origin" in headers and "access-control-request-method" in headers
    return method == "OPTIONS" and asks


def _is_of_this_machine(origin: str) -> bool:
    try:
        parts = urlsplit(origin)
        hostname = parts.hostname
    except ValueError:
        return False
    exact = f"{parts.scheme}://{parts.netloc}" == origin and "@" not in origin
    return exact and parts.scheme in ("http", "https") and hostname in LOOPBACK
