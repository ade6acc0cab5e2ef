"""Serves GET /docs, the API reference.

The page contains no scripts and loads nothing. Its style is inline, and the content security policy
allows it by its hash.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jinja2
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from rekindle.front.openapi import BOUNDS, REF, Schema, by_section, forms_of, refs

#: How the page writes the limits in a JSON schema.
LIMIT_TEXTS = {
    "minimum": "from {:,}",
    "exclusiveMinimum": "above {:,}",
    "maximum": "up to {:,}",
    "exclusiveMaximum": "below {:,}",
    "minLength": "at least {} characters",
    "maxLength": "at most {:,} characters",
    "minItems": "at least {} items",
    "maxItems": "at most {:,} items",
}
NOT_EMPTY = ("minLength", "minItems")  # a bound of 1 has a shorter text
UNBOUNDED = 1 << 53  # a larger bound is the range of a data type, which tells a reader nothing

#: Escapes all values except the style, which is ours.
TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("rekindle.front"), autoescape=True, trim_blocks=True
)

router = APIRouter(tags=["pages"], include_in_schema=False)


@router.get("/docs")
def show_docs(request: Request) -> Response:
    """Show the API reference. Not a coroutine, so FastAPI runs it in a thread: it takes long."""
    document = request.app.openapi()
    return _page(
        "docs.html",
        document=document,
        sections=by_section(document),
        parameters_of=parameters_of,
        fields_of=fields_of,
        forms_of=forms_of,
        refs=refs,
    )


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


class DocumentedField(NamedTuple):
    """A parameter of an operation, or a field of an object."""

    name: str
    type: str
    types: list[str]  # the names of the types that it refers to
    required: bool
    limits: str
    default: Any  # None: there is none
    text: str

    @property
    def words(self) -> list[str]:
        """The description of the type, split so that the names of types can be links."""
        names = "|".join(map(re.escape, self.types))
        return re.split(rf"\b({names})\b", self.type) if names else [self.type]

    @property
    def notes(self) -> str:
        """The limits and the default."""
        default = f"default {json.dumps(self.default)}" if self.default is not None else ""
        return "; ".join(filter(None, [self.limits, default]))


def parameters_of(operation: Schema) -> list[DocumentedField]:
    return [
        _field(
            each["name"],
            {"description": each.get("description", ""), **each.get("schema", {})},
            required=each.get("required", False),
        )
        for each in operation.get("parameters", ())
    ]


def fields_of(schema: Schema) -> list[DocumentedField]:
    required = schema.get("required", ())
    return [
        _field(name, each, required=name in required)
        for name, each in schema.get("properties", {}).items()
    ]


def _field(name: str, schema: Schema, *, required: bool) -> DocumentedField:
    return DocumentedField(
        name,
        type=_type(schema),
        types=list(dict.fromkeys(refs(schema))),
        required=required,
        limits="; ".join(dict.fromkeys(_limits(schema))),
        default=schema.get("default"),
        text=schema.get("description", ""),
    )


def _type(schema: Schema) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).removeprefix(REF)
    if "const" in schema or "enum" in schema:
        return " or ".join(json.dumps(each) for each in schema.get("enum", [schema.get("const")]))
    if forms := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(_type(form) for form in forms))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return str(schema.get("type", "any value"))


def _limits(schema: Schema) -> Iterator[str]:
    for key, text in LIMIT_TEXTS.items():
        limit = schema.get(key)
        if limit is None or (key in BOUNDS and abs(limit) >= UNBOUNDED):
            continue
        if limit == 1 and key in NOT_EMPTY:
            yield "not empty"
        else:
            yield text.format(limit)
    for form in schema.get("anyOf", ()):
        yield from _limits(form)
