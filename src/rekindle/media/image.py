"""Decodes an image file into upright RGB pixels on white. Runs in the decoder process."""

from __future__ import annotations

import binascii
from io import BytesIO

import numpy as np
from PIL import Image, UnidentifiedImageError

from rekindle.media.jobs import Frame, Sizing

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # by their first bytes, whatever they are called
MOST_PIXELS = 64 << 20  # of a file; decoded they take up to 256 MiB
MOST_SIDE = 1 << 16
ORIENTATION = 0x0112  # of EXIF
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
SIDEWAYS = (TURNS[5], TURNS[6], TURNS[7], TURNS[8])

Image.MAX_IMAGE_PIXELS = None  # ours is checked instead, and never only warned about


class DecodeError(Exception):
    """The bytes are no picture or video that is taken; the message is a sentence for the client."""


def unpacked(data: bytes, *, is_base64: bool) -> bytes:
    """The file itself, out of the text of a `data:` URL."""
    if not is_base64:
        return data
    try:
        return binascii.a2b_base64(data, strict_mode=True)
    except binascii.Error:
        raise DecodeError("The data: URL is not valid Base64.") from None


def decode_image(data: bytes, sizing: Sizing) -> Frame:
    """The first frame of the file; raises DecodeError."""
    try:
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            check_size(*image.size)
            turn = _turn(image)
            enough = max(sizing.exact or (sizing.longest,))
            image.draft(None, (enough, enough))  # a large JPEG is decoded at a half, a quarter …
            image.load()
            return as_frame(_blendable(image), sizing, turn)
    except DecodeError:
        raise
    except UnidentifiedImageError:
        raise DecodeError(
            "It is not a picture that is taken: send PNG, JPEG, WebP, GIF or BMP."
        ) from None
    except MemoryError:
        raise DecodeError("Decoding the picture takes too much memory.") from None
    except Exception as error:  # Pillow raises whatever a damaged file leads it to
        raise DecodeError(
            f"The picture is damaged or cut short ({type(error).__name__})."
        ) from None


def check_size(width: int, height: int) -> None:
    """By what the header says, before a pixel is decoded."""
    if width < 1 or height < 1 or max(width, height) > MOST_SIDE or width * height > MOST_PIXELS:
        raise DecodeError(
            f"A picture may have at most {MOST_PIXELS >> 20} x 2^20 pixels; this one says it has "
            f"{width} x {height}."
        )


def as_frame(
    image: Image.Image, sizing: Sizing, turn: Image.Transpose | None = None, at_s: float = 0.0
) -> Frame:
    """Upright, resized and on white; resized first, because a picture may be large."""
    swap = turn in SIDEWAYS
    size = fitted(*_swapped(image.size, swap), sizing)
    resized = _swapped(size, swap)
    if image.size != resized:
        image = image.resize(resized, Image.Resampling.BICUBIC)
    if turn is not None:
        image = image.transpose(turn)
    return Frame(*image.size, _on_white(image).tobytes(), at_s)


def _swapped(size: tuple[int, int], swap: bool) -> tuple[int, int]:
    return (size[1], size[0]) if swap else size


def fitted(width: int, height: int, sizing: Sizing) -> tuple[int, int]:
    """The size that a picture of this size gets; nothing is enlarged unless that is asked for."""
    if sizing.exact is not None:
        return sizing.exact
    longest = max(width, height)
    if longest <= sizing.longest:
        return width, height
    scale = sizing.longest / longest
    return max(1, round(width * scale)), max(1, round(height * scale))


def _turn(image: Image.Image) -> Image.Transpose | None:
    """What EXIF says about how the camera was held; a damaged EXIF says nothing."""
    try:
        return TURNS.get(image.getexif().get(ORIENTATION, 1))
    except Exception:
        return None


def _blendable(image: Image.Image) -> Image.Image:
    """In a mode whose values can be blended: no palette, no colour that stands for transparency,
    no 16 bits of grey (which Pillow would cut off at 255)."""
    if image.mode.startswith("I"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("1", "P", "PA") or "transparency" in image.info:
        return image.convert("RGBA" if image.has_transparency_data else "RGB")
    return image


def _on_white(image: Image.Image) -> Image.Image:
    """As RGB; what is transparent shows white."""
    if not image.has_transparency_data:
        return image.convert("RGB")
    seen = image.convert("RGBA")
    white = Image.new("RGBA", seen.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, seen).convert("RGB")
