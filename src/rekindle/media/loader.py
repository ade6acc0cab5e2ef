"""The pictures of one request: fetched, decoded and bounded, or one clear error."""

from __future__ import annotations

import asyncio
import os
import stat
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from blake3 import blake3

from rekindle.fair_queue import FairSlots
from rekindle.media.addresses import AllowList
from rekindle.media.decoder import Decoder
from rekindle.media.errors import BadMedia, MediaRefused
from rekindle.media.fetcher import Fetcher
from rekindle.media.jobs import MOST_REQUEST_PIXELS, Frame, ImageJob, Job, Sizing, VideoJob
from rekindle.protocol.media import CHANNELS, Picture, picture

# ----------------------------------------------------------------------
# Files that `file:` URLs name, inside the folders that the operator allows and nowhere else.

_DIRECTORY = getattr(os, "O_DIRECTORY", 0)
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # a pipe would block the open


def read_file_url(url: str, folders: Sequence[Path], most_bytes: int) -> bytes:
    """The file's bytes; raises MediaRefused for anything that is not a file in a folder.

    Whether a file outside of them exists is not told.
    """
    if not folders:
        raise MediaRefused(
            "`file:` URLs are not read: this server's operator has allowed no folder with "
            "--media-folder. Send a `data:` URL."
        )
    try:
        path = Path(os.path.realpath(_path(url)))
        folder = next(each for each in map(_resolved, folders) if path.is_relative_to(each))
        descriptor = _open_below(folder, path.relative_to(folder))
    except (OSError, ValueError, StopIteration):
        raise MediaRefused("There is no such file in a folder that may be read.") from None
    with os.fdopen(descriptor, "rb") as file:
        if os.fstat(descriptor).st_size > most_bytes:
            raise BadMedia(f"A file to read may have at most {most_bytes >> 20} MiB.")
        return file.read(most_bytes)


def _path(url: str) -> str:
    parts = urlsplit(url)
    path = unquote(parts.path, errors="strict")
    if parts.netloc not in ("", "localhost") or not path.startswith("/") or "\0" in path:
        raise ValueError("not a path of this machine")
    return path


def _resolved(folder: Path) -> Path:
    return Path(os.path.realpath(folder))


def _open_below(folder: Path, relative: Path) -> int:
    """Open it step by step from the folder, so that no link that was put there meanwhile is
    followed out of it."""
    flags = os.O_RDONLY | _NO_FOLLOW
    opened = os.open(folder, flags | _DIRECTORY)
    for number, step in enumerate(relative.parts, 1):
        above = opened
        kind = _NO_WAIT if number == len(relative.parts) else _DIRECTORY
        try:
            opened = os.open(step, flags | kind, dir_fd=above)
        finally:
            os.close(above)
    if not stat.S_ISREG(os.fstat(opened).st_mode):  # a folder, a pipe, a device
        os.close(opened)
        raise ValueError("not a file")
    return opened


# ----------------------------------------------------------------------
# Decoded pictures by what they were decoded from, so that no turn of a conversation decodes the
# pictures of the turns before it again.

BUDGET_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class Shot:
    """A picture, and when it was seen if it is of a video."""

    picture: Picture
    at_s: float | None = None


class PictureCache:
    """The least recently used make room for others. A tenant finds what it has sent itself: what
    another has sent shows in no answer's time."""

    def __init__(self, budget_bytes: int = BUDGET_BYTES) -> None:
        self._budget_bytes = budget_bytes
        self._shots: OrderedDict[bytes, list[Shot]] = OrderedDict()
        self.size_bytes = 0

    def get(self, key: bytes) -> list[Shot] | None:
        if key in self._shots:
            self._shots.move_to_end(key)
        return self._shots.get(key)

    def put(self, key: bytes, shots: list[Shot]) -> None:
        if key in self._shots or _size_bytes(shots) > self._budget_bytes:
            return
        self._shots[key] = shots
        self.size_bytes += _size_bytes(shots)
        while self.size_bytes > self._budget_bytes:
            _, oldest = self._shots.popitem(last=False)
            self.size_bytes -= _size_bytes(oldest)


def cache_key(tenant: bytes, job: Job) -> bytes:
    """Of the source's bytes and all that decoding them depends on."""
    settings: tuple[object, ...] = (tenant, job.is_base64, job.sizing.longest, job.sizing.exact)
    if isinstance(job, VideoJob):
        settings += (job.fps, job.max_frames)
    return blake3(repr(settings).encode() + b"\0").update(job.data).digest()


def _size_bytes(shots: list[Shot]) -> int:
    return sum(len(shot.picture.pixels) for shot in shots)


MOST_IMAGE_BYTES = 20 << 20  # of a file
MOST_VIDEO_BYTES = 64 << 20
MOST_PICTURES = 64  # of a request, frames of videos included
MOST_REQUEST_BYTES = 128 << 20  # of files that one request has fetched
FETCHES = 16  # at a time

Hold = Callable[[int], None]  # counts bytes that a request keeps in memory, or refuses them


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Which frames of a video are seen."""

    fps: float
    max_frames: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One image or video of a request."""

    url: str
    sizing: Sizing
    sampling: Sampling | None = None  # None: an image
    where: str = field(default="", compare=False)  # in the request, for error sentences

    @property
    def most_bytes(self) -> int:
        return MOST_VIDEO_BYTES if self.sampling else MOST_IMAGE_BYTES

    def job(self, data: bytes, *, is_base64: bool) -> Job:
        if self.sampling is None:
            return ImageJob(data, is_base64, self.sizing)
        sampling = self.sampling
        return VideoJob(data, is_base64, self.sizing, sampling.fps, sampling.max_frames)


class MediaLoader:
    """Fetches and decodes for all requests; closed with the server."""

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
        self._fetches = FairSlots(FETCHES)
        self._cache = PictureCache()

    async def close(self) -> None:
        self._fetcher.close()
        await self._decoder.close()

    async def load(
        self, sources: Sequence[Source], tenant: bytes, hold: Hold = lambda _bytes: None
    ) -> list[list[Shot]]:
        """The pictures of each source; what is named twice is fetched once. Raises BadMedia."""
        if len(sources) > MOST_PICTURES:
            raise BadMedia(f"A request may have {MOST_PICTURES} pictures, not {len(sources)}.")
        work = _Work(hold)
        distinct = list(dict.fromkeys(sources))
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {
                    each: group.create_task(self._load(each, tenant, work)) for each in distinct
                }
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        loaded = [tasks[each].result() for each in sources]
        _check_sum(loaded)
        return loaded

    async def _load(self, source: Source, tenant: bytes, work: _Work) -> list[Shot]:
        try:
            shots = await self._shots(await self._job(source, tenant, work), tenant)
            work.add_pictures(shots)
        except BadMedia as error:
            raise type(error)(f"`{source.where}`: {error}") from None
        return shots

    async def _shots(self, job: Job, tenant: bytes) -> list[Shot]:
        key = cache_key(tenant, job)
        known = self._cache.get(key)
        if known is not None:
            return known
        is_video = isinstance(job, VideoJob)
        frames = await self._decoder.decode(job, tenant)
        shots = [_shot(frame, is_video=is_video) for frame in frames]
        self._cache.put(key, shots)
        return shots

    async def _job(self, source: Source, tenant: bytes, work: _Work) -> Job:
        """What is to be decoded; the text of a `data:` URL is unpacked by the decoder."""
        scheme = source.url[:5].lower()
        if scheme == "data:":
            return source.job(_base64(source.url, source.most_bytes), is_base64=True)
        if scheme == "file:":
            url, folders = source.url, self._folders
            data = await asyncio.to_thread(read_file_url, url, folders, source.most_bytes)
            work.add_bytes(len(data))
        else:
            async with self._fetches.slot(tenant):
                data = await self._fetcher.fetch(source.url, source.most_bytes, work.add_bytes)
        return source.job(data, is_base64=False)


class _Work:
    """What one request has taken so far."""

    def __init__(self, hold: Hold) -> None:
        self._hold = hold
        self._file_bytes = 0
        self._pixels = 0

    def add_bytes(self, size_bytes: int) -> None:
        """Of files, as they come."""
        self._file_bytes += size_bytes
        if self._file_bytes > MOST_REQUEST_BYTES:
            raise BadMedia(f"The files of a request may have {MOST_REQUEST_BYTES >> 20} MiB.")
        self._hold(size_bytes)

    def add_pictures(self, shots: list[Shot]) -> None:
        pixel_bytes = sum(len(shot.picture.pixels) for shot in shots)
        self._pixels += pixel_bytes // CHANNELS
        if self._pixels > MOST_REQUEST_PIXELS:
            raise _too_many_pixels()
        self._hold(pixel_bytes)


def _shot(frame: Frame, *, is_video: bool) -> Shot:
    seen = picture(frame.width, frame.height, frame.pixels)
    return Shot(seen, frame.at_s if is_video else None)


def _base64(url: str, most_bytes: int) -> bytes:
    """The Base64 text of a `data:` URL; what kind of file it says it holds is not believed."""
    head, comma, text = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise BadMedia("A data: URL is data:image/png;base64, and then the file in Base64.")
    if len(text) * 3 // 4 > most_bytes:
        raise BadMedia(f"A file may have at most {most_bytes >> 20} MiB.")
    try:
        return text.encode("ascii")
    except UnicodeEncodeError:
        raise BadMedia("The data: URL is not valid Base64.") from None


def _check_sum(loaded: list[list[Shot]]) -> None:
    """Of all parts: the same picture may be named often."""
    shots = [shot for each in loaded for shot in each]
    if len(shots) > MOST_PICTURES:
        raise BadMedia(
            f"A request may have {MOST_PICTURES} pictures, frames of videos included; this one "
            f"has {len(shots)}. Send fewer, or lower `max_frames`."
        )
    if sum(shot.picture.width * shot.picture.height for shot in shots) > MOST_REQUEST_PIXELS:
        raise _too_many_pixels()


def _too_many_pixels() -> BadMedia:
    return BadMedia(
        f"The pictures of a request may have {MOST_REQUEST_PIXELS >> 20} x 2^20 pixels together, "
        "after resizing. Send fewer, or smaller ones with `resize`."
    )
