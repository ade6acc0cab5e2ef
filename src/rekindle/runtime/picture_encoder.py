"""Vectors for the turns that have come to a picture: those that are kept, or new ones."""

from __future__ import annotations

from rekindle.engine.base import Engine, Matrix
from rekindle.runtime.encoded_pictures import EncodedPictures
from rekindle.runtime.request import RequestPictures
from rekindle.runtime.turn import Turn


class PictureEncoder:
    """Called by the engine's thread. A picture is encoded when a turn has come to it: then it is
    known that its state cannot be had otherwise."""

    def __init__(self, engine: Engine, cache: EncodedPictures) -> None:
        self._engine = engine
        self.cache = cache

    def supply(self, turn: Turn) -> bool:
        """Give a turn the vectors of the picture that it has come to; True when they had to be
        computed. Raises ServerError when they could not be."""
        span, pictures = turn.next_picture, turn.encoded.pictures
        assert span is not None, "the turn has come to a picture"
        vectors = self.cache.get(pictures.namespace, span.digest)
        is_new = vectors is None
        if vectors is None:
            vectors = self._encode(pictures, span.digest)
        turn.shown = (span, vectors)
        return is_new

    def _encode(self, pictures: RequestPictures, digest: bytes) -> Matrix:
        """A picture with several spans is encoded as a whole: they are wanted one after another."""
        picture = pictures.by_span[digest]
        spans = [each for each, whose in pictures.by_span.items() if whose is picture]
        encoded = dict(zip(spans, self._engine.encode_picture(picture), strict=True))
        for each, vectors in encoded.items():
            self.cache.put(pictures.namespace, each, vectors)
        self.cache.counts.encoded += 1
        return encoded[digest]
