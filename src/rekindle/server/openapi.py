"""The OpenAPI document: the one that FastAPI writes, with every status that is really answered."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from rekindle.server.responses import documented

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
