"""Pictures as they travel to the runtime. A video is some of its frames, each a picture."""

from __future__ import annotations

from typing import Any

from blake3 import blake3
from msgspec import Struct

TEXT = "text"
IMAGE = "image"
CHANNELS = 3  # red, green and blue, a byte each


class Picture(Struct, frozen=True):
    """A picture as the runtime gets it: decoded, turned upright, on white, resized."""

    width: int
    height: int
    pixels: bytes  # RGB, 8 bits each, row by row
    digest: bytes  # of the size and the pixels: equal pictures have equal digests


def picture(width: int, height: int, pixels: bytes) -> Picture:
    """A picture with its digest."""
    if len(pixels) != width * height * CHANNELS:
        raise ValueError(f"{len(pixels)} bytes are no picture of {width} x {height}")
    return Picture(width, height, pixels, picture_digest(width, height, pixels))


def picture_digest(width: int, height: int, pixels: bytes) -> bytes:
    """BLAKE3 of the width, the height and the pixels: 2 x 8 pixels are not 4 x 4."""
    size = width.to_bytes(4, "little") + height.to_bytes(4, "little")
    return blake3(size).update(pixels).digest()


def count_images(messages: list[dict[str, Any]]) -> int:
    """The image parts of a conversation; the n-th stands for the n-th picture of its request."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return sum(part.get("type") == IMAGE for part in parts if isinstance(part, dict))
