"""Vectors for the turns that have come to a picture: those that are kept, or new ones."""

from __future__ import annotations

from rekindle.engine.base import Engine, Matrix
from rekindle.errors import ServerError
from rekindle.kvcache.block import WriteBack
from rekindle.runtime.encoded_pictures import EncodedPictures, picture_key
from rekindle.runtime.turn import Turn
from rekindle.tokens import Media


class PictureEncoder:
    """Called by the engine's thread. A picture is encoded when a turn has come to it: then it is
    known that its state cannot be had otherwise."""

    def __init__(self, engine: Engine, cache: EncodedPictures) -> None:
        self._engine = engine
        self.cache = cache

    def supply(self, turn: Turn) -> bool:
        """Give a turn the vectors of the picture that it has come to, unless they are still being
        read; True when they had to be computed. Raises ServerError when they could not be."""
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
        """How long a turn still waits for vectors that are being read; None: for none."""
        span = turn.next_picture if turn.wants_vectors else None
        if span is None or not turn.request.reuse:
            return None
        return self.cache.wait_s(picture_key(turn.encoded.pictures.namespace, span.digest))

    def _kept(self, turn: Turn, digest: bytes) -> Matrix | None:
        if not turn.request.reuse:
            return None
        return self.cache.get(picture_key(turn.encoded.pictures.namespace, digest))

    def _encode(self, turn: Turn, span: Media) -> Matrix:
        """A picture with several spans is encoded as a whole: they are wanted one after another."""
        pictures = turn.encoded.pictures
        picture = pictures.by_span[span.digest]
        spans = [each for each, whose in pictures.by_span.items() if whose is picture]
        encoded = dict(zip(spans, self._engine.encode_picture(picture), strict=False))
        self.cache.counts.encoded += 1
        if len(encoded) != len(spans) or len(encoded[span.digest]) != span.length:
            raise ServerError("the projector made more or fewer vectors of a picture than it said")
        if turn.request.reuse:
            durable = turn.lookup.write_back > WriteBack.NEVER
            for each, vectors in encoded.items():
                key = picture_key(pictures.namespace, each)
                self.cache.put(key, vectors, durable=durable)
        return encoded[span.digest]
