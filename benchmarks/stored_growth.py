"""Measures how the cost of the store grows, with small synthetic blocks and without a model."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import ParamSpec, TypeVar

from rekindle.http.auth import Keys
from rekindle.kvcache.block import PrefixHandle, WriteBack, chain_key
from rekindle.kvcache.disk.files import Calls
from rekindle.kvcache.entries.entries import Draft
from rekindle.protocol.admin import GetStats
from rekindle.tokens import Tokens

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # the path of a script does not include the tests
from tests.stress.storage_harness import StorageHarness, load  # noqa: E402 - after that line
from tests.stress.trouble import block_files_with  # noqa: E402
from tests.support.fake import FakeEngine  # noqa: E402
from tests.support.harness import RuntimeHarness  # noqa: E402

P = ParamSpec("P")
T = TypeVar("T")

BLOCK_TOKENS = 4
BLOB = b"\0" * 64
CHAIN_BLOCKS = 32  # blocks of one conversation: 8,192 tokens in blocks of 256
TENANT_BLOCKS = 10
REPEATS = 200  # repeats of measurements that take microseconds
PLENTY = 1 << 40
EVENTS_EVERY = 1000  # blocks per batch, so that the disk queue never stays full


def blocks(count: int, folder: Path) -> dict[str, float]:
    """Open a folder with this many blocks in a new process, like the server does.

    The conversations have a moderate length. `opening` is the time until all blocks are known.
    Turns are served during this time.
    """
    _in_a_process(_fill, count, folder)
    return _in_a_process(_opened_again, folder)


def _in_a_process(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run it in a new process, so that memory of earlier measurements does not matter."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(work, *args, **kwargs).result()


def _opened_again(folder: Path) -> dict[str, float]:
    started_s = time.perf_counter()
    harness = _open_stored(folder)
    costs = {"opening_s": time.perf_counter() - started_s}
    costs["stats_s"] = _median_s(lambda: harness.administer(GetStats(), admin=True), 5)
    costs["eviction_s"] = _eviction_s(harness)
    started_s = time.perf_counter()
    harness.close()
    return {**costs, "stop_s": time.perf_counter() - started_s}


def chain_depth(count: int, folder: Path) -> dict[str, float]:
    """Measure one conversation of this many blocks: the cost of putting and writing each of its
    last blocks, of one more block when memory is full, and of a stop with all blocks still to
    write."""
    harness = _open(folder / "soon")
    namespace = harness.namespace()
    chain = _chain(namespace, count + REPEATS, seed=1)
    _put(harness, namespace, islice(chain, count - count // 10), WriteBack.SOON)
    harness.flush()
    started_s = time.perf_counter()
    _put(harness, namespace, islice(chain, count // 10), WriteBack.SOON)
    harness.flush()
    costs = {"written_block_s": (time.perf_counter() - started_s) / (count // 10)}
    _remember(harness, namespace, count, seed=1)
    ram = harness.store.tiers[0].budget
    ram.limit_bytes = ram.used_bytes
    costs["block_when_full_s"] = _median_s(
        lambda: _put(harness, namespace, islice(chain, 1), WriteBack.SOON), REPEATS
    )
    harness.close()
    return {**costs, "stop_s": _stop_s(count, folder / "late")}


def _stop_s(count: int, folder: Path) -> float:
    """The duration of a stop with a whole chain to write."""
    harness = _open(folder)
    namespace = harness.namespace()
    _put(harness, namespace, _chain(namespace, count, seed=1), WriteBack.LATE)
    _remember(harness, namespace, count, seed=1)
    started_s = time.perf_counter()
    harness.close()
    return time.perf_counter() - started_s


def tenants(count: int, folder: Path) -> dict[str, float]:
    """Measure this many tenants with a few blocks each."""
    harness = _open()
    for number in range(count):
        namespace = harness.namespace(b"%d" % number)
        _put(harness, namespace, _chain(namespace, TENANT_BLOCKS, seed=1), WriteBack.NEVER)
    keys = Keys([f"key-{number}" for number in range(count)])
    header = f"Bearer key-{count - 1}"
    return {
        "eviction_s": _eviction_s(harness),
        "authentication_s": _median_s(lambda: keys.caller(header), REPEATS),
    }


def entries(count: int, folder: Path) -> dict[str, float]:
    """Measure this many remembered conversations with a lifetime when their memory is full: the end
    of one more turn, a collection that finds nothing, and the check of a pin."""
    harness = _open()
    namespace, known = harness.namespace(), harness.entries
    numbers = iter(range(count + 10 * REPEATS))

    def remember(pinned: bool = False) -> None:
        number = next(numbers)
        tokens = Tokens.of([number, number >> 16, 7])
        text = b"%d" % number
        known.remember(
            Draft(namespace=namespace, tokens=tokens, text=text, ttl_s=1e6, pinned=pinned)
        )

    known.budget.limit_bytes = PLENTY
    for number in range(count):
        remember(pinned=number % 10 == 0)
    known.budget.limit_bytes = known.retention.used_bytes
    handle = PrefixHandle(namespace, Tokens.of([1, 2, 3]))
    pins = harness.runtime.admin.sessions.pins
    return {
        "remembering_s": _median_s(remember, REPEATS),
        "collection_s": _median_s(lambda: known.collect(), REPEATS),
        "pin_check_s": _median_s(lambda: pins.check(handle, 0), REPEATS),
    }


def _open(folder: Path | None = None) -> RuntimeHarness:
    """Open a store without syncing files.

    The cost of syncing depends on the disk and not on the size.
    """
    engine = FakeEngine(block_tokens=BLOCK_TOKENS)
    if folder is not None:
        folder.mkdir(exist_ok=True)
    harness = RuntimeHarness(engine, folder=folder, ram_bytes=PLENTY, disk_bytes=PLENTY)
    if harness.disk is not None:
        opened = harness.disk.folder
        opened.block_files = block_files_with(opened.path, Calls(fsync=lambda _handle: None))
    return harness


def _open_stored(folder: Path) -> StorageHarness:
    """The same with the server's storage."""
    order = load(folder, ram_cache=PLENTY, disk_cache=PLENTY)
    engine = FakeEngine(block_tokens=BLOCK_TOKENS)
    return StorageHarness(engine, order, calls=Calls(fsync=lambda _handle: None))


def _fill(count: int, folder: Path) -> None:
    """Write conversations to disk."""
    harness = _open_stored(folder)
    namespace = harness.namespace()
    for seed in range(-(-count // CHAIN_BLOCKS)):
        size = min(CHAIN_BLOCKS, count - seed * CHAIN_BLOCKS)
        _put(harness, namespace, _chain(namespace, size, seed), WriteBack.SOON)
        _remember(harness, namespace, size, seed)
    harness.flush()
    harness.close()


def _tokens(seed: int, at: int) -> Tokens:
    """The tokens of a block, which no other chain or position has."""
    return Tokens.of([seed, at, 1, 2])


def _chain(namespace: bytes, count: int, seed: int) -> Iterator[tuple[bytes, Tokens]]:
    """The parent and the tokens of each block, in order."""
    parent = namespace
    for at in range(count):
        tokens = _tokens(seed, at)
        yield parent, tokens
        parent = chain_key(parent, tokens)


def _put(
    harness: RuntimeHarness,
    namespace: bytes,
    chain: Iterable[tuple[bytes, Tokens]],
    write_back: WriteBack,
) -> None:
    for number, (parent, tokens) in enumerate(chain):
        put = harness.store.put(namespace, parent, tokens, BLOB, exact=False, write_back=write_back)
        assert put, "the store refused a block"
        if number % EVENTS_EVERY == 0:
            harness.take_events()


def _remember(harness: RuntimeHarness, namespace: bytes, count: int, seed: int) -> None:
    ids = [token for at in range(count) for token in (seed, at, 1, 2)]
    harness.entries.remember(Draft(namespace=namespace, tokens=Tokens.of(ids), text=b"%d" % seed))


def _eviction_s(harness: RuntimeHarness) -> float:
    """The cost of a new block when the last tier is full, so that another block is evicted."""
    harness.take_events()
    budget = harness.store.tiers[-1].budget
    budget.limit_bytes = budget.used_bytes
    namespace = harness.namespace(b"newcomer")
    write_back = WriteBack.SOON if harness.disk else WriteBack.NEVER
    numbers = iter(range(REPEATS))

    def put_one() -> None:
        tokens = _tokens(1 << 20, next(numbers))
        harness.store.put(namespace, namespace, tokens, BLOB, exact=False, write_back=write_back)

    before = harness.store.counts.evicted_blocks
    cost_s = _median_s(put_one, REPEATS)
    assert harness.store.counts.evicted_blocks > before, "nothing was evicted"
    budget.limit_bytes = PLENTY
    return cost_s


def _median_s(work: Callable[[], object], repeats: int) -> float:
    times_s = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        work()
        times_s.append(time.perf_counter() - started_s)
    return median(times_s)
