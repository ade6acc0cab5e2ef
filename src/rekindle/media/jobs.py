"""Defines the messages between the front and a decoder process: msgpack with a length prefix."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import msgspec
from msgspec import Struct

from rekindle.protocol.requests import CHANNELS

LENGTH = struct.Struct(">I")


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Limits of one request. Video frames count as images."""

    images: int = 64
    image_bytes: int = 20 << 20  # per image file
    video_bytes: int = 64 << 20  # per video file
    file_bytes: int = 128 << 20  # of all files that the request makes the server read
    pixels: int = 32 << 20  # of all decoded images, after resizing


LIMITS = MediaLimits()


class Sizing(Struct, frozen=True, array_like=True):
    """How to resize an image: to exactly `exact` (width, height), or until it fits `longest`."""

    longest: int
    exact: tuple[int, int] | None = None


class ImageJob(Struct, tag=True, frozen=True):
    data: bytes
    is_base64: bool
    sizing: Sizing


class VideoJob(Struct, tag=True, frozen=True):
    data: bytes
    is_base64: bool
    sizing: Sizing
    fps: float
    max_frames: int


Job = ImageJob | VideoJob


class Frame(Struct, array_like=True):
    """An image, or a frame of a video, as 8-bit RGB rows."""

    width: int
    height: int
    pixels: bytes
    at_s: float = 0.0  # the frame's time in its video


class Decoded(Struct, tag=True):
    frames: list[Frame]


class Undecodable(Struct, tag=True):
    """The file is at fault. The reason is a sentence for the client."""

    reason: str


Result = Decoded | Undecodable

_encoder = msgspec.msgpack.Encoder()
_job_decoder: msgspec.msgpack.Decoder[Job] = msgspec.msgpack.Decoder(Job)
_result_decoder: msgspec.msgpack.Decoder[Result] = msgspec.msgpack.Decoder(Result)


def framed(message: Job | Result) -> tuple[bytes, bytes]:
    """Return the length prefix and the message."""
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)), body


def read_job(body: bytes) -> Job:
    return _job_decoder.decode(body)


def read_result(body: bytes) -> Result:
    """Raises ValueError, because a hostile file may have taken over the decoder process."""
    result = _result_decoder.decode(body)
    for frame in result.frames if isinstance(result, Decoded) else ():
        sides = (frame.width, frame.height)
        if min(sides) < 1 or len(frame.pixels) != frame.width * frame.height * CHANNELS:
            raise ValueError("a frame's size does not match its pixels")
    return result
