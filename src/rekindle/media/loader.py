"""Loads the images, videos and documents of a request: fetches, decodes and caches them, within
limits."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit
from weakref import WeakValueDictionary

from blake3 import blake3

from rekindle.errors import BadMedia, MediaRefused
from rekindle.fair_queue import FairSlots
from rekindle.lru import ByteLru
from rekindle.media.addresses import AllowList
from rekindle.media.decoder import Decoder
from rekindle.media.fetcher import Fetcher
from rekindle.media.jobs import LIMITS, FrameSampling, MediaJob, Sizing
from rekindle.protocol.requests import CHANNELS, Picture, picture

MAX_FETCHES = 16  # concurrently
MAX_TENANT_FETCHES = 8  # of them, for one tenant, so that slow hosts never take all

Hold = Callable[[int], None]  # counts memory that a request uses, or raises


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSource:
    """One image, video or document of a request."""

    url: str
    sizing: Sizing = field(default_factory=lambda: Sizing(1))  # not used for a document
    sampling: FrameSampling | None = None  # only of a video
    is_document: bool = False
    where: str = field(default="", compare=False)  # the place in the request, for errors

    @property
    def max_bytes(self) -> int:
        if self.is_document:
            return LIMITS.document_bytes
        return LIMITS.video_bytes if self.sampling else LIMITS.image_bytes

    def job(self, data: bytes, *, is_base64: bool) -> MediaJob:
        return MediaJob(data, is_base64, self.sizing, self.sampling, self.is_document)


@dataclass(frozen=True, slots=True)
class LoadedImage:
    image: Picture
    at_s: float | None = None  # the time in the video; None if it is not a video frame


@dataclass(frozen=True, slots=True)
class LoadedText:
    text: str


Loaded = list[LoadedImage] | LoadedText


class MediaLoader:
    """Fetches and decodes media for all requests. It is closed with the server."""

    def __init__(
        self,
        *,
        allowed: Iterable[str] = (),
        folders: Sequence[Path] = (),
        fetcher: Fetcher | None = None,
        decoder: Decoder | None = None,
    ) -> None:
        self._folders = folders
        self._fetcher = fetcher or Fetcher(AllowList(allowed))
        self._decoder = decoder or Decoder()
        self._fetches = FairSlots(MAX_FETCHES)
        self._tenant_fetches: WeakValueDictionary[bytes, asyncio.Semaphore] = WeakValueDictionary()
        self._cache = ByteLru[bytes, Loaded](128 << 20, lambda _key, loaded: _size_bytes(loaded))

    async def close(self) -> None:
        await self._decoder.close()

    def forget_decoded(self) -> None:
        """Forget decoded images. Their keys are hashes, so those of one tenant cannot be told from
        the others, which are decoded again."""
        for key in list(self._cache):
            self._cache.remove(key)

    async def load(
        self, sources: Sequence[MediaSource], tenant: bytes, hold: Hold = lambda _bytes: None
    ) -> list[Loaded]:
        """Return the images or the text of each source. Equal sources are loaded once.

        Raises BadMedia.
        """
        if len(sources) > LIMITS.images:
            raise BadMedia(f"A request may have {LIMITS.images} images, not {len(sources)}.")
        usage = _Usage(hold)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {
                    each: group.create_task(self._load(each, tenant, usage))
                    for each in dict.fromkeys(sources)
                }
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        loaded = [tasks[each].result() for each in sources]
        _check_total([image for each in loaded if isinstance(each, list) for image in each])
        return loaded

    async def _load(self, source: MediaSource, tenant: bytes, usage: _Usage) -> Loaded:
        try:
            loaded = await self._decode(await self._job(source, tenant, usage), tenant)
            usage.add(loaded)
        except BadMedia as error:
            raise type(error)(f"`{source.where}`: {error}") from None
        return loaded

    async def _decode(self, job: MediaJob, tenant: bytes) -> Loaded:
        key = cache_key(tenant, job)
        cached = self._cache.get(key)
        if cached is not None:
            return cached
        loaded: Loaded
        if job.is_document:
            loaded = LoadedText(await self._decoder.extract(job, tenant))
        else:
            loaded = [
                LoadedImage(picture(frame.width, frame.height, frame.pixels), frame.at_s)
                for frame in await self._decoder.decode(job, tenant)
            ]
        self._cache.put(key, loaded)
        return loaded

    async def _job(self, source: MediaSource, tenant: bytes, usage: _Usage) -> MediaJob:
        """Read the source. The decoder process decodes the Base64 text of a `data:` URL."""
        scheme = source.url[:5].lower()
        if scheme == "data:":
            text = _base64(source.url, source.max_bytes)
            return source.job(text, is_base64=True)
        if scheme == "file:":
            url, folders = source.url, self._folders
            data = await asyncio.to_thread(read_file_url, url, folders, source.max_bytes)
            usage.add_bytes(len(data))
        else:
            own = self._tenant_fetches.setdefault(tenant, asyncio.Semaphore(MAX_TENANT_FETCHES))
            async with own, self._fetches.slot(tenant):
                data = await self._fetcher.fetch(
                    source.url, source.max_bytes, usage.add_bytes, tenant=tenant
                )
        return source.job(data, is_base64=False)


class _Usage:
    """Counts the bytes and pixels of one request."""

    def __init__(self, hold: Hold) -> None:
        self._hold = hold
        self._file_bytes = 0
        self._pixels = 0

    def add_bytes(self, size_bytes: int) -> None:
        self._file_bytes += size_bytes
        if self._file_bytes > LIMITS.file_bytes:
            raise BadMedia(f"The files of a request may have {LIMITS.file_bytes >> 20} MiB.")
        self._hold(size_bytes)

    def add(self, loaded: Loaded) -> None:
        size_bytes = _size_bytes(loaded)
        if isinstance(loaded, list):
            self._pixels += size_bytes // CHANNELS
            _check_pixels(self._pixels)
        self._hold(size_bytes)


def _check_total(images: list[LoadedImage]) -> None:
    """Check the limits again, counting a source as often as the request names it."""
    if len(images) > LIMITS.images:
        raise BadMedia(
            f"A request may have {LIMITS.images} images, including video frames; this one "
            f"has {len(images)}. Send fewer, or lower `max_frames`."
        )
    _check_pixels(_size_bytes(images) // CHANNELS)


def _check_pixels(pixels: int) -> None:
    if pixels > LIMITS.pixels:
        raise BadMedia(
            f"The images of a request may have {LIMITS.pixels >> 20} x 2^20 pixels together, "
            "after resizing. Send fewer, or smaller ones with `resize`."
        )


def _size_bytes(loaded: Loaded) -> int:
    if isinstance(loaded, LoadedText):
        return 4 * len(loaded.text)
    return sum(len(each.image.pixels) for each in loaded)


def cache_key(tenant: bytes, job: MediaJob) -> bytes:
    """Hash the file, everything that its decoding depends on, and the tenant, because a hit on the
    images of another tenant would be visible in the response time."""
    settings = (tenant, job.is_base64, job.sizing, job.sampling, job.is_document)
    return blake3(repr(settings).encode() + b"\0").update(job.data).digest()


def _base64(url: str, max_bytes: int) -> bytes:
    """Return the Base64 text of a `data:` URL. Its media type is ignored."""
    head, comma, text = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise BadMedia("A data: URL is data:image/png;base64, followed by the file in Base64.")
    if len(text) * 3 // 4 > max_bytes:
        raise BadMedia(f"A file may have at most {max_bytes >> 20} MiB.")
    try:
        return text.encode("ascii")
    except UnicodeEncodeError:
        raise BadMedia("The data: URL is not valid Base64.") from None


def read_file_url(url: str, folders: Sequence[Path], max_bytes: int) -> bytes:
    """Read a file inside one of the folders. Raises MediaRefused for anything else.

    The error does not reveal whether a file outside of the folders exists.
    """
    if not folders:
        raise MediaRefused(
            "`file:` URLs are not read: this server's operator has allowed no folder with "
            "--media-folder. Send a `data:` URL."
        )
    try:
        allowed = [Path(os.path.realpath(folder)) for folder in folders]
        folder, path = _inside(_path(url), allowed)
        descriptor = _open_below(folder, path.relative_to(folder))
    except (OSError, ValueError, StopIteration):
        raise MediaRefused("There is no such file in an allowed folder.") from None
    with os.fdopen(descriptor, "rb") as file:
        if os.fstat(descriptor).st_size > max_bytes:
            raise BadMedia(f"A file may have at most {max_bytes >> 20} MiB.")
        return file.read(max_bytes)


def _path(url: str) -> str:
    """The path in a URL. `file://a/b` means `/a/b`, because no other machine is asked."""
    parts = urlsplit(url)
    host = "" if parts.netloc == "localhost" else unquote(parts.netloc, errors="strict")
    path = unquote(parts.path, errors="strict")
    if not path.startswith("/") or "\0" in host + path:
        raise ValueError("not a path")
    return f"/{host}{path}"


def _inside(path: str, folders: Sequence[Path]) -> tuple[Path, Path]:
    """The folder that contains the path, and the real path. As in llama.cpp's server, the path may
    also begin at the folder. Raises StopIteration if no folder contains it."""
    whole = Path(os.path.realpath(path))
    candidates = [(folder, whole) for folder in folders]
    candidates += [(each, Path(os.path.realpath(f"{each}/{path}"))) for each in folders]
    return next(
        (folder, real)
        for folder, real in candidates
        if real.is_relative_to(folder) and os.path.lexists(real)
    )


def _open_below(folder: Path, relative: Path) -> int:
    """Open a file step by step, so that a link created after the check is not followed."""

    def flag(name: str) -> int:  # Windows lacks these flags
        value: int = getattr(os, name, 0)
        return value

    flags = os.O_RDONLY | flag("O_NOFOLLOW")
    opened = os.open(folder, flags | flag("O_DIRECTORY"))
    for number, step in enumerate(relative.parts, 1):
        is_last = number == len(relative.parts)
        above = opened
        try:  # without O_NONBLOCK, opening a pipe would block
            kind = flag("O_NONBLOCK") if is_last else flag("O_DIRECTORY")
            opened = os.open(step, flags | kind, dir_fd=above)
        finally:
            os.close(above)
    if not stat.S_ISREG(os.fstat(opened).st_mode):  # a folder, a pipe or a device
        os.close(opened)
        raise ValueError("not a file")
    return opened
