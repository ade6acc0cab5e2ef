"""Completes FastAPI's OpenAPI document: errors, API keys, answers, and descriptions of fields."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any, is_typeddict

import msgspec
import yaml
from fastapi import FastAPI

from rekindle.http.middleware import OPEN_PATHS
from rekindle.http.responses import ERRORS

EVERY_OPERATION = (400, 401, 404, 421, 429, 431, 500, 503)  # error statuses
REF = "#/components/schemas/"
KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
#: Folders of rekindle.api whose types keep their name where another folder has the same one.
FIRST = ("base", "openai")
BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")

Schema = Mapping[str, Any]


class DocumentedApp(FastAPI):
    """Serves the completed document. It is made when it is first asked for."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = _completed(super().openapi())
        return self.openapi_schema


@cache
def texts() -> dict[str, Any]:
    """The descriptions in `fields.yaml`."""
    content = (resources.files("rekindle.front") / "fields.yaml").read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.safe_load(content)
    return found


def by_section(document: Schema) -> dict[str, list[tuple[str, str, Schema]]]:
    """Group the operations by the headings of their tags, each with method and path."""
    titles = texts()["sections"]
    found: dict[str, list[tuple[str, str, Schema]]] = {title: [] for title in titles.values()}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            tag = (operation.get("tags") or ["other"])[0]
            found.setdefault(titles.get(tag, tag), []).append((method.upper(), path, operation))
    return {title: operations for title, operations in found.items() if operations}


def refs(schema: Any) -> Iterator[str]:
    """Yield the names of the types that a schema refers to."""
    for node in _nodes(schema):
        if isinstance(ref := node.get("$ref"), str):
            yield ref.removeprefix(REF)


def forms_of(schema: Schema) -> list[Schema]:
    """The forms of a type: a message has one for each role, and most types have a single one."""
    return list(schema.get("oneOf", [schema]))


def _completed(document: dict[str, Any]) -> dict[str, Any]:
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            operation["responses"] = _answers(method, operation["responses"])
            operation["operationId"] = "_".join([method, *re.findall(r"\w+", path)])
            operation["security"] = [] if path in OPEN_PATHS else [*({key: []} for key in KEYS), {}]
    components = document["components"]
    components["securitySchemes"] = KEYS
    for name in ("HTTPValidationError", "ValidationError"):  # only 422 refers to them
        components["schemas"].pop(name, None)
    _shorten_names(document)
    _add_answers(document)
    _describe(document)
    _shorten_bounds(document)
    return document


def _answers(method: str, answers: dict[str, Any]) -> dict[str, Any]:
    """Describe the statuses of an operation. An invalid request is a 400, and not FastAPI's 422."""
    failures = {int(status) for status in answers if status not in ("200", "422")}
    failures |= {408, 413, 415} if method == "post" else set()
    [shape] = (content["schema"] for content in answers["400"]["content"].values())
    content = {"application/json": {"schema": shape}}
    return {"200": answers["200"]} | {
        str(status): {"description": ERRORS[status], "content": content}
        for status in sorted(failures)
    }


def _shorten_names(document: dict[str, Any]) -> None:
    """Replace names such as rekindle__api__ollama__schema__ToolCall by OllamaToolCall."""
    schemas = document["components"]["schemas"]
    short = {name: _short_name(name) for name in schemas}
    if len(set(short.values())) < len(short):
        raise ValueError("two types of the OpenAPI document have the same name")
    document["components"]["schemas"] = {short[name]: schemas[name] for name in schemas}
    for node in _nodes(document):
        if isinstance(ref := node.get("$ref"), str):
            node["$ref"] = REF + short[ref.removeprefix(REF)]
        if isinstance(kinds := node.get("mapping"), dict):  # of a discriminator
            node["mapping"] = {
                kind: REF + short[ref.removeprefix(REF)] for kind, ref in kinds.items()
            }


def _short_name(name: str) -> str:
    """Of the types with equal names, those of a dialect begin with the name of its folder."""
    *folders, last = name.split("__")
    dialect = folders[2] if folders[1:2] == ["api"] else ""
    return last if dialect in FIRST else dialect.title().replace("_", "") + last


def _add_answers(document: dict[str, Any]) -> None:
    """Add the types of the answers that the dialects build themselves."""
    from rekindle.front import dialect_answers, openai_answers
    from rekindle.front.dialect_answers import ANSWERS

    found, types = msgspec.json.schema_components(ANSWERS.values(), ref_template=f"{REF}{{name}}")
    schemas = document["components"]["schemas"]
    if same := schemas.keys() & types.keys():
        raise ValueError(f"a request and an answer have types called {', '.join(same)}")
    declared = {**vars(openai_answers), **vars(dialect_answers)}
    for name, schema in types.items():
        if is_typeddict(kind := declared.get(name)):  # its fields are sorted by name
            schema["properties"] = {f: schema["properties"][f] for f in kind.__annotations__}
    schemas |= types
    for operation, schema in zip(ANSWERS, found, strict=True):
        method, path = operation.split()
        answer = document["paths"][path][method.lower()]["responses"]["200"]
        answer["content"]["application/json"] = {"schema": schema}


def _describe(document: dict[str, Any]) -> None:
    """Describe the fields and parameters that have no description at their declaration."""
    fields, parameters = texts()["fields"], texts()["parameters"]
    types = document["components"]["schemas"].items()
    forms = [(name, form) for name, schema in types for form in forms_of(schema)]
    for name, form in forms:
        for field, described in form.get("properties", {}).items():
            if text := fields.get(f"{name}.{field}", fields.get(field)):
                described.setdefault("description", text)
    for operations in document["paths"].values():
        for operation in operations.values():
            for parameter in operation.get("parameters", ()):
                if parameter["name"] in parameters:
                    parameter.setdefault("description", parameters[parameter["name"]])


def _shorten_bounds(document: dict[str, Any]) -> None:
    """Write whole numbers without a fraction and an exponent."""
    for node in _nodes(document):
        for bound in BOUNDS:
            if isinstance(limit := node.get(bound), float) and limit.is_integer():
                node[bound] = int(limit)


def _nodes(value: Any) -> Iterator[dict[str, Any]]:
    """Yield all objects in JSON, the outer ones first."""
    if isinstance(value, dict):
        yield value
        for each in list(value.values()):
            yield from _nodes(each)
    elif isinstance(value, list):
        for each in value:
            yield from _nodes(each)
