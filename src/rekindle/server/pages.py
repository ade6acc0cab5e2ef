"""Pages for people: GET / and GET /docs. Nothing in them is fetched from elsewhere, or is a script.

Their style is in the page, and its hash in the policy that the browser holds the page to.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from typing import Any

import jinja2
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from rekindle.server.models import models_of
from rekindle.server.reference import Reference
from rekindle.server.responses import JsonResponse
from rekindle.version import __version__

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
        loader=jinja2.PackageLoader("rekindle.server"), autoescape=True, trim_blocks=True
    )
