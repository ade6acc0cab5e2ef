"""State in files: /v1/cache/{key}/export and /v1/cache/import.

The file passes through a private folder of this server's, under a name of its own choice: nothing
that a client sends becomes part of a path. A runtime writes and reads it; state itself crosses no
socket between the two.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Annotated, BinaryIO

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from rekindle.api.base.admin import AdminClient
from rekindle.api.base.fields import MOST_ID_CHARACTERS
from rekindle.api.base.models import ModelNumber, models_of
from rekindle.api.cache.entries import EntryBody, entry_body
from rekindle.config import Config
from rekindle.errors import BadRequest, TooManyRequests
from rekindle.http.auth import caller_of
from rekindle.http.body import LIMITS, BodyTooSlow
from rekindle.http.middleware import FILE_TYPE
from rekindle.http.responses import documented
from rekindle.protocol.admin import EntryInfo, ExportState, ImportState, StateFile
from rekindle.worker.client import RuntimeClient

log = logging.getLogger("rekindle.api")

MOST_TRANSFERS = 2  # at once: each takes as much of the disk as its state, and of memory
SLOWEST_BYTES_S = 64 << 10  # of an upload
TRANSFER_S = 3600.0  # from the first byte of a file to its last
PART_BYTES = 1 << 20
TRANSFERS = "transfers"  # in the state of the application

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
    with ExitStack() as held:
        held.enter_context(_slot(request))
        async with _private_folder() as folder:
            _, found = await client.find(runtimes, ExportState(key, str(folder)), StateFile)
            # It goes on to be there without its name.
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
    """Keep the state in a file as your own. It has to name its tokens in its metadata."""
    models = models_of(request)
    runtime = models.runtime(model, number)
    client = AdminClient.of_tenant(request)
    with _slot(request):
        async with _private_folder() as folder:
            path = folder / "state"
            await _receive(request, path, _most_bytes(runtime, models.config, folder))
            info = await client.request(runtime, ImportState(str(path), session_id), EntryInfo)
    return entry_body(info, runtime.name, admin=False)


class FileStream(StreamingResponse):
    """Sends a file; `close` runs however that ends: not in the parts, which may never start."""

    def __init__(
        self, file: BinaryIO, close: Callable[[], None], headers: Mapping[str, str]
    ) -> None:
        super().__init__(_parts(file), media_type=FILE_TYPE, headers=headers)
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(TRANSFER_S):
                await super().__call__(scope, receive, send)
        except TimeoutError:  # the connection is closed, as the file is not whole
            log.warning("an export was not read within %g seconds", TRANSFER_S)
        finally:
            self._close()


class Transfers:
    """The tenants whose files are on their way."""

    def __init__(self) -> None:
        self._tenants: set[bytes] = set()

    @contextmanager
    def slot(self, tenant: bytes) -> Iterator[None]:
        """Raises TooManyRequests."""
        if tenant in self._tenants:
            raise TooManyRequests(
                "Another file with this API key is being exported or imported; try again when it "
                "is done."
            )
        if len(self._tenants) >= MOST_TRANSFERS:
            raise TooManyRequests(
                f"{MOST_TRANSFERS} files are being exported or imported; try again in a moment."
            )
        self._tenants.add(tenant)
        try:
            yield
        finally:
            self._tenants.remove(tenant)


def _slot(request: Request) -> AbstractContextManager[None]:
    transfers: Transfers = getattr(request.state, TRANSFERS)
    return transfers.slot(caller_of(request).salt)


@asynccontextmanager
async def _private_folder() -> AsyncIterator[Path]:
    """A folder that nobody else can read, as long as it takes."""
    folder = Path(tempfile.mkdtemp(prefix="rekindle-"))
    try:
        yield folder
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def _most_bytes(runtime: RuntimeClient, config: Config, folder: Path) -> int:
    """What the cache could keep, as far as the disk has room to bring it there."""
    free_bytes = shutil.disk_usage(folder).free - config.disk_floor
    kept_bytes = runtime.ready.kept_bytes if runtime.ready else 0
    return min(kept_bytes, max(free_bytes, 0))


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
            limit_s = min(LIMITS.timeout_s + received_bytes / SLOWEST_BYTES_S, TRANSFER_S)
            if time.monotonic() - started_s > limit_s:
                raise BodyTooSlow(round(limit_s))
            await asyncio.to_thread(file.write, part)
    if not received_bytes:
        raise BadRequest("Send the file as the body of the request.", param="file")


async def _parts(file: BinaryIO) -> AsyncIterator[bytes]:
    while part := await asyncio.to_thread(file.read, PART_BYTES):
        yield part
