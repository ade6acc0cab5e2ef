"""Names that clients give a conversation outside of its request's own fields."""

from __future__ import annotations

from collections.abc import Sequence

from blake3 import blake3
from msgspec import structs
from starlette.requests import Request

from rekindle.api.base.fields import MOST_ID_CHARACTERS
from rekindle.protocol.requests import GenerateRequest, Names

AFFINITY = "x-session-affinity"  # opencode's session


def short_name(name: str) -> str:
    """Some clients put a whole object into it."""
    if len(name) <= MOST_ID_CHARACTERS:
        return name
    return blake3(name.encode(errors="replace")).hexdigest()


def with_affinity(http: Request, request: GenerateRequest) -> GenerateRequest:
    """The request with the session of the header as its name, unless it has one of that kind."""
    session = http.headers.get(AFFINITY)
    names = request.names or Names()
    if not session or not request.reuse or names.prompt_cache_key is not None:
        return request
    named = structs.replace(names, prompt_cache_key=short_name(session))
    return structs.replace(request, names=named)


def all_with_affinity(http: Request, requests: Sequence[GenerateRequest]) -> list[GenerateRequest]:
    """Of several prompts none is the session's conversation."""
    if len(requests) != 1:
        return list(requests)
    return [with_affinity(http, requests[0])]
