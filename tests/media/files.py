"""Makes image and video files, valid and hostile ones."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import av
import numpy as np
from PIL import Image

RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)


def saved(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def plain(
    color: tuple[int, ...] = RED, size: tuple[int, int] = (30, 20), mode: str = "RGB"
) -> Image.Image:
    return Image.new(mode, size, color)


def corner(size: tuple[int, int] = (40, 24)) -> Image.Image:
    """A blue image with a red upper left quarter."""
    image = plain(BLUE, size)
    image.paste(RED, (0, 0, size[0] // 2, size[1] // 2))
    return image


def chunk(kind: bytes, body: bytes) -> bytes:
    checksum = zlib.crc32(kind + body)
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", checksum)


def png(width: int, height: int, data: bytes, *, depth: int = 8, color: int = 2) -> bytes:
    """A PNG whose header claims this size, whatever its data."""
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def bomb(size_bytes: int) -> bytes:
    """Zeros, compressed to a thousandth of their size."""
    squeezer = zlib.compressobj(9)
    piece = bytes(1 << 20)
    parts = [squeezer.compress(piece) for _ in range(size_bytes >> 20)]
    return b"".join([*parts, squeezer.flush()])


def clip(
    frames: int = 40,
    fps: int = 10,
    *,
    format: str = "mp4",
    codec: str = "libx264",
    size: tuple[int, int] = (64, 48),
    gop: int = 12,
    rotation: int = 0,
) -> bytes:
    """A clip that gets lighter: frame n has the grey level 5 n."""
    file = io.BytesIO()
    with av.open(file, "w", format=format) as container:
        stream: Any = container.add_stream(codec, rate=fps)
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        stream.codec_context.gop_size = gop
        if rotation:
            stream.set_display_rotation(rotation)
        for number in range(frames):
            pixels = np.full((size[1], size[0], 3), number * 5 % 256, np.uint8)
            if rotation:
                pixels[: size[1] // 2, : size[0] // 2] = 255  # light in the upper left
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()
