"""Provides pictures for tests, and the simplest possible projector."""

from __future__ import annotations

import numpy as np
from blake3 import blake3

from rekindle.engine.base import Matrix
from rekindle.protocol.requests import Picture, picture
from rekindle.tokens import Tokens

BEGIN, END, BETWEEN = 5, 6, 7  # tokens around each picture and between tiles
WIDE_PIXELS = 40


def drawn(seed: int, width: int = 24, height: int = 16) -> Picture:
    """A picture that is determined by its seed."""
    pixels = np.random.default_rng(seed).integers(0, 256, width * height * 3, dtype=np.uint8)
    return picture(width, height, pixels.tobytes())


class PlainProjector:
    """Makes one vector per 8 columns and 8 more, from the pixels, between two tokens.

    A wide picture becomes two tiles with a token between them.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self.encoded = 0

    def tokens(self, width: int, height: int, digest: bytes) -> Tokens:
        count = 8 + width // 8
        tiles = [digest] if width < WIDE_PIXELS else [digest, blake3(digest).digest()]
        first, *rest = (Tokens.of_media(each, count, count) for each in tiles)
        tokens = Tokens.of([BEGIN]) + first
        for tile in rest:
            tokens = tokens + Tokens.of([BETWEEN]) + tile
        return tokens + Tokens.of([END])

    def encode(self, picture: Picture) -> list[Matrix]:
        self.encoded += 1
        seed = int.from_bytes(blake3(picture.pixels).digest()[:8], "big")
        random = np.random.default_rng(seed)
        spans = self.tokens(picture.width, picture.height, picture.digest).media
        shapes = [(span.length, self._width) for span in spans]
        return [random.standard_normal(shape).astype(np.float32) for shape in shapes]
