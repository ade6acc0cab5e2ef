from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rekindle.protocol.requests import Picture, count_images, picture

GREY = bytes([128]) * 48


def test_equal_pixels_have_equal_digests() -> None:
    assert picture(4, 4, GREY).digest == picture(4, 4, bytes(GREY)).digest


def test_another_pixel_or_another_shape_is_another_picture() -> None:
    other = bytes([129]) + GREY[1:]
    digests = {picture(*each).digest for each in [(4, 4, GREY), (4, 4, other), (2, 8, GREY)]}
    assert len(digests) == 3


def test_pixels_that_do_not_fill_the_picture_are_refused() -> None:
    with pytest.raises(ValueError, match="a picture of 4 x 5 cannot have 48 bytes"):
        picture(4, 5, GREY)


def test_a_picture_survives_encoding_and_decoding() -> None:
    sent = picture(4, 4, GREY)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=Picture) == sent


def test_image_parts_are_counted_over_all_messages() -> None:
    image = {"type": "image"}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "image"},
        {"role": "user", "content": [image, {"type": "text", "text": "image"}, image]},
        {"role": "assistant", "content": None},
        {"role": "user", "content": [image]},
    ]
    assert count_images(messages) == 3
