"""Writes docs/python.md from the classes of the Python API."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from rekindle import Engine, EngineConfig
from rekindle.front.embedded import DTYPES
from tools.reference.markdown import code, fill, table

#: The members of the API in the order of the page, with what to add to their docstrings.
MEMBERS: dict[str, tuple[Any, str]] = {
    "EngineConfig": (
        EngineConfig,
        "An unknown name is a `ConfigError`, which suggests the closest known one. "
        "[Settings](settings.md) lists all names.",
    ),
    "Engine": (Engine, f"`dtype` is one of {', '.join(map(code, DTYPES))}."),
    "Engine.chat": (
        Engine.chat,
        "Closing the iterator early cancels the turn. An unknown option is a `TypeError`. `n` and "
        "calls of tools need HTTP, because the result is text.",
    ),
    "Engine.start_server": (Engine.start_server, ""),
    "Engine.base_url": (
        Engine.base_url,
        "The address of the server that runs in the background, ending in `/v1`. Otherwise None.",
    ),
    "Engine.close": (Engine.close, ""),
}


def render() -> str:
    """Return the whole page."""
    parts = []
    for name, (member, more) in MEMBERS.items():
        parts += [f"### `{name}`", *_member(name, member, more)]
    return fill("python.md", members="\n\n".join(parts))


def _member(name: str, member: Any, more: str) -> Iterator[str]:
    if callable(member):
        yield f"```text\n{name}{_signature(member)}\n```"
        if parameters := _parameters(member):
            yield parameters
    yield "\n\n".join(filter(None, [_docstring(member), more]))


def _docstring(member: Any) -> str:
    """The docstring, with each paragraph on a line of its own."""
    paragraphs = (inspect.getdoc(member) or "").split("\n\n")
    return "\n\n".join(" ".join(each.split()) for each in paragraphs)


def _signature(member: Any) -> str:
    signature = inspect.signature(member)
    kept = [
        each.replace(annotation=inspect.Parameter.empty)
        for each in signature.parameters.values()
        if each.name != "self"
    ]
    return str(inspect.Signature(kept))


def _parameters(member: Any) -> str:
    rows = [
        (code(each.name), code(each.annotation))
        for each in inspect.signature(member).parameters.values()
        if each.name != "self"
    ]
    return table(("parameter", "type"), rows) if rows else ""
