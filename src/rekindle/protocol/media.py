"""Defines how pictures travel to the runtime. A video travels as some of its frames."""

from __future__ import annotations

from typing import Any

from blake3 import blake3
from msgspec import Struct

TEXT = "text"
IMAGE = "image"
CHANNELS = 3  # red, green and blue, one byte each


class Picture(Struct, frozen=True):
    """A picture as the runtime gets it: decoded, upright, on a white background, resized."""

    width: int
    height: int
    pixels: bytes  # RGB, 8 bits per channel, row by row
    digest: bytes  # equal pictures have equal digests


def picture(width: int, height: int, pixels: bytes) -> Picture:
    """Build a picture with its digest."""
    if len(pixels) != width * height * CHANNELS:
        raise ValueError(f"a picture of {width} x {height} cannot have {len(pixels)} bytes")
    return Picture(width, height, pixels, picture_digest(width, height, pixels))


def picture_digest(width: int, height: int, pixels: bytes) -> bytes:
    """Hash the size and the pixels (BLAKE3), so that 2 x 8 pixels differ from 4 x 4."""
    size = width.to_bytes(4, "little") + height.to_bytes(4, "little")
    return blake3(size).update(pixels).digest()


def count_images(messages: list[dict[str, Any]]) -> int:
    """Count the image parts. The n-th part stands for the n-th picture of the request."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return sum(part.get("type") == IMAGE for part in parts if isinstance(part, dict))
