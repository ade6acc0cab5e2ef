"""A decoder process survives every damaged file."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from rekindle.errors import BadMedia
from rekindle.media.decoder import Decoder
from rekindle.media.jobs import FrameSampling, MediaJob, Sizing
from tests.media.files import clip, corner, saved
from tests.support.rounds import rounds

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
CONTAINERS = (("mp4", "libx264"), ("webm", "libvpx"), ("avi", "mpeg4"))


def damaged(whole: bytes, chance: random.Random) -> bytes:
    """Return the file with bytes changed, removed, repeated or replaced."""
    data = bytearray(whole)
    for _ in range(chance.choice((1, 2, 8, 40))):
        place = chance.randrange(len(data))
        match chance.randrange(4):
            case 0:
                data[place] = chance.randrange(256)
            case 1:
                data[place : place + 4] = chance.choice(
                    (b"\xff" * 4, bytes(4), b"\x7f\xff\xff\xff")
                )
            case 2:
                data[place:place] = data[place : place + chance.randrange(64)]
            case 3:
                del data[place : place + chance.randrange(16)]
    return bytes(data or b"x")


def jobs(count: int, seed: int) -> list[MediaJob]:
    chance = random.Random(seed)
    images = [saved(corner(), format) for format in FORMATS]
    videos = [clip(frames=8, format=format, codec=codec) for format, codec in CONTAINERS]
    made: list[MediaJob] = []
    for number in range(count):
        if number % 2:
            data = damaged(chance.choice(videos), chance)
            made.append(MediaJob(data, False, Sizing(768), FrameSampling(10.0, 8)))
        else:
            made.append(MediaJob(damaged(chance.choice(images), chance), False, Sizing(2048)))
    return made


@pytest.mark.long
def test_one_process_decodes_or_rejects_all_damaged_files() -> None:
    """A native crash would show as a new process, or as its error message."""

    async def work() -> tuple[int, int]:
        decoder = Decoder(processes=1)
        decoded = rejected = 0
        crashes: list[bool] = []
        pids = set()
        for job in jobs(rounds(300, 6000), seed=7):
            try:
                await decoder.decode(job, b"")
                decoded += 1
            except BadMedia as error:
                rejected += 1
                crashes += ["made its decoder fail" in str(error)]
            pids |= {process.pid for process in decoder._idle}
        await decoder.close()
        assert not any(crashes)
        assert len(pids) == 1
        return decoded, rejected

    decoded, rejected = asyncio.run(work())
    assert decoded
    assert rejected


def test_without_its_package_a_video_is_refused_with_the_remedy_and_images_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "av.py").write_text("raise ModuleNotFoundError('No module named av', name='av')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async def work() -> None:
        decoder = Decoder(processes=1)
        try:
            video = MediaJob(clip(frames=2), False, Sizing(768), FrameSampling(1.0, 2))
            with pytest.raises(BadMedia, match=r"no videos.*pip install 'rekindle\[video\]'"):
                await decoder.decode(video, b"")
            [frame] = await decoder.decode(MediaJob(saved(corner(), "PNG"), False, Sizing(64)), b"")
            assert frame.width
        finally:
            await decoder.close()

    asyncio.run(work())
