"""Samples frames of a video file. Runs in the decoder process.

The container is read twice. The first pass collects the packets, whose times are reliable where the
header may lie. The second pass decodes from the key frame before each sampled frame.
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

from rekindle.media.image import MAX_PIXELS, DecodeError, as_frame, check_size, explained
from rekindle.media.jobs import LIMITS, Frame, FrameSampling, Sizing

MAX_DURATION_S = 3600
MAX_PACKETS = 500_000
CODECS = ("h264", "hevc", "vp8", "vp9", "av1", "mpeg4", "mjpeg")
#: How to turn a frame upright, by PyAV's rotation (counterclockwise) from 0 to 359 degrees.
ROTATIONS = {
    90: Image.Transpose.ROTATE_90,
    180: Image.Transpose.ROTATE_180,
    270: Image.Transpose.ROTATE_270,
}

Packet = Any  # PyAV's, with a known `pts`


def decode_video(data: bytes, sizing: Sizing, sampling: FrameSampling) -> list[Frame]:
    """Decode `fps` frames per second at equal distances, at most `max_frames`.

    Raises DecodeError.
    """
    # FFmpeg must not open other files or addresses, which playlists and references could name.
    options = {"protocol_whitelist": "none", "enable_drefs": "0"}
    with (
        explained("video"),
        av.open(BytesIO(data), format=_container(data), options=options) as container,
    ):
        stream = _video_stream(container)
        packets = _packets(container, stream)
        timeline = Timeline(packets, stream.time_base, stream.average_rate)
        chosen = timeline.sampled(sampling)
        decoded = _decoded(stream.codec_context, packets, chosen)
        frames = _limited(_frame(frame, timeline, sizing) for frame in decoded)
    if not frames:
        raise DecodeError("No frame of the video can be decoded.")
    return frames


class Timeline:
    """The times at which the frames of a stream are shown, according to its packets."""

    def __init__(
        self, packets: list[Packet], time_base: Fraction | None, rate: Fraction | None
    ) -> None:
        self._base = time_base or Fraction(1, 1000)
        self._shown = sorted({packet.pts for packet in packets})
        last = max(packets, key=lambda packet: packet.pts)
        last_s = (last.duration or 0) * self._base or 1 / (rate or Fraction(25))
        self.duration_s = self.at_s(last.pts) + float(last_s)
        if self.duration_s > MAX_DURATION_S:
            raise DecodeError(
                f"A video may last {MAX_DURATION_S} seconds; this one has {self.duration_s:.0f}."
            )

    def at_s(self, pts: int) -> float:
        """Convert a timestamp to seconds since the first frame."""
        return float((pts - self._shown[0]) * self._base)

    def sampled(self, sampling: FrameSampling) -> list[int]:
        """Return the timestamps of the frames shown at equal distances, without repetition."""
        wanted_frames = max(1, math.ceil(self.duration_s * sampling.fps - 1e-6))
        count = min(wanted_frames, sampling.max_frames)
        wanted = [number * self.duration_s / count for number in range(count)]
        shown_s = [self.at_s(pts) for pts in self._shown]
        places = (max(bisect_right(shown_s, at_s + 1e-6) - 1, 0) for at_s in wanted)
        return [self._shown[place] for place in dict.fromkeys(places)]


def _container(data: bytes) -> str:
    """Recognise the container. FFmpeg must not guess, because it would accept playlists."""
    if data[4:8] == b"ftyp":
        return "mov"
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska"
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        return "avi"
    raise DecodeError("The video format is not supported: send MP4, MOV, WebM, MKV or AVI.")


def _video_stream(container: Any) -> VideoStream:
    if not container.streams.video:
        raise DecodeError("The file contains no video.")
    stream: VideoStream = container.streams.video[0]
    codec = stream.codec_context
    if codec.name not in CODECS and codec.name != "libdav1d":
        raise DecodeError(f"The video's codec is not supported: use {', '.join(CODECS)}.")
    check_size(codec.width, codec.height)
    codec.thread_count = 1  # other requests need the other cores
    codec.options = {"max_pixels": str(MAX_PIXELS)}  # a frame may be larger than the header says
    return stream


def _packets(container: Any, stream: VideoStream) -> list[Packet]:
    """Return the packets in decoding order, without those whose time is unknown."""
    found: list[Packet] = []
    for packet in container.demux(stream):
        if packet.pts is None:
            packet.pts = packet.dts
        if packet.pts is not None and packet.size:
            found.append(packet)
        if len(found) > MAX_PACKETS:
            raise DecodeError(f"A video may have at most {MAX_PACKETS} frames.")
    if not found:
        raise DecodeError("The video has no frames.")
    return found


def _decoded(codec: Any, packets: list[Packet], chosen: list[int]) -> Iterator[VideoFrame]:
    """Decode the chosen frames, each from its key frame. A missing frame is the next one."""
    key_frames = [place for place, packet in enumerate(packets) if packet.is_keyframe]

    def key_frame(pts: int) -> int:
        return max((place for place in key_frames if packets[place].pts <= pts), default=0)

    for start, wanted in groupby(chosen, key_frame):
        if codec.is_open:
            codec.flush_buffers()
        yield from _decode_from(codec, packets[start:], list(wanted))


def _decode_from(codec: Any, packets: list[Packet], wanted: list[int]) -> Iterator[VideoFrame]:
    for packet in (*packets, None):  # None makes the codec return the frames it still holds
        for frame in codec.decode(packet):
            if frame.pts is not None and frame.pts >= wanted[0]:
                yield frame
                wanted = [pts for pts in wanted if pts > frame.pts]
                if not wanted:
                    return


def _limited(frames: Iterator[Frame]) -> list[Frame]:
    """Collect the frames, and stop before they use more memory than a request may."""
    kept: list[Frame] = []
    for frame in frames:
        kept.append(frame)
        if sum(each.width * each.height for each in kept) > LIMITS.pixels:
            raise DecodeError(
                f"The frames have more than {LIMITS.pixels >> 20} x 2^20 pixels together: "
                "lower `max_frames`, or make them smaller with `resize`."
            )
    return kept


def _frame(frame: VideoFrame, timeline: Timeline, sizing: Sizing) -> Frame:
    assert frame.pts is not None
    image = Image.fromarray(frame.to_ndarray(format="rgb24"))
    return as_frame(image, sizing, ROTATIONS.get(frame.rotation % 360), timeline.at_s(frame.pts))
