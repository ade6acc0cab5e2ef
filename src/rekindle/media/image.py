"""Decodes an image file into upright RGB pixels on white. Runs in the decoder process."""

from __future__ import annotations

import binascii
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO

import numpy as np
from PIL import Image, UnidentifiedImageError

from rekindle.media.jobs import Frame, Sizing

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # recognised by their first bytes
MAX_PIXELS = 64 << 20  # in a file; they decode to at most 256 MiB
MAX_SIDE = 1 << 16
#: How to turn an image upright, by the value of its EXIF orientation tag.
ORIENTATIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

Image.MAX_IMAGE_PIXELS = None  # Pillow may only warn about large images; `check_size` raises


class DecodeError(Exception):
    """The file cannot be used. The message is a sentence for the client."""


@contextmanager
def explained(kind: str) -> Iterator[None]:
    """Turn every error into a DecodeError: a damaged file can make a decoder raise anything."""
    try:
        yield
    except DecodeError:
        raise
    except UnidentifiedImageError:
        raise DecodeError(
            "The image format is not supported: send PNG, JPEG, WebP, GIF or BMP."
        ) from None
    except MemoryError:
        raise DecodeError(f"Decoding the {kind} takes too much memory.") from None
    except Exception as error:
        raise DecodeError(f"The {kind} is damaged or cut short ({type(error).__name__}).") from None


def decode_base64(text: bytes) -> bytes:
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except binascii.Error:
        raise DecodeError("The data: URL is not valid Base64.") from None


def decode_image(data: bytes, sizing: Sizing) -> Frame:
    """Decode the first frame of the file. Raises DecodeError."""
    with explained("image"), Image.open(BytesIO(data), formats=FORMATS) as image:
        check_size(*image.size)
        turn = _orientation(image)
        longest = max(sizing.exact or (sizing.longest,))
        image.draft(None, (longest, longest))  # decodes a large JPEG at a fraction of its size
        image.load()
        return as_frame(_blendable(image), sizing, turn)


def check_size(width: int, height: int) -> None:
    """Check the size in the header, before decoding any pixels."""
    if width < 1 or height < 1 or max(width, height) > MAX_SIDE or width * height > MAX_PIXELS:
        raise DecodeError(
            f"An image may have at most {MAX_PIXELS >> 20} x 2^20 pixels; this one has "
            f"{width} x {height}."
        )


def as_frame(
    image: Image.Image, sizing: Sizing, turn: Image.Transpose | None, at_s: float | None = None
) -> Frame:
    """Resize the image, turn it upright and put it on white, in this order, as it may be large."""
    sideways = turn in [ORIENTATIONS[tag] for tag in (5, 6, 7, 8)]
    width, height = fitted(*(image.size[::-1] if sideways else image.size), sizing)
    resized = (height, width) if sideways else (width, height)
    if image.size != resized:
        image = image.resize(resized, Image.Resampling.BICUBIC)
    if turn is not None:
        image = image.transpose(turn)
    return Frame(*image.size, _on_white(image).tobytes(), at_s)


def fitted(width: int, height: int, sizing: Sizing) -> tuple[int, int]:
    """Return the size after resizing. Images are enlarged only to an exact size."""
    if sizing.exact is not None:
        return sizing.exact
    longest = max(width, height)
    if longest <= sizing.longest:
        return width, height
    scale = sizing.longest / longest
    return max(1, round(width * scale)), max(1, round(height * scale))


def _orientation(image: Image.Image) -> Image.Transpose | None:
    """Return how to turn the image upright. A damaged EXIF is ignored."""
    try:
        return ORIENTATIONS.get(image.getexif().get(0x0112, 1))
    except Exception:
        return None


def _blendable(image: Image.Image) -> Image.Image:
    """Convert modes that cannot be blended: palettes, transparent colours, 16-bit grey."""
    if image.mode.startswith("I"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))  # Pillow would clip
    if image.mode in ("1", "P", "PA") or "transparency" in image.info:
        return image.convert("RGBA" if image.has_transparency_data else "RGB")
    return image


def _on_white(image: Image.Image) -> Image.Image:
    """Convert to RGB, with white behind transparent pixels."""
    if not image.has_transparency_data:
        return image.convert("RGB")
    seen = image.convert("RGBA")
    white = Image.new("RGBA", seen.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, seen).convert("RGB")
