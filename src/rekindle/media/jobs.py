"""What the front asks of a decoder process, and what it answers: msgpack, each with its length."""

from __future__ import annotations

import struct

import msgspec
from msgspec import Struct

from rekindle.protocol.media import CHANNELS

LENGTH = struct.Struct(">I")
MOST_REQUEST_PIXELS = 32 << 20  # of the decoded pictures of one request together
MOST_RESULT_BYTES = MOST_REQUEST_PIXELS * CHANNELS + (1 << 20)


class Sizing(Struct, frozen=True, array_like=True):
    """The size that a picture gets: exactly `exact` (width, height), or what it has, but that
    neither side is longer than `longest`."""

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
    """RGB, 8 bits each, row by row."""

    width: int
    height: int
    pixels: bytes
    at_s: float = 0.0  # in a video


class Decoded(Struct, tag=True):
    frames: list[Frame]


class Undecodable(Struct, tag=True):
    """The bytes are at fault; the reason is a sentence for the client."""

    reason: str


Result = Decoded | Undecodable

_encoder = msgspec.msgpack.Encoder()
_job_decoder: msgspec.msgpack.Decoder[Job] = msgspec.msgpack.Decoder(Job)
_result_decoder: msgspec.msgpack.Decoder[Result] = msgspec.msgpack.Decoder(Result)


def framed(message: Job | Result) -> tuple[bytes, bytes]:
    """The length and the message, to be written one after the other."""
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)), body


def read_job(body: bytes) -> Job:
    return _job_decoder.decode(body)


def read_result(body: bytes) -> Result:
    """Raises ValueError: whoever has taken a decoder over may answer anything."""
    result = _result_decoder.decode(body)
    for frame in result.frames if isinstance(result, Decoded) else ():
        sides = (frame.width, frame.height)
        if min(sides) < 1 or len(frame.pixels) != frame.width * frame.height * CHANNELS:
            raise ValueError("a frame of another size than it says")
    return result
