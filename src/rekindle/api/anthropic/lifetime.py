"""`cache_control`: how long what a request computes is to be kept at least."""

from __future__ import annotations

from collections.abc import Iterator

from rekindle.api.anthropic.blocks import CacheControl, ToolResultBlock, as_blocks
from rekindle.api.anthropic.schema import MessagesRequest
from rekindle.api.anthropic.usage import Lifetime

LIFETIMES_S: dict[Lifetime, float] = {"5m": 300.0, "1h": 3600.0}


def lifetime_of(body: MessagesRequest) -> Lifetime | None:
    """The longest that any mark asks for; None: there is no mark."""
    marks = {mark.ttl for mark in _marks(body) if mark is not None}
    return "1h" if "1h" in marks else "5m" if marks else None


def _marks(body: MessagesRequest) -> Iterator[CacheControl | None]:
    yield body.cache_control
    for tool in body.tools or ():
        yield tool.cache_control
    for block in as_blocks(body.system):
        yield block.cache_control
    for message in body.messages:
        for block in message.blocks:
            yield block.cache_control
            if isinstance(block, ToolResultBlock):
                yield from (each.cache_control for each in block.blocks)
