"""Supplies image vectors to turns: kept ones from memory or disk, or newly encoded ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from blake3 import blake3

from rekindle.engine.base import Engine, Matrix
from rekindle.errors import ServerError
from rekindle.kvcache.block import WriteBack
from rekindle.kvcache.disk.image_files import EncodedPicture, PictureFiles, PictureRead
from rekindle.lru import ByteLru
from rekindle.runtime.schedule.turn import Turn
from rekindle.tokens import Media

# An image is encoded again if its vectors cannot be read from disk within this time.
READ_TIMEOUT_S = 10.0


@dataclass(slots=True)
class PictureCounts:
    encoded: int = 0
    hits: int = 0


class OpenFiles(Protocol):
    """Opens the files of encoded images in a model's folder. Raises OSError."""

    def __call__(self, folder: Path, /, *, limit_bytes: int) -> PictureFiles: ...


class EncodedPictures:
    """Keeps image vectors in memory and in files, each within a budget, in LRU order.

    Called from the engine's thread only.
    """

    def __init__(
        self,
        limit_bytes: int,
        now_s: Callable[[], float] = time.monotonic,
        open_files: OpenFiles | None = None,
    ) -> None:
        """`open_files` is None for a model without vision."""
        self.counts = PictureCounts()
        self.files: PictureFiles | None = None
        self._open_files = open_files
        self._now_s = now_s
        self._held: ByteLru[bytes, Matrix] = ByteLru(limit_bytes, lambda _, vectors: vectors.nbytes)
        self._reading: dict[bytes, float] = {}  # since when
        self._arrived: tuple[bytes, Matrix] | None = None  # from a file, too large to be held

    def attach(self, folder: Path, limit_bytes: int) -> bool:
        """Also keep vectors in files of this folder. Returns False if the model has no vision."""
        if self._open_files is not None:
            self.files = self._open_files(folder, limit_bytes=limit_bytes)
        return self.files is not None

    @property
    def used_bytes(self) -> int:
        return self._held.used_bytes

    def get(self, key: bytes) -> Matrix | None:
        vectors = self._held.get(key)
        if vectors is None and self._arrived and self._arrived[0] == key:
            vectors, self._arrived = self._arrived[1], None
        if vectors is not None:
            self.counts.hits += 1
        return vectors

    def wait_s(self, key: bytes) -> float | None:
        """Start reading vectors that only a file has. Returns how long to wait for them, or None if
        there is no file or reading takes too long."""
        if self.files is None or not (key in self._reading or self.files.holds(key)):
            return None
        if key not in self._reading:
            self._reading[key] = self._now_s()
            self.files.read(key)
        left_s = self._reading[key] + READ_TIMEOUT_S - self._now_s()
        return left_s if left_s > 0 else None

    def on_read(self, read: PictureRead) -> None:
        is_wanted = self._reading.pop(read.key, None) is not None
        if read.picture is not None and is_wanted:
            rows, width = read.picture.rows, read.picture.width
            vectors = np.frombuffer(read.picture.vectors, np.float32).reshape(rows, width)
            if read.key in self._held.put(read.key, vectors):
                self._arrived = (read.key, vectors)

    def put(self, key: bytes, vectors: Matrix, *, durable: bool) -> None:
        """Keep vectors in memory, and in a file if they are `durable`."""
        self._held.put(key, vectors)
        if durable and self.files is not None:
            rows, width = vectors.shape
            self.files.write(key, EncodedPicture(rows, width, vectors.data.cast("B")))

    def drop(self, key: bytes) -> None:
        """Free vectors in memory and in their file."""
        self._held.remove(key)
        self._reading.pop(key, None)  # vectors that arrive later are not kept
        if self._arrived and self._arrived[0] == key:
            self._arrived = None
        if self.files is not None:
            self.files.remove(key)

    def close(self) -> None:
        if self.files is not None:
            self.files.close()


def picture_key(namespace: bytes, digest: bytes) -> bytes:
    """Return the key of an image. The namespace stands for the tenant and the projector."""
    return blake3(namespace + digest, derive_key_context="rekindle encoded picture 1").digest()


@dataclass(frozen=True, slots=True)
class PictureEncoder:
    """Encodes images when prefill reaches them, so images in reused state are never encoded.

    Called from the engine's thread only.
    """

    engine: Engine
    cache: EncodedPictures

    def supply(self, turn: Turn) -> bool:
        """Give a turn the vectors of its next image, unless they are still being read. Returns True
        if the image had to be encoded. Raises ServerError if that fails."""
        span = turn.next_picture
        assert span is not None, "the turn has come to a picture"
        vectors = self._kept(turn, span.digest)
        turn.waits_for_vectors = vectors is None and self.wait_s(turn) is not None
        if turn.waits_for_vectors:
            return False
        is_new = vectors is None
        turn.shown = (span, self._encode(turn, span) if vectors is None else vectors)
        return is_new

    def wait_s(self, turn: Turn) -> float | None:
        """Time that a turn still waits for vectors from a file. None if it does not wait."""
        span = turn.next_picture if turn.wants_vectors else None
        if span is None or not turn.request.reuse:
            return None
        return self.cache.wait_s(picture_key(turn.encoded.pictures.namespace, span.digest))

    def _kept(self, turn: Turn, digest: bytes) -> Matrix | None:
        if not turn.request.reuse:
            return None
        return self.cache.get(picture_key(turn.encoded.pictures.namespace, digest))

    def _encode(self, turn: Turn, span: Media) -> Matrix:
        """Encode an image with all its spans, because prefill needs them one after another."""
        pictures = turn.encoded.pictures
        picture = pictures.by_span[span.digest]
        spans = [each for each, whose in pictures.by_span.items() if whose is picture]
        encoded = dict(zip(spans, self.engine.encode_picture(picture), strict=False))
        self.cache.counts.encoded += 1
        if len(encoded) != len(spans) or len(encoded[span.digest]) != span.length:
            raise ServerError("the projector made more or fewer vectors of a picture than it said")
        if turn.request.reuse:
            durable = turn.lookup.write_back > WriteBack.NEVER
            for each, vectors in encoded.items():
                key = picture_key(pictures.namespace, each)
                self.cache.put(key, vectors, durable=durable)
        return encoded[span.digest]
