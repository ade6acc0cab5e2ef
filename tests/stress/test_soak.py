"""A server that is used in every way for a quarter of an hour neither fails nor grows."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from tests.contract.engines import write_wide_llama
from tests.stress.visitors import EMBEDDER, RANKER, Visitor, visit_together
from tests.support.rounds import rounds
from tests.support.server import Server, running
from tests.support.tiny_bert import write_bert
from tests.support.tiny_projector import write_llava_projector

SECONDS = rounds(6, 900)
KEYS = ("key-of-anna-3f9c", "key-of-bert-81d2", "key-of-carl-55aa")
VISITORS = 4
WARM_UP = 1 / 3  # share of the time, after which budgets are full and every path was taken
PATIENCE_S = 30
QUIET_S = 0.5
ALL_ACTIONS_S = 300  # by then every action has been taken
GROWN_SHARE = 0.1  # allowed difference, because allocators keep some memory
GROWN_BYTES = rounds(48, 16) << 20  # allowed in addition, more for a shorter warm-up
GROWN_HANDLES = rounds(8, 2)  # a decoder of images may start after a short warm-up
GROWN_THREADS = 2

FLAGS = (
    *("--threads", "1", "--parallel", "4", "--ram-cache", "8MB", "--disk-cache", "24MB"),
    *("--disk-floor", "0", "--admin-key", "key-of-root-c07e"),
    *(part for key in KEYS for part in ("--api-key", key)),
)


@dataclass(frozen=True)
class Size:
    """The resources that front and runtime hold together."""

    memory_bytes: int
    handles: int
    threads: int


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    model = write_wide_llama(tmp_path / "tiny.gguf")
    projector = write_llava_projector(tmp_path / "mmproj.gguf")
    flags = [*FLAGS, "--max-model-len", "2048", "--mmproj", str(projector)]
    for name, classes in ((EMBEDDER, 0), (RANKER, 1)):
        path = write_bert(tmp_path / f"{name}.gguf", classes=classes)
        flags += ["--embedding-model", str(path)]
    with running(model, tmp_path, *flags) as started:
        yield started


def size_of(server: Server) -> Size:
    processes = [Path("/proc", str(pid)) for pid in (server.process.pid, *server.worker_pids())]
    status = [_status(process) for process in processes]
    return Size(
        memory_bytes=sum(int(each["VmRSS"].split()[0]) << 10 for each in status),
        handles=sum(len(list((process / "fd").iterdir())) for process in processes),
        threads=sum(int(each["Threads"]) for each in status),
    )


def _status(process: Path) -> dict[str, str]:
    pairs = (line.partition(":") for line in (process / "status").read_text().splitlines())
    return {name: value.strip() for name, _, value in pairs}


def size_at_rest(server: Server) -> Size:
    """Measure after the turns and connections of clients that hung up have ended."""
    deadline_s = time.monotonic() + PATIENCE_S
    last, since_s = size_of(server), time.monotonic()
    while time.monotonic() - since_s < QUIET_S and time.monotonic() < deadline_s:
        time.sleep(0.1)
        now = size_of(server)
        if (now.handles, now.threads) != (last.handles, last.threads):
            last, since_s = now, time.monotonic()
    return size_of(server)


@pytest.mark.long
def test_a_server_that_is_used_in_every_way_neither_fails_nor_grows(server: Server) -> None:
    visitors = [
        Visitor(server, KEYS[number % len(KEYS)], Random(number)) for number in range(VISITORS)
    ]
    workers = server.worker_pids()
    visit_together(visitors, SECONDS * WARM_UP)
    before = size_at_rest(server)
    visit_together(visitors, SECONDS * (1 - WARM_UP))
    after = size_at_rest(server)
    assert server.worker_pids() == workers, "the runtime was restarted"
    assert "Traceback" not in server.log.read_text()
    done = sum((visitor.counts for visitor in visitors), Counter[str]())
    never = {action.__name__ for action in visitors[0].actions} - done.keys()
    assert SECONDS < ALL_ACTIONS_S or not never, never
    print(f"{done.total()} visits: {dict(done)}; {before} after the warm-up, {after} in the end")
    assert after.memory_bytes <= before.memory_bytes * (1 + GROWN_SHARE) + GROWN_BYTES
    assert after.handles <= before.handles + GROWN_HANDLES
    assert after.threads <= before.threads + GROWN_THREADS
