"""Writes docs/api.md from the OpenAPI document of the server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx

from rekindle.api.base.completions import CACHE_FIELDS
from rekindle.api.base.models import ServedModels
from rekindle.config import Config
from rekindle.front.app import build_app
from rekindle.front.docs import DocumentedField, fields_of, parameters_of
from rekindle.front.openapi import Schema, by_section, forms_of, refs, texts
from tools.reference.markdown import code, fill, sentence, table


def render() -> str:
    """Return the whole page."""
    document = _document()
    parts, shown = [], {"XCache", "Divergence", "Reason"}
    for title, operations in by_section(document).items():
        parts.append(f"## {title}")
        for method, path, operation in operations:
            parts += [f"### `{method} {path}`", *_operation(document, operation, shown)]
    return fill(
        "api.md",
        cache_fields=", ".join(map(code, CACHE_FIELDS)),
        x_cache="\n\n".join(_x_cache(document)),
        operations="\n\n".join(parts),
    )


def _document() -> dict[str, Any]:
    """Ask the application for its document, as a client does."""
    config = Config()
    transport = httpx.ASGITransport(build_app(config, _NoModels(config)))

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get("/openapi.json")

    document: dict[str, Any] = asyncio.run(ask()).raise_for_status().json()
    return document


class _NoModels(ServedModels):
    """Stands for the models, which the document does not depend on."""

    def __init__(self, config: Config) -> None:
        self.config = config


def _x_cache(document: Schema) -> Iterator[str]:
    types = document["components"]["schemas"]
    yield _fields(fields_of(types["XCache"]), marks_required=False)
    yield "`diverged_at` has these fields:"
    yield _fields(fields_of(types["Divergence"]), marks_required=False)
    yield "### Values of `status`"
    statuses = texts()["statuses"].items()
    yield table(("status", "meaning"), ((code(name), text) for name, text in statuses))
    yield "### Values of `reason`"
    reasons = texts()["reasons"].items()
    yield table(
        ("reason", "what happened", "what to do"),
        ((code(name), text["happened"], text["remedy"]) for name, text in reasons),
    )


def _operation(document: Schema, operation: Schema, shown: set[str]) -> Iterator[str]:
    """Describe an operation, and the parts of its response that are not in `shown` yet."""
    yield " ".join(operation["description"].split())
    if parameters := parameters_of(operation):
        yield _fields(parameters, "parameter")
    for what, part in (
        ("Request", operation.get("requestBody", {})),
        ("Response", _response(operation)),
    ):
        if (name := next(refs(part), None)) is None:
            continue
        types = document["components"]["schemas"]
        [form] = forms_of(types[name])
        yield f"{what}: {code(name)}"
        yield _fields(fields_of(form), marks_required=what == "Request")
        inner = _inner(types, name, shown) if what == "Response" else ()
        for each in inner:
            yield f"Fields of {code(each)}:"
            yield _fields(fields_of(types[each]), marks_required=False)


def _inner(types: Schema, name: str, shown: set[str]) -> Iterator[str]:
    """Yield the types inside a type, each once on the page."""
    for each in refs(types[name]):
        if each not in shown:
            shown.add(each)
            yield each
            yield from _inner(types, each, shown)


def _response(operation: Schema) -> Schema:
    found: Schema = operation["responses"]["200"]
    return found


def _fields(
    fields: list[DocumentedField], what: str = "field", *, marks_required: bool = True
) -> str:
    rows = (_row(field, is_marked=marks_required and field.required) for field in fields)
    return table((what, "type", "meaning"), rows)


def _row(field: DocumentedField, *, is_marked: bool) -> tuple[str, str, str]:
    name = code(field.name) + (", required" if is_marked else "")
    notes = f" ({field.notes})" if field.notes else ""
    kind = field.type if field.required else field.type.removesuffix(" or null")
    return name, kind, sentence(field.text) + notes
