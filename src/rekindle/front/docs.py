"""Pages for people: GET / and GET /docs. Nothing in them is fetched from elsewhere, or is a script.

Their style is in the page, and its hash in the policy that the browser holds the page to.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import jinja2
from fastapi import APIRouter, FastAPI
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from rekindle.api.base.models import models_of
from rekindle.http.responses import JsonResponse, documented
from rekindle.version import __version__

# ----------------------------------------------------------------------
# The OpenAPI document: the one that FastAPI writes, with every status that is really answered.

EVERY_OPERATION = (400, 401, 404, 421, 429, 431, 500, 503)
EVERY_POST = (408, 413, 415)
NOT_ANSWERED = "422"  # FastAPI's own; here a wrong request is a 400 in OpenAI's shape
NOT_USED = ("HTTPValidationError", "ValidationError")
OPEN_OPERATION = "/health"
KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
WITH_A_KEY: list[dict[str, list[str]]] = [{name: []} for name in KEYS]


class DocumentedApp(FastAPI):
    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = _completed(super().openapi())
        return self.openapi_schema


def _completed(document: dict[str, Any]) -> dict[str, Any]:
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            answers = operation["responses"]
            failures = {int(status) for status in answers if status not in ("200", NOT_ANSWERED)}
            failures |= set(EVERY_POST if method == "post" else ())
            [shape] = (form["schema"] for form in answers["400"]["content"].values())
            operation["responses"] = {"200": answers["200"], **_errors(shape, *sorted(failures))}
            operation["security"] = [] if path == OPEN_OPERATION else [*WITH_A_KEY, {}]
    components = document["components"]
    for name in NOT_USED:
        components["schemas"].pop(name, None)
    components["securitySchemes"] = KEYS
    return document


def _errors(shape: dict[str, Any], *statuses: int) -> dict[str, Any]:
    return {
        str(status): {
            "description": details["description"],
            "content": {"application/json": {"schema": shape}},
        }
        for status, details in documented(*statuses).items()
    }


# ----------------------------------------------------------------------
# The operations and types of an OpenAPI document, as a page shows them.

Schema = Mapping[str, Any]

LIMITS = {
    "minimum": "from {}",
    "exclusiveMinimum": "above {}",
    "maximum": "up to {}",
    "exclusiveMaximum": "below {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
}


@dataclass(frozen=True, slots=True)
class Field:
    """A parameter of an operation, or a field of an object."""

    name: str
    type: str
    types: list[str]  # those of its types that the page describes
    required: bool
    notes: str


@dataclass(frozen=True, slots=True)
class Operation:
    method: str
    path: str
    text: str
    parameters: list[Field]
    body: str | None  # the name of its type
    answers: list[tuple[str, str, str]]  # status, media types, meaning


@dataclass(frozen=True, slots=True)
class Form:
    """An object; one of several forms where a type has more than one."""

    fields: list[Field]


@dataclass(frozen=True, slots=True)
class Type:
    name: str
    text: str
    forms: list[Form]


class Reference:
    def __init__(self, document: Schema) -> None:
        self._document = document
        self.title: str = document["info"]["title"]
        self.version: str = document["info"]["version"]
        self.summary: str = document["info"].get("summary", "")

    @cached_property
    def sections(self) -> dict[str, list[Operation]]:
        """The operations by their tag."""
        found: dict[str, list[Operation]] = {}
        for path, operations in self._document["paths"].items():
            for method, operation in operations.items():
                tag = (operation.get("tags") or ["other"])[0]
                found.setdefault(tag, []).append(_operation(method.upper(), path, operation))
        return found

    @cached_property
    def types(self) -> list[Type]:
        schemas = self._document.get("components", {}).get("schemas", {})
        return [
            Type(name, schema.get("description", ""), [Form(_fields(form)) for form in forms])
            for name, schema in sorted(schemas.items())
            if (forms := schema.get("oneOf", [schema]))
        ]


def _operation(method: str, path: str, operation: Schema) -> Operation:
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    return Operation(
        method=method,
        path=path,
        text=operation.get("description", ""),
        parameters=[
            _field(each["name"], each.get("schema", {}), required=each.get("required", False))
            for each in operation.get("parameters", ())
        ],
        body=next(_refs(body), None),
        answers=[
            (status, ", ".join(answer.get("content", {})), answer["description"])
            for status, answer in operation["responses"].items()
        ],
    )


def _fields(schema: Schema) -> list[Field]:
    required = schema.get("required", ())
    return [
        _field(name, each, required=name in required)
        for name, each in schema.get("properties", {}).items()
    ]


def _field(name: str, schema: Schema, *, required: bool) -> Field:
    notes = [schema["description"]] if "description" in schema else []
    notes += dict.fromkeys(_limits(schema))
    if schema.get("default") is not None:
        notes.append(f"default {json.dumps(schema['default'])}")
    return Field(name, _type(schema), list(_refs(schema)), required, "; ".join(notes))


def _type(schema: Schema) -> str:
    """A type in words, as a person reads it."""
    if "$ref" in schema:
        return _name(schema["$ref"])
    if "const" in schema or "enum" in schema:
        return " or ".join(json.dumps(each) for each in schema.get("enum", [schema.get("const")]))
    if forms := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(_type(form) for form in forms))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return str(schema.get("type", "any value"))


def _limits(schema: Schema) -> Iterator[str]:
    for key, words in LIMITS.items():
        if key in schema:
            yield words.format(schema[key])
    for form in schema.get("anyOf", ()):
        yield from _limits(form)


def _refs(schema: Schema) -> Iterator[str]:
    """The names of the types that a schema refers to."""
    for key, value in schema.items():
        if key == "$ref":
            yield _name(value)
        elif isinstance(value, dict):
            yield from _refs(value)
        elif isinstance(value, list):
            for each in value:
                yield from _refs(each) if isinstance(each, dict) else ()


def _name(ref: str) -> str:
    return ref.rpartition("/")[2]


LINKS = {
    "docs": "/docs",
    "openapi": "/openapi.json",
    "models": "/v1/models",
    "cache": "/v1/cache",
    "health": "/health",
    "metrics": "/metrics",
}

router = APIRouter(tags=["pages"], include_in_schema=False)


@router.get("/")
async def show_index(request: Request) -> Response:
    """What runs here, for a person or for a program that asks for JSON."""
    found: dict[str, Any] = {
        "name": "rekindle",
        "version": __version__,
        "models": [
            {
                "id": runtime.name,
                "max_model_len": runtime.ready.context_tokens if runtime.ready else None,
            }
            for runtime in models_of(request).all
        ],
        "links": LINKS,
    }
    if _prefers_json(request.headers.get("accept", "")):
        return JsonResponse(found)
    return _page("index.html", **found)


@router.get("/docs")
def show_docs(request: Request) -> Response:
    """The interface, from its OpenAPI document. Takes tens of milliseconds: FastAPI runs it in a
    thread, because it is no coroutine."""
    return _page("docs.html", reference=Reference(request.app.openapi()))


def _prefers_json(accept: str) -> bool:
    """Whether JSON is named and HTML, which browsers put first, is not."""
    return "json" in accept and "html" not in accept


def _page(template: str, **values: Any) -> Response:
    pages = _pages()
    style = pages.get_template("style.css").render()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return HTMLResponse(
        pages.get_template(template).render(style=style, **values),
        headers={
            "content-security-policy": f"{policy}; frame-ancestors 'none'",
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
        },
    )


@cache
def _pages() -> jinja2.Environment:
    """Everything that is put into a page is escaped, but for the style, which is ours."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader("rekindle.front"), autoescape=True, trim_blocks=True
    )
