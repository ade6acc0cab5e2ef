"""Encoded pictures: the vectors that a projector made, kept so that it makes them once."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from blake3 import blake3

from rekindle.engine.base import Matrix


@dataclass(slots=True)
class PictureCounts:
    encoded: int = 0
    hits: int = 0


class EncodedPictures:
    """Vectors in memory, within a budget; those least recently used go first."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.counts = PictureCounts()
        self._held: OrderedDict[bytes, Matrix] = OrderedDict()

    def get(self, namespace: bytes, digest: bytes) -> Matrix | None:
        key = _key(namespace, digest)
        vectors = self._held.get(key)
        if vectors is not None:
            self._held.move_to_end(key)
            self.counts.hits += 1
        return vectors

    def put(self, namespace: bytes, digest: bytes, vectors: Matrix) -> None:
        """Keep them, unless they alone are more than there is room for."""
        key = _key(namespace, digest)
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


def _key(namespace: bytes, digest: bytes) -> bytes:
    """Of a picture of one tenant under one projector, which the namespace stands for."""
    return blake3(namespace + digest, derive_key_context="rekindle encoded picture 1").digest()
