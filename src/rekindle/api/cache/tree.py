"""Serves /v1/cache/tree: how stored conversations share their prefixes."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request

from rekindle.api.base.admin import AdminClient
from rekindle.api.base.models import ModelNumber, models_of
from rekindle.protocol import admin as ops

MAX_BRANCHES = 5000

router = APIRouter(tags=["cache"])


class BranchBody(BaseModel):
    """Consecutive blocks that the same conversations use."""

    model_config = ConfigDict(from_attributes=True)

    key: str
    parent: int | None  # its index in the list
    start: int  # number of tokens before it
    tokens: int
    size_bytes: int
    tier: str
    conversations: int


class TreeBody(BaseModel):
    """The stored prefixes of one model, parents first. A shared part occurs once."""

    model: str
    branches: list[BranchBody]
    is_complete: bool


class Trees(BaseModel):
    trees: list[TreeBody]


class BranchTextBody(BaseModel):
    text: str
    is_complete: bool


Limit = Annotated[
    int, Query(ge=1, le=MAX_BRANCHES, description="Largest number of branches for each model.")
]


@router.get("/v1/cache/tree")
async def show_tree(request: Request, number: ModelNumber = None, limit: Limit = 1000) -> Trees:
    """Show how conversations share their stored prefixes, for all models or the numbered one."""
    client, trees = AdminClient.of(request), []
    for runtime in models_of(request).chosen(number):
        tree = await client.request(runtime, ops.ShowTree(limit=limit), ops.PrefixTree)
        branches = [BranchBody.model_validate(each) for each in tree.branches]
        body = TreeBody(model=runtime.name, branches=branches, is_complete=tree.is_complete)
        trees.append(body)
    return Trees(trees=trees)


@router.get("/v1/cache/tree/{key}")
async def show_branch(key: str, request: Request, model: str | None = None) -> BranchTextBody:
    """Show the text of a branch, as the model reads it. Other API keys' text is never shown."""
    client, runtime = AdminClient.of_tenant(request), models_of(request).runtime(model)
    shown = await client.request(runtime, ops.ShowBranch(key), ops.BranchText)
    return BranchTextBody(text=shown.text, is_complete=shown.is_complete)
