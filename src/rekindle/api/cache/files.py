"""Serves /v1/cache/{key}/export and /v1/cache/import: state as a file.

The runtime writes and reads the file in a private folder, so that KV state does not cross the
socket between front and runtime. Nothing that a client sends becomes part of a path.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Annotated, BinaryIO

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from rekindle.api.base.admin import AdminClient
from rekindle.api.base.fields import Id
from rekindle.api.base.loading import chosen, loaded
from rekindle.api.base.models import ModelNumber, models_of
from rekindle.api.cache.entries import EntryBody, entry_fields
from rekindle.config import Config
from rekindle.errors import BadRequest, StateNotPortable, TooManyRequests
from rekindle.http.auth import caller_of
from rekindle.http.body import LIMITS, BodyTooSlow
from rekindle.http.middleware import FILE_TYPE
from rekindle.http.responses import documented
from rekindle.protocol.admin import EntryInfo, ExportState, ImportState, StateFile
from rekindle.worker.client import RuntimeClient

log = logging.getLogger("rekindle.api")

MAX_TRANSFERS = 2  # concurrently; each uses disk and memory of the size of its state
MIN_UPLOAD_BYTES_S = 64 << 10
MAX_TRANSFER_S = 3600.0
FOLDER_PREFIX = "rekindle-transfer-"  # of temporary folders
TRANSFERS = "transfers"  # key in the application's state

router = APIRouter(tags=["cache"])

SessionName = Annotated[
    Id | None, Query(description="A `session_id` with which requests can continue the state")
]


class FileTooLarge(BadRequest):
    status, code = 413, "body_too_large"

    def __init__(self, max_bytes: int) -> None:
        super().__init__(
            f"The file is larger than the {max_bytes} bytes that there is room for: raise "
            "--ram-cache or --disk-cache, or free disk space."
        )


@router.get(
    "/v1/cache/{key:path}/export",
    response_class=StreamingResponse,
    responses={
        200: {"content": {FILE_TYPE: {"schema": {"type": "string", "format": "binary"}}}},
        **documented(409),
    },
)
async def export(key: str, request: Request, number: ModelNumber = None) -> StreamingResponse:
    """Export an entry of your own as a file for other programs, such as mlx_lm."""
    client = AdminClient.of_tenant(request)
    runtimes = await chosen(request, number)
    with ExitStack() as held:
        held.enter_context(_slot(request))
        async with _private_folder() as folder:
            _, found = await client.find(runtimes, ExportState(key, str(folder)), StateFile)
            # The open file outlives its name and folder.
            file = held.enter_context((folder / found.name).open("rb"))
        name = f"attachment; filename*=utf-8''state{Path(found.name).suffix}"
        headers = {
            "content-disposition": name,
            "content-length": str(found.size_bytes),
            "x-token-count": str(found.token_count),
        }
        return FileStream(file, held.pop_all().close, headers)


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
    """Import a file as an entry of your own. Its metadata must contain its tokens."""
    models = models_of(request)
    runtime = await loaded(request, models.runtime(model, number))
    if not runtime.loaded.has_state_files:  # before the upload is written to disk
        raise StateNotPortable
    client = AdminClient.of_tenant(request)
    with _slot(request):
        async with _private_folder() as folder:
            path = folder / "state"
            await _receive(request, path, _max_bytes(runtime, models.config, folder))
            info = await client.request(runtime, ImportState(str(path), session_id), EntryInfo)
    return EntryBody(**entry_fields(info, runtime.name))


class FileStream(StreamingResponse):
    """Sends a file, then calls `close`. A generator could not close it, as it may never start."""

    def __init__(
        self, file: BinaryIO, close: Callable[[], None], headers: Mapping[str, str]
    ) -> None:
        super().__init__(_parts(file), media_type=FILE_TYPE, headers=headers)
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(MAX_TRANSFER_S):
                await super().__call__(scope, receive, send)
        except TimeoutError:  # the connection is closed, because the file is incomplete
            log.warning("a client did not read an export within %g seconds", MAX_TRANSFER_S)
        finally:
            self._close()


Transfers = set[bytes]  # the tenants whose file is being exported or imported


@contextmanager
def _slot(request: Request) -> Iterator[None]:
    """Limit the transfers: one for each tenant, and a few in all. Raises TooManyRequests."""
    transfers: Transfers = getattr(request.state, TRANSFERS)
    tenant = caller_of(request).salt
    if tenant in transfers:
        raise TooManyRequests(
            "Another file with this API key is being exported or imported; try again when it is "
            "done."
        )
    if len(transfers) >= MAX_TRANSFERS:
        raise TooManyRequests(
            f"{MAX_TRANSFERS} files are being exported or imported; try again in a moment."
        )
    transfers.add(tenant)
    try:
        yield
    finally:
        transfers.remove(tenant)


@asynccontextmanager
async def _private_folder() -> AsyncIterator[Path]:
    """A temporary folder that no other user can read. It is locked while it is used."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
        locked = _lock(folder)
        if locked is not None and folder.exists():
            break
        if locked is not None:  # another server removed it before it was locked
            os.close(locked)
    try:
        yield folder
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        os.close(locked)


def _lock(folder: Path) -> int | None:
    """Return a descriptor that holds the folder's lock, or None if another process holds it.

    The system releases the lock when the process ends, even if it is killed.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # it is gone, or not a folder of ours
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def remove_left_over_folders() -> None:
    """Remove the folders of servers that were killed during a transfer."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        descriptor = _lock(folder)
        if descriptor is not None:
            if os.fstat(descriptor).st_uid == os.getuid():
                shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)


def _max_bytes(runtime: RuntimeClient, config: Config, folder: Path) -> int:
    """The size that the cache can keep and the disk has room for."""
    free_bytes = shutil.disk_usage(folder).free - config.disk_floor
    kept_bytes = runtime.ready.kept_bytes if runtime.ready else 0
    return min(kept_bytes, max(free_bytes, 0))


async def _receive(request: Request, path: Path, max_bytes: int) -> None:
    received_bytes, started_s = 0, time.monotonic()
    if int(request.headers.get("content-length", 0)) > max_bytes:
        raise FileTooLarge(max_bytes)
    with path.open("xb") as file:
        async for part in request.stream():
            received_bytes += len(part)
            if received_bytes > max_bytes:
                raise FileTooLarge(max_bytes)
            limit_s = min(LIMITS.timeout_s + received_bytes / MIN_UPLOAD_BYTES_S, MAX_TRANSFER_S)
            if time.monotonic() - started_s > limit_s:
                raise BodyTooSlow(round(limit_s))
            await asyncio.to_thread(file.write, part)
    if not received_bytes:
        raise BadRequest("Send the file as the body of the request.", param="file")


async def _parts(file: BinaryIO) -> AsyncIterator[bytes]:
    while part := await asyncio.to_thread(file.read, 1 << 20):
        yield part
