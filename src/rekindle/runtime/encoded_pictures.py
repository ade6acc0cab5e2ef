"""Encoded pictures: the vectors that a projector made, kept so that it makes them once."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from blake3 import blake3

from rekindle.engine.base import Matrix
from rekindle.kvcache.disk.picture_files import EncodedPicture, PictureFiles, PictureRead

READ_TIMEOUT_S = 10.0  # then a picture is encoded again


@dataclass(slots=True)
class PictureCounts:
    encoded: int = 0
    hits: int = 0


class OpenFiles(Protocol):
    """Opens the files of encoded pictures in a model's folder; raises OSError."""

    def __call__(self, folder: Path, /, *, limit_bytes: int) -> PictureFiles: ...


class EncodedPictures:
    """Vectors in memory, within a budget, and below that in files; those least recently used go
    first. Called by the engine's thread."""

    def __init__(self, limit_bytes: int, now_s: Callable[[], float] = time.monotonic) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.counts = PictureCounts()
        self.files: PictureFiles | None = None
        self.open_files: OpenFiles | None = None  # None: the model sees none
        self._now_s = now_s
        self._held: OrderedDict[bytes, Matrix] = OrderedDict()
        self._reading: dict[bytes, float] = {}  # since when
        self._arrived: tuple[bytes, Matrix] | None = None  # from a file, too large to be held

    def attach(self, folder: Path, limit_bytes: int) -> bool:
        """Keep them in files of a folder, too, if they may be; raises OSError."""
        if self.open_files is not None:
            self.files = self.open_files(folder, limit_bytes=limit_bytes)
        return self.files is not None

    def get(self, key: bytes) -> Matrix | None:
        vectors = self._held.get(key)
        if vectors is not None:
            self._held.move_to_end(key)
        elif self._arrived and self._arrived[0] == key:
            vectors, self._arrived = self._arrived[1], None
        if vectors is not None:
            self.counts.hits += 1
        return vectors

    def wait_s(self, key: bytes) -> float | None:
        """How long to wait for vectors that are not in memory; None: they are nowhere else, or take
        too long to be read. Has them read."""
        if self.files is None or not (key in self._reading or self.files.holds(key)):
            return None
        if key not in self._reading:
            self._reading[key] = self._now_s()
            self.files.read(key)
        left_s = self._reading[key] + READ_TIMEOUT_S - self._now_s()
        return left_s if left_s > 0 else None

    def on_read(self, read: PictureRead) -> None:
        """A file was read."""
        self._reading.pop(read.key, None)
        if read.picture is not None:
            vectors = _matrix(read.picture)
            self._hold(read.key, vectors)
            if read.key not in self._held:
                self._arrived = (read.key, vectors)

    def put(self, key: bytes, vectors: Matrix, *, durable: bool) -> None:
        """Keep them; in a file, too, if they may be."""
        self._hold(key, vectors)
        if durable and self.files is not None:
            rows, width = vectors.shape
            self.files.write(key, EncodedPicture(rows, width, vectors.data.cast("B")))

    def _hold(self, key: bytes, vectors: Matrix) -> None:
        """In memory, unless they alone are more than there is room for."""
        self._forget(key)
        if vectors.nbytes > self.limit_bytes:
            return
        while self.used_bytes + vectors.nbytes > self.limit_bytes:
            self._forget(next(iter(self._held)))
        self._held[key] = vectors
        self.used_bytes += vectors.nbytes

    def _forget(self, key: bytes) -> None:
        vectors = self._held.pop(key, None)
        if vectors is not None:
            self.used_bytes -= vectors.nbytes  # the only line that subtracts

    def close(self) -> None:
        if self.files is not None:
            self.files.close()


def picture_key(namespace: bytes, digest: bytes) -> bytes:
    """Of a picture of one tenant under one projector, both of which the namespace stands for."""
    return blake3(namespace + digest, derive_key_context="rekindle encoded picture 1").digest()


def _matrix(picture: EncodedPicture) -> Matrix:
    return np.frombuffer(picture.vectors, np.float32).reshape(picture.rows, picture.width)
