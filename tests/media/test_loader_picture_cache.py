from __future__ import annotations

from rekindle.media.jobs import ImageJob, Job, Sizing, VideoJob
from rekindle.media.loader import PictureCache, Shot, cache_key
from rekindle.protocol.media import picture


def shots(count: int = 1) -> list[Shot]:
    return [Shot(picture(10, 10, bytes(300))) for _ in range(count)]


def test_what_was_used_last_stays() -> None:
    cache = PictureCache(900)
    for key in (b"a", b"b", b"c"):
        cache.put(key, shots())
    cache.get(b"a")
    cache.put(b"d", shots())
    assert [key for key in (b"a", b"b", b"c", b"d") if cache.get(key)] == [b"a", b"c", b"d"]
    assert cache.size_bytes == 900


def test_the_budget_is_a_budget() -> None:
    cache = PictureCache(900)
    cache.put(b"a", shots(2))
    cache.put(b"a", shots(2))
    cache.put(b"b", shots(4))
    assert cache.size_bytes == 600
    assert cache.get(b"b") is None
    cache.put(b"c", shots(2))
    assert cache.size_bytes == 600


def test_a_key_tells_tenants_files_and_settings_apart() -> None:
    jobs: list[Job] = [
        ImageJob(b"x", False, Sizing(512)),
        ImageJob(b"y", False, Sizing(512)),
        ImageJob(b"x", True, Sizing(512)),
        ImageJob(b"x", False, Sizing(2048)),
        ImageJob(b"x", False, Sizing(512, (1, 2))),
        VideoJob(b"x", False, Sizing(512), 1.0, 4),
        VideoJob(b"x", False, Sizing(512), 2.0, 4),
        VideoJob(b"x", False, Sizing(512), 1.0, 5),
    ]
    keys = {cache_key(tenant, job) for tenant in (b"a", b"b") for job in jobs}
    assert len(keys) == 2 * len(jobs)
