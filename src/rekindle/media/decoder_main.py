"""Runs a decoder process: reads jobs from standard input and writes results to standard output.

Once started, the process cannot open files or connections, even if a hostile file takes it over.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image

from rekindle.media.image import FORMATS, DecodeError, decode_base64, decode_image
from rekindle.media.jobs import (
    DOCUMENTS,
    LENGTH,
    Frame,
    FrameSampling,
    MediaJob,
    Result,
    Sizing,
    Text,
    framed,
    read_job,
)

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

NO_VIDEO = (
    "This server reads no videos, because the package av is not installed. Its operator can add it "
    "with: pip install 'rekindle[video]'"
)

Decode = Callable[[bytes, MediaJob], Result]  # a file that is no longer in Base64
DecodeVideo = Callable[[bytes, Sizing, FrameSampling], list[Frame]]


def main() -> None:
    for stop in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C reaches us too, but the front decides
        signal.signal(stop, signal.SIG_IGN)
    if hasattr(signal, "SIGHUP"):  # a closed terminal does not end the server
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    warnings.simplefilter("ignore")  # warnings about odd files help nobody here
    decode = _document_reader() if sys.argv[1:] == [DOCUMENTS] else _media_decoder()
    if resource is not None:
        _confine()
    serve(sys.stdin.buffer, sys.stdout.buffer, decode)


def _media_decoder() -> Decode:
    _warm_up_images()
    return partial(_frames, _video_decoder())


def _document_reader() -> Decode:
    """Importing the reader takes longer than starting the rest of the process."""
    from rekindle.media import document

    document.warm_up()
    return lambda data, _job: Text(document.extract_text(data))


def serve(source: BinaryIO, sink: BinaryIO, decode: Decode) -> None:
    """Answer jobs until the front closes its end of the pipe."""
    while len(length := source.read(LENGTH.size)) == LENGTH.size:
        body = source.read(LENGTH.unpack(length)[0])
        if resource is not None:
            _limit_cpu()
        sink.writelines(framed(_result(read_job(body), decode)))
        sink.flush()


def _result(job: MediaJob, decode: Decode) -> Result:
    try:
        return decode(decode_base64(job.data) if job.is_base64 else job.data, job)
    except DecodeError as error:
        return str(error)


def _frames(decode_video: DecodeVideo | None, data: bytes, job: MediaJob) -> Result:
    if job.sampling is None:
        return [decode_image(data, job.sizing)]
    if decode_video is None:
        return NO_VIDEO
    return decode_video(data, job.sizing, job.sampling)


def _warm_up_images() -> None:
    """Decode a file of each format, because modules cannot be imported after `_confine`."""
    for format in FORMATS:
        file = io.BytesIO()
        Image.new("RGB", (8, 8)).save(file, format)
        decode_image(file.getvalue(), Sizing(8, (4, 4)))


def _video_decoder() -> DecodeVideo | None:
    """Return the decoder of videos, warmed up. None: the extra `video` is not installed."""
    try:
        import av

        from rekindle.media.video import decode_video
    except ModuleNotFoundError as error:
        if error.name != "av":
            raise
        return None
    av.logging.set_level(None)
    decode_video(_tiny_clip(), Sizing(8), FrameSampling(1.0, 2))
    return decode_video


def _tiny_clip() -> bytes:
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=1)
        stream.width = stream.height = 16
        frame = av.VideoFrame.from_ndarray(np.zeros((16, 16, 3), np.uint8), format="rgb24")
        container.mux([*stream.encode(frame), *stream.encode()])
    return file.getvalue()


def _confine() -> None:
    """Limit memory, and forbid files, connections and core dumps, where the system can."""
    _limit_cpu()
    _lower(resource.RLIMIT_AS, _mapped_bytes() + (3 << 29))  # room for the largest file
    _lower(resource.RLIMIT_NOFILE, 3)  # standard input, output and error
    _lower(resource.RLIMIT_FSIZE, 0)
    _lower(resource.RLIMIT_CORE, 0)


def _lower(limit: int, value: int) -> None:
    _, hard = resource.getrlimit(limit)
    wanted = value if hard == resource.RLIM_INFINITY else min(value, hard)
    with suppress(OSError, ValueError):  # macOS does not limit the address space
        resource.setrlimit(limit, (wanted, wanted))


def _mapped_bytes() -> int:
    """The address space in use. It grows with the number of cores."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:  # not Linux
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _limit_cpu() -> None:
    """Give the next job 60 s of CPU time. Usually the front stops a slow process earlier."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 60, hard))


if __name__ == "__main__":
    main()
