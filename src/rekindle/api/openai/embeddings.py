"""POST /v1/embeddings: not served yet, and refused with a clear error."""

from __future__ import annotations

from fastapi import APIRouter

from rekindle.errors import Unsupported

router = APIRouter(tags=["embeddings"])


@router.post("/v1/embeddings", include_in_schema=False)
async def create_embedding() -> None:
    raise Unsupported("embeddings are not supported: this server generates text")
