"""Frames of a video are sampled at equal distances; hostile files are rejected."""

from __future__ import annotations

import numpy as np
import pytest

from rekindle.media import image, video
from rekindle.media.image import DecodeError
from rekindle.media.jobs import Frame, FrameSampling, Sizing
from rekindle.media.video import decode_video
from tests.media.files import clip, plain, png, saved

UNSCALED = Sizing(768)
FOUR_SECONDS = clip(frames=40, fps=10)  # frame n is shown at n / 10 s and has the grey 5 n


def seen(frames: list[Frame]) -> list[tuple[float | None, int]]:
    """Return the time of each frame, and its number, which its grey level encodes."""
    greys = [np.frombuffer(frame.pixels, np.uint8).mean() for frame in frames]
    return [(frame.at_s, round(grey / 5)) for frame, grey in zip(frames, greys, strict=True)]


@pytest.mark.parametrize(
    ("fps", "max_frames", "numbers"),
    [
        (1.0, 16, [0, 10, 20, 30]),
        (2.0, 16, [0, 5, 10, 15, 20, 25, 30, 35]),
        (0.25, 16, [0]),
        (0.1, 16, [0]),
        (0.5, 16, [0, 20]),
        (30.0, 4, [0, 10, 20, 30]),
        (10.0, 5, [0, 8, 16, 24, 32]),
        (1.0, 1, [0]),
        (30.0, 64, list(range(40))),
    ],
)
def test_frames_are_sampled_at_equal_distances(
    fps: float, max_frames: int, numbers: list[int]
) -> None:
    found = decode_video(FOUR_SECONDS, UNSCALED, FrameSampling(fps, max_frames))
    assert seen(found) == [(number / 10, number) for number in numbers]
    assert {(frame.width, frame.height) for frame in found} == {(64, 48)}


@pytest.mark.parametrize(
    ("format", "codec"),
    [
        ("mov", "libx264"),
        ("webm", "libvpx"),
        ("webm", "libvpx-vp9"),
        ("matroska", "libx264"),
        ("avi", "mpeg4"),
    ],
)
def test_common_formats_are_decoded(format: str, codec: str) -> None:
    found = seen(decode_video(clip(format=format, codec=codec), UNSCALED, FrameSampling(1.0, 3)))
    wanted = [0.0, 4 / 3, 8 / 3]
    assert [at_s for at_s, _ in found] == pytest.approx(wanted, abs=0.101)
    assert [number / 10 for _, number in found] == pytest.approx(wanted, abs=0.201)


@pytest.mark.parametrize("gop", [1, 5, 12, 250])
def test_frames_do_not_depend_on_the_distance_of_key_frames(gop: int) -> None:
    found = decode_video(clip(gop=gop), UNSCALED, FrameSampling(10.0, 7))
    assert [number for _, number in seen(found)] == [0, 5, 11, 17, 22, 28, 34]


def test_frames_are_resized() -> None:
    [small] = decode_video(FOUR_SECONDS, Sizing(32), FrameSampling(1.0, 1))
    assert (small.width, small.height) == (32, 24)
    [exact] = decode_video(FOUR_SECONDS, Sizing(32, (50, 40)), FrameSampling(1.0, 1))
    assert (exact.width, exact.height) == (50, 40)


def test_frames_are_turned_upright() -> None:
    [frame] = decode_video(clip(frames=1, rotation=90), UNSCALED, FrameSampling(1.0, 1))
    assert (frame.width, frame.height) == (48, 64)
    pixels = np.frombuffer(frame.pixels, np.uint8).reshape(64, 48, 3)
    light = {
        (row, column): bool(pixels[row, column].mean() > 128)
        for row in (8, -8)
        for column in (8, -8)
    }
    assert light == {(8, 8): False, (8, -8): False, (-8, 8): True, (-8, -8): False}


def test_the_total_number_of_pixels_is_limited() -> None:
    with pytest.raises(DecodeError, match="The frames have more than 32 x 2\\^20 pixels"):
        decode_video(FOUR_SECONDS, Sizing(768, (2048, 2048)), FrameSampling(10.0, 16))


HOSTILE = {
    "nothing": b"",
    "a playlist": b"#EXTM3U\n#EXT-X-MEDIA-SEQUENCE:0\n#EXTINF:10,\nfile:///etc/passwd\n",
    "a list of files": b"ffconcat version 1.0\nfile /etc/passwd\n",
    "a picture": saved(plain()),
    "SVG": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "text": b"text " * 100,
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_other_files_are_rejected(data: bytes) -> None:
    with pytest.raises(DecodeError, match="video format is not supported"):
        decode_video(data, UNSCALED, FrameSampling(1.0, 4))


@pytest.mark.parametrize("keep", [12, 40, 200, 1000])
def test_a_truncated_video_is_rejected(keep: int) -> None:
    with pytest.raises(DecodeError, match=r"damaged or cut short|no frames|no video"):
        decode_video(FOUR_SECONDS[:keep], UNSCALED, FrameSampling(1.0, 4))


def test_an_unsupported_codec_is_rejected() -> None:
    with pytest.raises(DecodeError, match="codec is not supported"):
        decode_video(clip(format="avi", codec="ffv1"), UNSCALED, FrameSampling(1.0, 4))


def test_a_video_that_is_too_long_is_rejected() -> None:
    with pytest.raises(DecodeError, match="may last 3600 seconds"):
        decode_video(
            clip(frames=3601, fps=1, size=(16, 16), codec="mpeg4"), UNSCALED, FrameSampling(1.0, 4)
        )


def test_frames_have_the_same_size_limit_as_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "MAX_PIXELS", 64 * 48 - 1)
    with pytest.raises(DecodeError, match="64 x 48"):
        decode_video(FOUR_SECONDS, UNSCALED, FrameSampling(1.0, 4))


def test_a_frame_larger_than_its_header_says_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The codec rejects it before it allocates memory for the frame."""
    monkeypatch.setattr(video, "check_size", lambda *_size: None)
    monkeypatch.setattr(video, "MAX_PIXELS", 64 * 48 - 1)
    with pytest.raises(DecodeError, match="damaged"):
        decode_video(FOUR_SECONDS, UNSCALED, FrameSampling(1.0, 4))


def test_the_duration_in_the_header_is_ignored() -> None:
    lying = bytearray(FOUR_SECONDS)
    place = bytes(lying).index(b"mvhd") + 20  # the duration, in thousandths of a second
    lying[place : place + 4] = (10**9).to_bytes(4, "big")
    found = decode_video(bytes(lying), UNSCALED, FrameSampling(1.0, 16))
    assert [number for _, number in seen(found)] == [0, 10, 20, 30]


def test_an_image_sent_as_a_video_gets_a_clear_error() -> None:
    with pytest.raises(DecodeError, match="send MP4, MOV, WebM, MKV or AVI"):
        decode_video(png(1, 1, b""), UNSCALED, FrameSampling(1.0, 4))
