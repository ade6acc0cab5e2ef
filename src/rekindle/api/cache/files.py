"""State in files: /v1/cache/{key}/export and /v1/cache/import.

The file passes through a private folder of this server's, under a name of its own choice: nothing
that a client sends becomes part of a path. A runtime writes and reads it; state itself crosses no
socket between the two.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, BinaryIO

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import StreamingResponse

from rekindle.api.cache.schema import EntryBody, entry_body
from rekindle.api.fields import MOST_ID_CHARACTERS
from rekindle.config import Config
from rekindle.errors import BadRequest, TooManyRequests
from rekindle.protocol.admin import EntryInfo, ExportState, ImportState, StateFile
from rekindle.server.admin_client import AdminClient
from rekindle.server.models import ModelNumber, models_of
from rekindle.server.request_body import BODY_S, BodyTooSlow
from rekindle.server.responses import documented

MOST_TRANSFERS = 2  # at once: each takes as much of the disk as its state, and of memory
SLOWEST_BYTES_S = 64 << 10  # of an upload
PART_BYTES = 1 << 20
TRANSFERS = "transfers"  # in the state of the application
FILE_TYPE = "application/octet-stream"

router = APIRouter(tags=["cache"])

SessionName = Annotated[
    str | None,
    Query(
        min_length=1,
        max_length=MOST_ID_CHARACTERS,
        description="A `session_id` by which requests go on from it",
    ),
]


class FileTooLarge(BadRequest):
    status, code = 413, "body_too_large"


@router.get(
    "/v1/cache/{key:path}/export",
    response_class=StreamingResponse,
    responses={
        200: {"content": {FILE_TYPE: {"schema": {"type": "string", "format": "binary"}}}},
        **documented(409),
    },
)
async def export(key: str, request: Request, number: ModelNumber = None) -> StreamingResponse:
    """The state of your own entry as a file that other programs read, mlx_lm for one."""
    client = AdminClient.of_tenant(request)
    runtimes = models_of(request).chosen(number)
    async with _transfer(request) as folder:
        _, found = await client.find(runtimes, ExportState(key, str(folder)), StateFile)
        file = (folder / found.name).open("rb")  # it goes on to be there without its name
    name = f"attachment; filename*=utf-8''state{Path(found.name).suffix}"
    return StreamingResponse(
        _parts(file),
        media_type=FILE_TYPE,
        headers={
            "content-disposition": name,
            "content-length": str(found.size_bytes),
            "x-token-count": str(found.token_count),
        },
    )


@router.post(
    "/v1/cache/import",
    response_model_exclude_unset=True,
    responses=documented(413, 507),
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {FILE_TYPE: {"schema": {"type": "string", "format": "binary"}}},
        }
    },
)
async def import_state(
    request: Request,
    model: str | None = None,
    session_id: SessionName = None,
    number: ModelNumber = None,
) -> EntryBody:
    """Keep the state in a file as your own. It has to name its tokens in its metadata."""
    models = models_of(request)
    runtime = models.runtime(model, number)
    client = AdminClient.of_tenant(request)
    async with _transfer(request) as folder:
        path = folder / "state"
        await _receive(request, path, _most_bytes(models.config, folder))
        info = await client.request(runtime, ImportState(str(path), session_id), EntryInfo)
    return entry_body(info, runtime.name, admin=False)


@asynccontextmanager
async def _transfer(request: Request) -> AsyncIterator[Path]:
    """A folder that nobody else can read, as long as it takes."""
    transfers: asyncio.Semaphore = getattr(request.state, TRANSFERS)
    if transfers.locked():
        raise TooManyRequests(
            f"{MOST_TRANSFERS} files are being exported or imported; try again in a moment."
        )
    async with transfers:
        folder = Path(tempfile.mkdtemp(prefix="rekindle-"))
        try:
            yield folder
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def _most_bytes(config: Config, folder: Path) -> int:
    """What the cache could keep, as far as the disk has room to bring it there."""
    free_bytes = shutil.disk_usage(folder).free - config.disk_floor
    return min(config.ram_cache + config.disk_cache, max(free_bytes, 0))


async def _receive(request: Request, path: Path, most_bytes: int) -> None:
    received_bytes, started_s = 0, time.monotonic()
    with path.open("xb") as file:
        async for part in request.stream():
            received_bytes += len(part)
            if received_bytes > most_bytes:
                raise FileTooLarge(
                    f"The file has more than the {most_bytes} bytes that there is room for: raise "
                    "--ram-cache or --disk-cache, or free some of the disk."
                )
            if time.monotonic() - started_s > BODY_S + received_bytes / SLOWEST_BYTES_S:
                raise BodyTooSlow
            await asyncio.to_thread(file.write, part)
    if not received_bytes:
        raise BadRequest("Send the file as the body of the request.", param="file")


async def _parts(file: BinaryIO) -> AsyncIterator[bytes]:
    with file:
        while part := await asyncio.to_thread(file.read, PART_BYTES):
            yield part
