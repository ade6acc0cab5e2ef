"""Serves GET /: the console for browsers, a description of the server for programs.

The page and its files hold no data, so they need no API key. The page asks for one if the server
has keys. Its sources are in `console/`. `make console` builds them into the folder of the same name
next to this module.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from rekindle.api.base.models import models_of
from rekindle.config import values_in_force
from rekindle.errors import Forbidden, NotFound
from rekindle.http.auth import caller_of
from rekindle.http.responses import JsonResponse, documented
from rekindle.version import __version__
from rekindle.worker.client import RuntimeClient

LINKS = {
    "docs": "/docs",
    "openapi": "/openapi.json",
    "models": "/v1/models",
    "cache": "/v1/cache",
    "health": "/health",
    "metrics": "/metrics",
}
PUBLIC_LINKS = {"health": "/health"}
#: The files of the page, and their types.
FILES = {
    "console.js": "text/javascript; charset=utf-8",
    "console.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "NOTICES.txt": "text/plain; charset=utf-8",
}
#: The page runs its own script only and talks to its own server only.
PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cross-origin-opener-policy": "same-origin",
}

router = APIRouter(tags=["pages"], include_in_schema=False)
settings_router = APIRouter(tags=["server"])


class SettingBody(BaseModel):
    model_config = ConfigDict(populate_by_name=True)

    value: Any
    origin: str = Field(alias="from", description="A file, a variable, a flag, or `default`")


class SettingsInForce(BaseModel):
    settings: dict[str, SettingBody]


@router.get("/")
async def show_console(request: Request) -> Response:
    """Show the console to a browser. Programs get JSON or a short text."""
    accept = request.headers.get("accept", "")
    if "html" in accept:
        return HTMLResponse(_file("index.html"), headers=PAGE_HEADERS)
    found = _description(request)
    return JsonResponse(found) if "json" in accept else PlainTextResponse(_text(found))


@settings_router.get("/v1/internal/settings", responses=documented(403))
async def show_settings(request: Request) -> SettingsInForce:
    """Show the settings in force and where each comes from. With API keys, this needs an admin key.

    Secrets are hidden.
    """
    if not caller_of(request).admin:
        raise Forbidden("The settings belong to the operator, so this endpoint needs an admin key.")
    values = values_in_force(models_of(request).config)
    return SettingsInForce(settings={name: SettingBody(**each) for name, each in values.items()})


@router.get("/console/{name}")
async def show_file(name: str, request: Request) -> Response:
    """Serve a file of the page. Browsers ask again each time, and are told if it is unchanged."""
    if name not in FILES:
        raise NotFound(f"GET /console/{name[:64]} is not served here; see /docs.")
    content = _file(name)
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**PAGE_HEADERS, "etag": etag, "cache-control": "no-cache"}
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    return Response(content, headers={**headers, "content-type": FILES[name]})


def _description(request: Request) -> dict[str, Any]:
    """Somebody without an API key learns only that the server needs one."""
    if caller_of(request).is_unknown:
        return {"name": "rekindle", "needs_key": True, "links": PUBLIC_LINKS}
    models = [_listed(each) for each in models_of(request).all]
    return {"name": "rekindle", "version": __version__, "models": models, "links": LINKS}


def _listed(runtime: RuntimeClient) -> dict[str, Any]:
    ready = runtime.ready
    return {"id": runtime.name, "max_model_len": ready.context_tokens if ready else None}


def _text(found: dict[str, Any]) -> str:
    """The same for a terminal."""
    lines = [f"Rekindle {found.get('version', '')}".rstrip()]
    if found.get("needs_key"):
        lines.append("This server needs an API key: send the header `Authorization: Bearer KEY`.")
    for model in found.get("models", ()):
        context = model["max_model_len"]
        lines.append(f"model {model['id']}: " + (f"{context} tokens" if context else "loading"))
    lines += [f"{name}: {path}" for name, path in found["links"].items()]
    return "\n".join(lines) + "\n"


@cache
def _file(name: str) -> bytes:
    return files("rekindle.front").joinpath("console", name).read_bytes()
