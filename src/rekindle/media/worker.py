"""The decoder process: takes jobs from its standard input, one after the other, and can do little
else. Once it has started it opens no file and no connection, whatever a hostile file makes of it.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import warnings
from pathlib import Path

import av
import numpy as np
from PIL import Image

from rekindle.media.image import FORMATS, DecodeError, decode_image, unpacked
from rekindle.media.jobs import (
    LENGTH,
    Decoded,
    ImageJob,
    Job,
    Result,
    Sizing,
    Undecodable,
    VideoJob,
    framed,
    read_job,
)
from rekindle.media.video import decode_video

MEMORY_BYTES = 3 << 29  # of addresses, beside what the libraries have taken
CPU_S = 60  # of one job; the front ends the process sooner, unless it has gone itself
STREAMS = 3  # standard input, output and error: nothing else may be open


def serve(source: int, sink: int) -> None:
    """Answer jobs until the front closes its end."""
    while (length := _read(source, LENGTH.size)) is not None:
        body = _read(source, LENGTH.unpack(length)[0])
        if body is None:
            return
        _limit_cpu()
        for part in framed(_result(read_job(body))):
            _write(sink, part)


def _result(job: Job) -> Result:
    try:
        data = unpacked(job.data, is_base64=job.is_base64)
        match job:
            case ImageJob(sizing=sizing):
                return Decoded([decode_image(data, sizing)])
            case VideoJob(sizing=sizing, fps=fps, max_frames=max_frames):
                return Decoded(decode_video(data, sizing, fps, max_frames))
    except DecodeError as error:
        return Undecodable(str(error))


def _read(source: int, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        part = os.read(source, min(size - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)


def _write(sink: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(sink, view) :]


def _warm_up() -> None:
    """Decode a file of each format: modules that are imported late cannot be once files are
    closed to us."""
    for format in FORMATS:
        file = io.BytesIO()
        Image.new("RGB", (8, 8)).save(file, format)
        decode_image(file.getvalue(), Sizing(8, (4, 4)))
    decode_video(_tiny_clip(), Sizing(8), 1.0, 2)


def _tiny_clip() -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=1)
        stream.width = stream.height = 16
        frame = av.VideoFrame.from_ndarray(np.zeros((16, 16, 3), np.uint8), format="rgb24")
        container.mux([*stream.encode(frame), *stream.encode()])
    return file.getvalue()


def _confine() -> None:
    """Where the system can: bounded memory, no files, no connections, no core dumps."""
    try:
        import resource
    except ImportError:  # Windows
        return
    _lower(resource.RLIMIT_AS, _mapped_bytes() + MEMORY_BYTES)
    _lower(resource.RLIMIT_NOFILE, STREAMS)
    _lower(resource.RLIMIT_FSIZE, 0)
    _lower(resource.RLIMIT_CORE, 0)


def _lower(limit: int, value: int) -> None:
    import resource

    _, most = resource.getrlimit(limit)
    wanted = value if most == resource.RLIM_INFINITY else min(value, most)
    try:
        resource.setrlimit(limit, (wanted, wanted))
    except (OSError, ValueError):  # macOS has no limit on addresses
        return


def _mapped_bytes() -> int:
    """The addresses that are in use: more on a machine of more cores."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:  # no Linux
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _limit_cpu() -> None:
    """The next job may use this much, beside what the jobs before it have."""
    try:
        import resource
    except ImportError:
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + CPU_S, most))


def main() -> None:
    for stop in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C reaches us as well: the front decides
        signal.signal(stop, signal.SIG_IGN)
    warnings.simplefilter("ignore")  # about odd files, which nobody here can mend
    av.logging.set_level(None)
    _warm_up()
    _limit_cpu()  # and have `resource` imported
    _confine()
    serve(sys.stdin.fileno(), sys.stdout.fileno())


if __name__ == "__main__":
    main()
