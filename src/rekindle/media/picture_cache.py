"""Decoded pictures by what they were decoded from, so that no turn of a conversation decodes the
pictures of the turns before it again."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from blake3 import blake3

from rekindle.media.jobs import Job, VideoJob
from rekindle.protocol.media import Picture

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
