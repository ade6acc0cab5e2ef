"""Images and videos are loaded from every kind of URL, within the limits of a request."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import pytest

from rekindle.errors import BadMedia, MediaRefused, TooManyRequests
from rekindle.media import loader
from rekindle.media.addresses import AllowList
from rekindle.media.decoder import Decoder
from rekindle.media.fetcher import Fetcher, FetchLimits
from rekindle.media.jobs import LIMITS, Frame, FrameSampling, MediaJob, Sizing
from rekindle.media.loader import (
    MAX_TENANT_FETCHES,
    LoadedImage,
    MediaLoader,
    MediaSource,
    cache_key,
)
from tests.media.attacker import Attacker, attacking
from tests.media.files import BLUE, clip, plain, saved

T = TypeVar("T")
RED_PNG = saved(plain())
TENANT = b"tenant"


class CountingDecoder(Decoder):
    """Outlives the loaders of the tests, because a process takes a while to start."""

    def __init__(self) -> None:
        super().__init__(processes=1)
        self.jobs: list[MediaJob] = []

    async def decode(self, job: MediaJob, tenant: bytes) -> list[Frame]:
        self.jobs.append(job)
        return await super().decode(job, tenant)

    async def close(self) -> None:
        self.jobs.clear()

    async def stop(self) -> None:
        await super().close()


RUNNER, DECODER = asyncio.Runner(), CountingDecoder()


@pytest.fixture(scope="module", autouse=True)
def _one_decoder() -> Iterator[None]:
    with RUNNER:
        yield
        RUNNER.run(DECODER.stop())


@pytest.fixture(scope="module")
def attacker() -> Iterator[Attacker]:
    with attacking() as server:
        server.files["/red.png"] = (RED_PNG, "image/png")
        yield server


def image(url: str) -> MediaSource:
    return MediaSource(url=url, sizing=Sizing(2048), where="messages.0.content.1")


def data_url(file: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(file).decode()}"


def with_loader(
    work: Callable[[MediaLoader, CountingDecoder], Awaitable[T]], folder: Path | None = None
) -> T:
    async def run() -> T:
        folders = [folder] if folder else []
        fetcher = Fetcher(AllowList(["localhost"]), limits=FetchLimits(total_s=60, read_s=60))
        media = MediaLoader(fetcher=fetcher, folders=folders, decoder=DECODER)
        try:
            return await work(media, DECODER)
        finally:
            await media.close()

    return RUNNER.run(run())


def load(*sources: MediaSource, folder: Path | None = None) -> list[list[LoadedImage]]:
    loaded = with_loader(lambda media, _decoder: media.load(sources, TENANT), folder)
    return [each for each in loaded if isinstance(each, list)]


def test_the_same_image_has_the_same_digest_from_every_kind_of_url(
    attacker: Attacker, tmp_path: Path
) -> None:
    (tmp_path / "other name.bmp").write_bytes(RED_PNG)
    found = load(
        image(data_url(RED_PNG)),
        image(data_url(saved(plain(), "BMP"), "text/html")),
        image(attacker.url("/red.png", "localhost")),
        image(f"file://{tmp_path}/other%20name.bmp"),
        folder=tmp_path,
    )
    assert len({each.image.digest for [each] in found}) == 1
    assert [each.at_s for [each] in found] == [None] * 4


def test_a_changed_file_at_the_same_url_is_noticed(attacker: Attacker) -> None:
    async def work(media: MediaLoader, _decoder: CountingDecoder) -> list[bytes]:
        digests = []
        for color in ((255, 0, 0), BLUE):
            attacker.files["/changing.png"] = (saved(plain(color)), "image/png")
            url = attacker.url("/changing.png", "localhost")
            [images] = await media.load([image(url)], TENANT)
            assert isinstance(images, list)
            digests += [each.image.digest for each in images]
        return digests

    assert len(set(with_loader(work))) == 2


def test_a_turn_does_not_decode_the_images_of_earlier_turns_again() -> None:
    async def work(media: MediaLoader, decoder: CountingDecoder) -> None:
        red, blue = image(data_url(RED_PNG)), image(data_url(saved(plain(BLUE))))
        await media.load([red], TENANT)
        await media.load([red, blue], TENANT)
        await media.load([red, blue, red], TENANT)
        assert len(decoder.jobs) == 2
        await media.load([red], b"another tenant")
        assert len(decoder.jobs) == 3
        assert media._cache.used_bytes == 3 * 30 * 20 * 3

    with_loader(work)


def test_a_url_named_twice_is_fetched_once(attacker: Attacker) -> None:
    attacker.requests.clear()
    url = attacker.url("/red.png", "localhost")
    assert len(load(image(url), image(url), image(url))) == 3
    assert len(attacker.requests) == 1


def test_a_video_is_loaded_as_frames_with_their_times() -> None:
    sampling = FrameSampling(fps=1.0, max_frames=3)
    url = data_url(clip(), "video/mp4")
    [frames] = load(MediaSource(url=url, sizing=Sizing(768), sampling=sampling))
    assert [each.at_s for each in frames] == [0.0, 1.3, 2.6]
    assert len({each.image.digest for each in frames}) == 3


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("data:image/png;base64,", "image format is not supported"),
        ("data:image/png;base64,%%%", "not valid Base64"),
        ("data:image/png;base64,é", "not valid Base64"),
        ("data:image/png,abc", "A data: URL is"),
        ("data:image/png;base64", "A data: URL is"),
        (data_url(b"<svg/>", "image/svg+xml"), "image format is not supported"),
    ],
)
def test_an_error_about_a_data_url_names_its_place_in_the_request(url: str, sentence: str) -> None:
    with pytest.raises(BadMedia, match=rf"^`messages\.0\.content\.1`: .*{sentence}"):
        load(image(url))


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "http://127.0.0.1:1/", "ftp://localhost/", "x", "", "cid:1"]
)
def test_a_forbidden_url_is_rejected(url: str) -> None:
    with pytest.raises(MediaRefused):
        load(image(url))


def test_the_size_of_a_file_is_limited(attacker: Attacker) -> None:
    attacker.files["/large"] = (bytes(1001), "")
    with patch.object(loader, "LIMITS", replace(LIMITS, image_bytes=1000)):
        for url in (data_url(bytes(1004)), attacker.url("/large", "localhost")):
            with pytest.raises(BadMedia, match="may have at most 0 MiB"):
                load(image(url))


def test_the_number_of_images_in_a_request_is_limited() -> None:
    red = image(data_url(RED_PNG))
    assert len(load(*[red] * 64)) == 64
    with pytest.raises(BadMedia, match="64 images, not 65"):
        load(*[red] * 65)


def test_video_frames_count_as_images() -> None:
    url = data_url(clip(frames=33, fps=10), "video/mp4")
    video = MediaSource(
        url=url, sizing=Sizing(768), sampling=FrameSampling(fps=30.0, max_frames=64)
    )
    with pytest.raises(BadMedia, match="this one has 66"):
        load(video, video)


def test_the_total_number_of_pixels_is_limited() -> None:
    with patch.object(loader, "LIMITS", replace(LIMITS, pixels=1000)):
        assert load(image(data_url(RED_PNG)))
        for sources in (
            [image(data_url(RED_PNG)), image(data_url(saved(plain(BLUE))))],
            [image(data_url(RED_PNG))] * 2,
        ):
            with pytest.raises(BadMedia, match="pixels together"):
                load(*sources)


def test_the_total_size_of_the_files_is_limited(attacker: Attacker) -> None:
    attacker.files["/blue.png"] = (saved(plain(BLUE)), "")
    urls = [attacker.url(path, "localhost") for path in ("/red.png", "/blue.png")]
    with (
        patch.object(loader, "LIMITS", replace(LIMITS, file_bytes=len(RED_PNG))),
        pytest.raises(BadMedia, match="files of a request"),
    ):
        load(*map(image, urls))


def test_the_memory_of_a_request_is_counted_and_may_be_refused(attacker: Attacker) -> None:
    held: list[int] = []

    def hold(size_bytes: int) -> None:
        held.append(size_bytes)
        if len(held) > 1:
            raise TooManyRequests("too much")

    async def work(media: MediaLoader, _decoder: CountingDecoder) -> None:
        await media.load([image(attacker.url("/red.png", "localhost"))], TENANT, hold)

    with pytest.raises(TooManyRequests):
        with_loader(work)
    assert held == [len(RED_PNG), 30 * 20 * 3]


def test_one_invalid_image_cancels_the_others(attacker: Attacker) -> None:
    slow = image(attacker.url("/slow", "localhost"))
    with pytest.raises(BadMedia, match="format is not supported"):
        load(slow, image(data_url(b"text")))


def test_cache_keys_differ_by_tenant_file_and_settings() -> None:
    jobs: list[MediaJob] = [
        MediaJob(b"x", False, Sizing(512)),
        MediaJob(b"y", False, Sizing(512)),
        MediaJob(b"x", True, Sizing(512)),
        MediaJob(b"x", False, Sizing(2048)),
        MediaJob(b"x", False, Sizing(512, (1, 2))),
        MediaJob(b"x", False, Sizing(512), FrameSampling(1.0, 4)),
        MediaJob(b"x", False, Sizing(512), FrameSampling(2.0, 4)),
        MediaJob(b"x", False, Sizing(512), FrameSampling(1.0, 5)),
    ]
    keys = {cache_key(tenant, job) for tenant in (b"a", b"b") for job in jobs}
    assert len(keys) == 2 * len(jobs)


def test_a_tenant_leaves_fetches_to_others() -> None:
    """One whose hosts are slow takes half of the connections at most."""

    class Waiting(Fetcher):
        def __init__(self) -> None:
            super().__init__(AllowList())
            self.tenants: list[bytes] = []

        async def fetch(self, *_args: Any, tenant: bytes = b"", **_options: Any) -> bytes:
            self.tenants.append(tenant)
            if tenant == b"slow":
                await asyncio.Event().wait()
            return RED_PNG

    async def run() -> None:
        fetcher = Waiting()
        media = MediaLoader(fetcher=fetcher, decoder=DECODER)
        sources = [image(f"http://slow.test/{number}") for number in range(40)]
        slow = asyncio.create_task(media.load(sources, b"slow"))
        while len(fetcher.tenants) < MAX_TENANT_FETCHES:
            await asyncio.sleep(0)
        found = await media.load([image("http://quick.test/")], b"quick")
        assert len(found) == 1
        assert fetcher.tenants.count(b"slow") == MAX_TENANT_FETCHES
        slow.cancel()
        await asyncio.gather(slow, return_exceptions=True)

    RUNNER.run(asyncio.wait_for(run(), 60))
