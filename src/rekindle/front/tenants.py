"""Serves /v1/tenants: the tenants of the server, and the removal of everything of one."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request

from rekindle.api.base.admin import AdminClient
from rekindle.api.base.models import models_of
from rekindle.api.base.request import MEDIA
from rekindle.api.cache.entries import RemovedBody, removed_fields
from rekindle.api.responses.background import BACKGROUND
from rekindle.errors import Forbidden, NotFound
from rekindle.http.auth import caller_of, keys_of
from rekindle.http.key_file import KnownKey, parse_digest
from rekindle.http.limits import TenantUse, accounts_of
from rekindle.http.responses import documented
from rekindle.protocol.admin import Removed, RemoveTenant

router = APIRouter(tags=["tenants"])


class TenantBody(BaseModel):
    """A tenant, and what it has used since the start of the server."""

    name: str
    keys: int
    groups: list[str]
    open_turns: int
    requests: int
    refused_requests: int
    computed_prompt_tokens: int
    reused_prompt_tokens: int
    generated_tokens: int


class Tenants(BaseModel):
    tenants: list[TenantBody]


@router.get("/v1/tenants", responses=documented(403))
async def list_tenants(request: Request) -> Tenants:
    """List the tenants whose keys the server accepts. With API keys, it needs an admin key."""
    _check_admin(request)
    used = accounts_of(request).used
    known = list(keys_of(request).known)
    salts = dict.fromkeys(key.salt for key in known)
    return Tenants(
        tenants=[
            _described([key for key in known if key.salt == salt], used.get(salt, TenantUse("")))
            for salt in salts
        ]
    )


def _described(keys: list[KnownKey], usage: TenantUse) -> TenantBody:
    return TenantBody(
        name=keys[0].name,
        keys=len(keys),
        groups=list(dict.fromkeys(group for key in keys for group in key.groups)),
        open_turns=usage.open_turns,
        requests=usage.accepted_requests,
        refused_requests=usage.refused_requests,
        computed_prompt_tokens=usage.computed_prompt_tokens,
        reused_prompt_tokens=usage.reused_prompt_tokens,
        generated_tokens=usage.generated_tokens,
    )


@router.delete(
    "/v1/tenants/{tenant}", response_model_exclude_unset=True, responses=documented(403, 503)
)
async def remove_tenant(tenant: str, request: Request) -> RemovedBody:
    """End the turns of a tenant and remove all that is stored for it, in all loaded models.

    Its keys stay valid.
    """
    _check_admin(request)
    salts = _salts_of(tenant, request)
    models, client = models_of(request).all, AdminClient.of(request)
    for salt in salts:
        for runtime in models:
            runtime.cancel_tenant(salt)
        getattr(request.state, BACKGROUND).forget_tenant(salt)
        accounts_of(request).forget(salt)
    getattr(request.state, MEDIA).forget_decoded()
    removed = await asyncio.gather(
        *(
            client.request(runtime, RemoveTenant(salt), Removed)
            for salt in salts
            for runtime in models
        )
    )
    return RemovedBody(**removed_fields(*removed))


def _salts_of(name: str, request: Request) -> list[bytes]:
    digest = parse_digest(name)
    if digest is not None:
        return [digest]
    found = dict.fromkeys(key.salt for key in keys_of(request).known if key.name == name)
    if not found:
        raise NotFound(f"No API key belongs to a tenant named {name[:64]!r}.", param="tenant")
    return list(found)


def _check_admin(request: Request) -> None:
    if not caller_of(request).admin:
        raise Forbidden("This endpoint is about all tenants, so it needs an admin key.")
