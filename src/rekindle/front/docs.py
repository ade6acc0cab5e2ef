"""Serves the pages for people, GET / and GET /docs, and completes the OpenAPI document.

The pages contain no scripts and load nothing. Their style is inline, and the content security
policy allows it by its hash.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jinja2
from fastapi import APIRouter, FastAPI
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from rekindle.api.base.models import models_of
from rekindle.http.auth import caller_of
from rekindle.http.middleware import OPEN_PATHS
from rekindle.http.responses import ERRORS, JsonResponse
from rekindle.version import __version__
from rekindle.worker.client import RuntimeClient

EVERY_OPERATION = (400, 401, 404, 421, 429, 431, 500, 503)  # error statuses
LINKS = {
    "docs": "/docs",
    "openapi": "/openapi.json",
    "models": "/v1/models",
    "cache": "/v1/cache",
    "health": "/health",
    "metrics": "/metrics",
}
PUBLIC_LINKS = {"health": "/health"}
#: How the page writes the limits in a JSON schema.
LIMIT_TEXTS = {
    "minimum": "from {}",
    "exclusiveMinimum": "above {}",
    "maximum": "up to {}",
    "exclusiveMaximum": "below {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
}

#: Escapes all values except the style, which is ours.
TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("rekindle.front"), autoescape=True, trim_blocks=True
)

Schema = Mapping[str, Any]

router = APIRouter(tags=["pages"], include_in_schema=False)


@router.get("/")
async def show_index(request: Request) -> Response:
    """Describe the server, as a page or, for programs that ask for it, as JSON.

    Somebody without an API key learns only that the server needs one.
    """
    found: dict[str, Any] = {"name": "rekindle", "needs_key": True, "links": PUBLIC_LINKS}
    if not caller_of(request).is_unknown:
        found = {
            "name": "rekindle",
            "version": __version__,
            "models": [
                {
                    "id": each.name,
                    "max_model_len": each.ready.context_tokens if each.ready else None,
                }
                for each in models_of(request).all
            ],
            "links": LINKS,
        }
    accept = request.headers.get("accept", "")
    if "json" in accept and "html" not in accept:  # browsers ask for HTML
        return JsonResponse(found)
    return _page("index.html", **found)


def _listed(runtime: RuntimeClient) -> dict[str, Any]:
    ready = runtime.ready
    return {"id": runtime.name, "max_model_len": ready.context_tokens if ready else None}


@router.get("/docs")
def show_docs(request: Request) -> Response:
    """Show the API reference. Not a coroutine, so FastAPI runs it in a thread: it takes long."""
    document = request.app.openapi()
    functions = {"parameters": _parameters, "fields": _fields, "refs": _refs}
    return _page("docs.html", document=document, sections=_by_tag(document), **functions)


def _page(template: str, **values: Any) -> Response:
    style = TEMPLATES.get_template("style.css").render()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return HTMLResponse(
        TEMPLATES.get_template(template).render(style=style, **values),
        headers={
            "content-security-policy": f"{policy}; frame-ancestors 'none'",
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
        },
    )


class DocumentedApp(FastAPI):
    """Adds the errors and the API keys to FastAPI's OpenAPI document."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = _completed(super().openapi())
        return self.openapi_schema


def _completed(document: dict[str, Any]) -> dict[str, Any]:
    schemes = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            answers = operation["responses"]
            # FastAPI documents 422, but here an invalid request is a 400 in the dialect's shape.
            failures = {int(status) for status in answers if status not in ("200", "422")}
            failures |= {408, 413, 415} if method == "post" else set()
            [shape] = (content["schema"] for content in answers["400"]["content"].values())
            content = {"application/json": {"schema": shape}}
            operation["responses"] = {"200": answers["200"]} | {
                str(status): {"description": ERRORS[status], "content": content}
                for status in sorted(failures)
            }
            keys: list[dict[str, list[str]]] = [{name: []} for name in schemes]
            operation["security"] = [] if path in OPEN_PATHS else [*keys, {}]
    components = document["components"]
    for name in ("HTTPValidationError", "ValidationError"):  # only 422 refers to them
        components["schemas"].pop(name, None)
    components["securitySchemes"] = schemes
    return document


class DocumentedField(NamedTuple):
    """A parameter of an operation, or a field of an object."""

    name: str
    type: str
    types: list[str]  # the names of the types that it refers to
    required: bool
    notes: str


def _by_tag(document: Schema) -> dict[str, list[tuple[str, str, Schema]]]:
    """Group the operations of an OpenAPI document by their tag, each with method and path."""
    found: dict[str, list[tuple[str, str, Schema]]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            tag = (operation.get("tags") or ["other"])[0]
            found.setdefault(tag, []).append((method.upper(), path, operation))
    return found


def _parameters(operation: Schema) -> list[DocumentedField]:
    return [
        _field(each["name"], each.get("schema", {}), required=each.get("required", False))
        for each in operation.get("parameters", ())
    ]


def _fields(schema: Schema) -> list[DocumentedField]:
    required = schema.get("required", ())
    return [
        _field(name, each, required=name in required)
        for name, each in schema.get("properties", {}).items()
    ]


def _field(name: str, schema: Schema, *, required: bool) -> DocumentedField:
    notes = [schema["description"]] if "description" in schema else []
    notes += dict.fromkeys(_limits(schema))
    if schema.get("default") is not None:
        notes.append(f"default {json.dumps(schema['default'])}")
    return DocumentedField(name, _type(schema), list(_refs(schema)), required, "; ".join(notes))


def _type(schema: Schema) -> str:
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
    for key, text in LIMIT_TEXTS.items():
        if key in schema:
            yield text.format(schema[key])
    for form in schema.get("anyOf", ()):
        yield from _limits(form)


def _refs(schema: Schema) -> Iterator[str]:
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
