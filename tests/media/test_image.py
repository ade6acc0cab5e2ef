"""Image files of every format and mode become upright RGB pixels; hostile ones are rejected."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rekindle.media.image import DecodeError, decode_base64, decode_image, fitted
from rekindle.media.jobs import Frame, Sizing
from tests.media.files import BLUE, RED, WHITE, bomb, chunk, corner, plain, png, saved

UNSCALED = Sizing(2048)


def pixels(frame: Frame) -> Any:
    return np.frombuffer(frame.pixels, np.uint8).reshape(frame.height, frame.width, 3)


def decoded(data: bytes, sizing: Sizing = UNSCALED) -> Any:
    return pixels(decode_image(data, sizing))


def near(found: Any, color: tuple[int, ...], by: int = 3) -> bool:
    return bool((abs(found.astype(int) - np.array(color)) <= by).all())


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_every_format_is_recognised_by_its_content(format: str) -> None:
    found = decoded(saved(plain(), format))
    assert found.shape == (20, 30, 3)
    assert near(found, RED)


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_the_first_frame_of_an_animation_is_decoded(format: str) -> None:
    frames = {"save_all": True, "append_images": [plain(BLUE)], "duration": 100}
    assert near(decoded(saved(plain(RED), format, **frames)), RED)


@pytest.mark.parametrize(
    ("orientation", "size", "red_corner"),
    [
        (1, (40, 24), "upper left"), (2, (40, 24), "upper right"), (3, (40, 24), "lower right"),
        (4, (40, 24), "lower left"), (5, (24, 40), "upper left"), (6, (24, 40), "upper right"),
        (7, (24, 40), "lower right"), (8, (24, 40), "lower left"), (9, (40, 24), "upper left"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_an_image_is_turned_upright_by_its_exif_orientation(
    orientation: int, size: tuple[int, int], red_corner: str, format: str
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    found = decoded(saved(corner(), format, exif=exif))
    assert found.shape[1::-1] == size
    row = 3 if "upper" in red_corner else -4
    column = 3 if "left" in red_corner else -4
    assert near(found[row, column], RED, 12)
    assert near(found[-row - 1, -column - 1], BLUE, 12)


@pytest.mark.filterwarnings("ignore")
def test_a_damaged_exif_is_ignored() -> None:
    found = decoded(saved(corner(), "JPEG", exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff"))
    assert found.shape == (24, 40, 3)


@pytest.mark.parametrize(
    "image",
    [
        plain((255, 0, 0, 0), mode="RGBA"),
        plain((0, 0), mode="LA"),
    ],
)
def test_transparent_pixels_become_white(image: Image.Image) -> None:
    assert near(decoded(saved(image)), WHITE, 0)


def test_half_transparent_pixels_are_blended_with_white() -> None:
    assert near(decoded(saved(plain((255, 0, 0, 128), mode="RGBA"))), (255, 127, 127), 1)


@pytest.mark.parametrize("format", ["PNG", "GIF"])
def test_a_transparent_palette_colour_becomes_white(format: str) -> None:
    image = corner().quantize(4)
    place = image.getpixel((0, 0))
    found = decoded(saved(image, format, transparency=place))
    assert near(found[2, 2], WHITE, 0)
    assert near(found[-1, -1], BLUE)


def test_a_transparent_rgb_or_grey_value_becomes_white() -> None:
    assert near(decoded(saved(plain(), transparency=RED)), WHITE, 0)
    assert near(decoded(saved(plain((7,), mode="L"), transparency=7)), WHITE, 0)


def test_16_bits_of_grey_keep_their_high_byte() -> None:
    ramp = np.linspace(0, 65535, 30 * 20).astype(np.uint16).reshape(20, 30)
    found = decoded(saved(Image.fromarray(ramp)))
    assert (found[:, :, 0] == ramp >> 8).all()


def test_16_bits_a_colour_keep_their_high_byte() -> None:
    import zlib

    row = b"\0" + bytes.fromhex("ff7f80ff0102") * 2
    found = decoded(png(2, 1, zlib.compress(row), depth=16))
    assert found.tolist() == [[[255, 128, 1]] * 2]


@pytest.mark.parametrize(
    ("image", "format", "color"),
    [
        (plain((90,), mode="L"), "PNG", (90, 90, 90)),
        (plain((1,), mode="1"), "PNG", WHITE),
        (plain().quantize(2), "PNG", RED),
        (plain((0, 255, 255, 0), mode="CMYK"), "JPEG", RED),
        (plain((90,), mode="L"), "JPEG", (90, 90, 90)),
        (plain((90,), mode="L"), "BMP", (90, 90, 90)),
    ],
)
def test_every_mode_becomes_rgb(image: Image.Image, format: str, color: tuple[int, ...]) -> None:
    assert near(decoded(saved(image, format)), color)


@pytest.mark.parametrize(
    ("size", "sizing", "result"),
    [
        ((30, 20), Sizing(2048), (30, 20)),
        ((4096, 1024), Sizing(2048), (2048, 512)),
        ((1000, 3000), Sizing(512), (171, 512)),
        ((5000, 2), Sizing(512), (512, 1)),
        ((30, 20), Sizing(2048, (64, 64)), (64, 64)),
        ((3000, 20), Sizing(512, (100, 50)), (100, 50)),
    ],
)
def test_an_image_is_shrunk_to_fit_or_resized_to_the_exact_size(
    size: tuple[int, int], sizing: Sizing, result: tuple[int, int]
) -> None:
    assert fitted(*size, sizing) == result


def test_the_size_is_that_of_the_upright_image() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert decoded(saved(corner(), exif=exif), Sizing(2048, (10, 30))).shape == (30, 10, 3)


HOSTILE = {
    "nothing": b"",
    "SVG": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="http://127.0.0.1/"/></svg>',
    "HTML called PNG": b"<!doctype html><html><body>not a picture</body></html>",
    "a script for PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nquit\n",
    "TIFF": saved(plain(), "TIFF"),
    "ICO": saved(plain(size=(16, 16)), "ICO"),
    "PPM": saved(plain(), "PPM"),
    "a PNG's first bytes": b"\x89PNG\r\n\x1a\n",
    "a JPEG's first bytes": b"\xff\xd8\xff\xe0",
    "text": b"a" * 1000,
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_other_files_are_rejected(data: bytes) -> None:
    with pytest.raises(DecodeError, match=r"not supported|damaged or cut short"):
        decode_image(data, UNSCALED)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_a_truncated_image_is_rejected(format: str) -> None:
    noise = np.random.default_rng(1).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    whole = saved(Image.fromarray(noise), format)
    with pytest.raises(DecodeError, match=r"damaged or cut short|not supported"):
        decode_image(whole[: len(whole) // 2], UNSCALED)


@pytest.mark.parametrize("size", [(30_000, 30_000), (65_537, 1), (1, 100_000), (50_000, 50_000)])
def test_the_size_in_the_header_is_checked_before_decoding(size: tuple[int, int]) -> None:
    with pytest.raises(DecodeError, match=f"this one has {size[0]} x {size[1]}"):
        decode_image(png(*size, bomb(1 << 20)), UNSCALED)


def test_data_beyond_the_size_in_the_header_is_not_decompressed() -> None:
    """A file of 64 KiB would decompress to 64 MiB; the test measures the memory of a process."""
    script = (
        "import resource, sys; from rekindle.media import image, jobs\n"
        "data = sys.stdin.buffer.read()\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "frame = image.decode_image(data, jobs.Sizing(2048))\n"
        "after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "print(frame.width, frame.height, after - before)"
    )
    found = subprocess.run(
        [sys.executable, "-c", script],
        input=png(100, 100, bomb(64 << 20)),
        capture_output=True,
        check=True,
    )
    width, height, grown_kib = map(int, found.stdout.split())
    assert (width, height) == (100, 100)
    assert grown_kib < 32 << 10


def test_a_decompression_bomb_in_a_comment_is_rejected() -> None:
    """Comments and colour profiles are compressed, too."""
    whole = saved(plain())
    end = whole.index(b"IDAT") - 4
    note = chunk(b"zTXt", b"note\0\0" + bomb(8 << 20))
    with pytest.raises(DecodeError, match="damaged"):
        decode_image(whole[:end] + note + whole[end:], UNSCALED)


def test_a_large_jpeg_is_decoded_no_larger_than_needed() -> None:
    found = decoded(saved(corner((4000, 2400)), "JPEG"), Sizing(500))
    assert found.shape == (300, 500, 3)
    assert near(found[20, 20], RED)
    assert near(found[-20, -20], BLUE)


def test_base64_is_decoded_strictly() -> None:
    assert decode_base64(b"cGljdHVyZQ==") == b"picture"
    for wrong in (b"cGljdHVyZQ=", b"cGlj*dHVy", b"cG lj", b"cGlj\n"):
        with pytest.raises(DecodeError, match="not valid Base64"):
            decode_base64(wrong)
