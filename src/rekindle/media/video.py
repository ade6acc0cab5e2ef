"""Samples frames of a video file. Runs in the decoder process.

The container is read twice: its packets tell which frames there really are and when, whatever its
header claims; then what is needed for the chosen frames is decoded, from the key frame before each.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from fractions import Fraction
from io import BytesIO
from itertools import groupby
from typing import Any

import av
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from PIL import Image

from rekindle.media.image import MOST_PIXELS, DecodeError, as_frame, check_size
from rekindle.media.jobs import MOST_REQUEST_PIXELS, Frame, Sizing

MOST_DURATION_S = 3600
MOST_PACKETS = 500_000
CODECS = ("h264", "hevc", "vp8", "vp9", "av1", "mpeg4", "mjpeg")
#: ccw, as PyAV has it.
TURNS = {
    90: Image.Transpose.ROTATE_90,
    180: Image.Transpose.ROTATE_180,
    -180: Image.Transpose.ROTATE_180,
    -90: Image.Transpose.ROTATE_270,
    270: Image.Transpose.ROTATE_270,
}

Packet = Any  # of av, with a `pts` here that is known


def decode_video(data: bytes, sizing: Sizing, fps: float, max_frames: int) -> list[Frame]:
    """Frames at equal distances, `fps` a second but not more than `max_frames`; raises
    DecodeError."""
    try:
        with av.open(BytesIO(data), format=_container(data), options=_CLOSED) as container:
            stream = _video_stream(container)
            packets = _packets(container, stream)
            clip = Clip(packets, stream.time_base, stream.average_rate)
            chosen = clip.sampled(fps, max_frames)
            decoded = _decoded(stream.codec_context, packets, chosen)
            frames = _bounded(_frame(frame, clip, sizing) for frame in decoded)
    except DecodeError:
        raise
    except MemoryError:
        raise DecodeError("Decoding the video takes too much memory.") from None
    except Exception as error:  # FFmpeg reports whatever a damaged file leads it to
        raise DecodeError(f"The video is damaged or cut short ({type(error).__name__}).") from None
    if not frames:
        raise DecodeError("No frame of the video can be decoded.")
    return frames


class Clip:
    """When the frames of a stream are shown, by its packets."""

    def __init__(
        self, packets: list[Packet], time_base: Fraction | None, rate: Fraction | None
    ) -> None:
        self._base = time_base or Fraction(1, 1000)
        self._shown = sorted({packet.pts for packet in packets})
        last = max(packets, key=lambda packet: packet.pts)
        last_s = (last.duration or 0) * self._base or 1 / (rate or Fraction(25))
        self.duration_s = self.at_s(last.pts) + float(last_s)
        if self.duration_s > MOST_DURATION_S:
            raise DecodeError(
                f"A video may last {MOST_DURATION_S} seconds; this one has {self.duration_s:.0f}."
            )

    def at_s(self, pts: int) -> float:
        """Since the first frame."""
        return float((pts - self._shown[0]) * self._base)

    def sampled(self, fps: float, max_frames: int) -> list[int]:
        """The frames on show at equal distances from the beginning on, each once, by their pts."""
        count = min(max(1, math.ceil(self.duration_s * fps - 1e-6)), max_frames)
        wanted = [number * self.duration_s / count for number in range(count)]
        shown_s = [self.at_s(pts) for pts in self._shown]
        places = (max(bisect_right(shown_s, at_s + 1e-6) - 1, 0) for at_s in wanted)
        return [self._shown[place] for place in dict.fromkeys(places)]


#: A container must not have FFmpeg open anything else, as playlists and references would.
_CLOSED = {"protocol_whitelist": "none", "enable_drefs": "0"}


def _container(data: bytes) -> str:
    """By its first bytes. Never left to FFmpeg: its playlists name other files."""
    if data[4:8] == b"ftyp":
        return "mov"
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska"
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        return "avi"
    raise DecodeError("It is not a video that is taken: send MP4, MOV, WebM, MKV or AVI.")


def _video_stream(container: Any) -> VideoStream:
    if not container.streams.video:
        raise DecodeError("The file has no video in it.")
    stream: VideoStream = container.streams.video[0]
    codec = stream.codec_context
    if codec.name not in CODECS and codec.name != "libdav1d":
        raise DecodeError(f"The video's codec is not taken: use one of {', '.join(CODECS)}.")
    check_size(codec.width, codec.height)
    codec.thread_count = 1  # other requests need the other cores
    codec.options = {"max_pixels": str(MOST_PIXELS)}  # also where a frame is larger than the header
    return stream


def _packets(container: Any, stream: VideoStream) -> list[Packet]:
    """In the order of decoding; without those that nobody knows the time of."""
    found: list[Packet] = []
    for packet in container.demux(stream):
        if packet.pts is None:
            packet.pts = packet.dts
        if packet.pts is not None and packet.size:
            found.append(packet)
        if len(found) > MOST_PACKETS:
            raise DecodeError(f"A video may have at most {MOST_PACKETS} frames.")
    if not found:
        raise DecodeError("The video has no frames.")
    return found


def _decoded(codec: Any, packets: list[Packet], chosen: list[int]) -> Iterator[VideoFrame]:
    """The chosen frames, from the key frame before each; where one is missing, the next."""
    starts = [place for place, packet in enumerate(packets) if packet.is_keyframe]

    def start_of(pts: int) -> int:
        return max((place for place in starts if packets[place].pts <= pts), default=0)

    for start, wanted in groupby(chosen, start_of):
        if codec.is_open:
            codec.flush_buffers()
        yield from _run(codec, packets[start:], list(wanted))


def _run(codec: Any, packets: list[Packet], wanted: list[int]) -> Iterator[VideoFrame]:
    for packet in (*packets, None):  # None: what the codec still holds back
        for frame in codec.decode(packet):
            if frame.pts is not None and frame.pts >= wanted[0]:
                yield frame
                wanted = [pts for pts in wanted if pts > frame.pts]
                if not wanted:
                    return


def _bounded(frames: Iterator[Frame]) -> list[Frame]:
    """No more than a request may have anyway, before they take the memory."""
    kept: list[Frame] = []
    for frame in frames:
        kept.append(frame)
        if sum(each.width * each.height for each in kept) > MOST_REQUEST_PIXELS:
            raise DecodeError(
                f"The frames have more than {MOST_REQUEST_PIXELS >> 20} x 2^20 pixels together: "
                "lower `max_frames`, or make them smaller with `resize`."
            )
    return kept


def _frame(frame: VideoFrame, clip: Clip, sizing: Sizing) -> Frame:
    assert frame.pts is not None
    return as_frame(
        Image.fromarray(frame.to_ndarray(format="rgb24")),
        sizing,
        TURNS.get(frame.rotation),
        clip.at_s(frame.pts),
    )
