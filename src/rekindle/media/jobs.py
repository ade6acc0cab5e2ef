"""Defines the messages between the front and a decoder process: msgpack with a length prefix."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import msgspec
from msgspec import Struct

from rekindle.protocol.requests import CHANNELS

DOCUMENTS = "documents"  # argument of a decoder process that reads only documents
LENGTH = struct.Struct(">I")


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Limits of one request. Video frames count as images."""

    images: int = 64
    image_bytes: int = 20 << 20  # per image file
    video_bytes: int = 64 << 20  # per video file
    document_bytes: int = 32 << 20  # per file of text
    text_characters: int = 8 << 20  # of a file of text
    file_bytes: int = 128 << 20  # of all files that the request makes the server read
    pixels: int = 32 << 20  # of all decoded images, after resizing


LIMITS = MediaLimits()


class Sizing(Struct, frozen=True, array_like=True):
    """How to resize an image: to exactly `exact` (width, height), or until it fits `longest`."""

    longest: int
    exact: tuple[int, int] | None = None


class FrameSampling(Struct, frozen=True, array_like=True):
    """Which frames of a video to decode."""

    fps: float
    max_frames: int


class MediaJob(Struct, frozen=True, array_like=True):
    """A file to decode: a document, a video if it has a sampling, or else an image."""

    data: bytes
    is_base64: bool
    sizing: Sizing
    sampling: FrameSampling | None = None
    is_document: bool = False

    @property
    def is_slow(self) -> bool:
        """Whether decoding may take long."""
        return self.is_document or self.sampling is not None


class Frame(Struct, array_like=True):
    """An image, or a frame of a video, as 8-bit RGB rows."""

    width: int
    height: int
    pixels: bytes
    at_s: float | None = None  # the time in the video; None if it is not a video frame


class Text(Struct):
    """The text of a document."""

    text: str


Decoded = list[Frame] | Text
Result = Decoded | str  # a string is a sentence for the client that says why the file is at fault


def framed(message: MediaJob | Result) -> tuple[bytes, bytes]:
    """Return the length prefix and the message."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)), body


def read_job(body: bytes) -> MediaJob:
    return msgspec.msgpack.decode(body, type=MediaJob)


def read_result(body: bytes) -> Result:
    """Raises ValueError, because a hostile file may have taken over the decoder process."""
    result: Result = msgspec.msgpack.decode(body, type=Result)
    for frame in result if isinstance(result, list) else ():
        sides = (frame.width, frame.height)
        if min(sides) < 1 or len(frame.pixels) != frame.width * frame.height * CHANNELS:
            raise ValueError("a frame's size does not match its pixels")
    return result
