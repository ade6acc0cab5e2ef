"""The store with RAM and disk below it, beside a dictionary: the exact bytes or nothing, pins never
lost, budgets kept after every step, whatever is restarted, corrupted, expired or evicted."""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rekindle.kvcache.block import Block, Wish, chain
from rekindle.kvcache.clock import Clock
from rekindle.kvcache.codec import Record
from rekindle.kvcache.disk.folder import open_folder
from rekindle.kvcache.entries import Draft, Entries
from rekindle.kvcache.key import chain_key, pack, unpack
from rekindle.kvcache.store import Store
from rekindle.kvcache.tiers.disk import DiskTier, News

from .naive import ROOT, STRANGER, Tokens, ends, last_block

BLOCK_TOKENS = 3
DISK_BYTES = (1 << 20) + 140_000  # less the shares of index and bad files: room for a few blocks
PATIENCE_S = 20.0
STATE_BYTES = 300
CHECKPOINT = b"checkpoint of ".ljust(5000, b".")  # larger than a page, as real ones are


class TestClock(Clock):
    __test__ = False

    def __init__(self) -> None:
        self.now = 0.0

    def steady_s(self) -> float:
        return self.now

    def wall_s(self) -> float:
        return 1e9 + self.now


def state_of(root: bytes, path: Tokens, *, resumable: bool = False) -> bytes:
    """The only right state of a path: any other bytes are a wrong answer."""
    cells = (root[:1] + pack(path)).ljust(STATE_BYTES, b".")
    return cells + CHECKPOINT + pack(path) if resumable else cells


def is_right(block: Block, state: bytes) -> bool:
    return state == state_of(block.root, _path(block), resumable=block.resumable)


runs = st.lists(st.integers(0, 2), min_size=1, max_size=11).map(tuple)
roots = st.sampled_from([ROOT, STRANGER])
wishes = st.sampled_from(Wish)


class Tiers(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.clock = TestClock()
        self.pins: dict[str, tuple[bytes, Tokens]] = {}  # entry key -> what it stands for
        self.spoiled: set[str] = set()  # files that were ever corrupted
        self.ram_bytes = 0
        self.begun = False

    @initialize(blocks=st.integers(0, 9))
    def begin(self, blocks: int) -> None:
        self.ram_bytes = blocks * 1900
        self.begun = True
        self.open()

    def open(self) -> None:
        self.news: SimpleQueue[News] = SimpleQueue()
        folder = open_folder(self.folder, b"model", limit_bytes=DISK_BYTES)
        self.disk = DiskTier(folder, self.news.put)
        self.store = Store(block_tokens=BLOCK_TOKENS, ram_bytes=self.ram_bytes, disk=self.disk)
        self.entries = Entries(self.store, self.clock, self.disk.journal)
        self.store.load(folder.ledger.blocks())
        self.entries.load(folder.ledger.entries())

    def hear(self, *, wait: bool = False) -> None:
        with suppress(Empty):
            while True:
                self.store.hear(
                    self.news.get(timeout=PATIENCE_S) if wait else self.news.get_nowait()
                )
                wait = False

    def flush(self) -> None:
        done: list[bool] = []
        self.disk.flush(lambda: done.append(True))
        while not done:
            self.hear(wait=True)

    def fetch(self, root: bytes, path: Tokens) -> list[tuple[Block, bytes]]:
        """What a turn would get: blocks with their states, up to the first that fails."""
        blocks = self.store.match(root, pack(path)).blocks
        fetch = self.store.fetch(blocks)
        while fetch is not None and not fetch.done:
            self.hear(wait=True)
        self.hear()
        found = []
        for block in blocks:
            state = self.store.get(block)
            if state is None and fetch is not None and block.key in fetch.records:
                state = fetch.records[block.key].blob
            if state is None:
                break
            found.append((block, bytes(state)))
        return found

    # -- what may happen -----------------------------------------------------------------------

    @rule(root=roots, path=runs, exact=st.booleans(), resumes=st.booleans(), wish=wishes)
    def put(self, root: bytes, path: Tokens, exact: bool, resumes: bool, wish: Wish) -> None:
        parent = root
        for end in ends(path, BLOCK_TOKENS):
            packed = pack(last_block(end, BLOCK_TOKENS))
            resumable = resumes and end == path
            if self.store.wants(parent, packed, exact=exact, resumable=resumable):
                state = state_of(root, end, resumable=resumable)
                if not self.store.put(
                    root, parent, packed, state, exact=exact, resumable=resumable, wish=wish
                ):
                    return
            parent = chain_key(parent, packed)
        if resumes and self.store.get(known := self.known(parent)):
            assert known.resumable or known.exact > exact

    def known(self, key: bytes) -> Block:
        return next(block for block in self.store if block.key == key)

    @rule(root=roots, path=runs)
    def resume(self, root: bytes, path: Tokens) -> None:
        """Every checkpoint on the way is found, and none beside it."""
        found = list(self.store.checkpoints(root, pack(path)))
        on_the_way = [
            block
            for block in self.store
            if block.resumable and block.root == root and _path(block) == path[: block.stop]
        ]
        assert found == sorted(on_the_way, key=lambda block: -block.stop)

    @rule(root=roots, path=runs)
    def get(self, root: bytes, path: Tokens) -> None:
        got = self.fetch(root, path)
        assert all(is_right(block, state) for block, state in got)
        self.store.use([block for block, _ in got], Wish.LATE)

    @rule(root=roots, path=runs, ttl_s=st.none() | st.integers(1, 50), pinned=st.booleans())
    def name(self, root: bytes, path: Tokens, ttl_s: int | None, pinned: bool) -> None:
        found = self.store.match(root, pack(path))
        sound = not self.spoiled & {block.key.hex() for block in found.blocks}
        pinned = pinned and sound and found.tokens == len(path) and len(self.pins) < 3
        entry = self.entries.remember(
            Draft(
                root=root, packed=pack(path), text=root[:1] + bytes(path), keyed=True,
                ttl_s=None if pinned else ttl_s, pinned=pinned,
            )
        )  # fmt: skip
        assert entry is not None
        if pinned and entry.block is not None:
            self.store.write_chain(entry.block)
            self.pins[entry.key] = (root, path)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.pins)))
        root, _ = self.pins.pop(key)
        entry = self.entries.by_key(root, key)
        assert entry is not None
        self.entries.unpin(entry)

    @rule(seconds=st.integers(1, 60))
    def pass_by(self, seconds: int) -> None:
        self.clock.now += seconds
        self.entries.collect()

    @rule(root=roots, path=runs)
    def delete(self, root: bytes, path: Tokens) -> None:
        entry = self.entries.recall(root, root[:1] + bytes(path))
        if entry is not None and not entry.pinned:
            self.entries.remove(entry)

    @rule()
    def settle(self) -> None:
        self.flush()

    @rule(kindly=st.booleans())
    def restart(self, kindly: bool) -> None:
        """After a kind stop all is there that may be written; after a crash, what was stored."""
        if kindly:
            self.store.retry_disk()
            self.store.write_everything()
        self.flush()
        stored = {block.key for block in self.store if block.stored}
        if not kindly:
            for key, (root, _) in list(self.pins.items()):
                entry = self.entries.by_key(root, key)
                assert entry is not None
                if entry.block is None or not entry.block.stored:
                    del self.pins[key]  # it was never told stored
        self.disk.close()
        self.open()
        assert {block.key for block in self.store} == stored

    @rule(data=st.data(), offset=st.integers(0, 400), flip=st.integers(1, 255))
    def corrupt(self, data: st.DataObject, offset: int, flip: int) -> None:
        self.flush()
        self.flush()  # what the first one made superfluous is gone now
        files = sorted((self.disk.folder.path / "blocks").iterdir())
        pinned = {b.key for b in self.store if any(h.pinned for h in b.heads)}
        safe = {each.key.hex() for b in self.store if b.key in pinned for each in chain(b)}
        files = [file for file in files if file.name not in safe]
        if files:
            file = data.draw(st.sampled_from(files))
            self.spoiled.add(file.name)
            raw = bytearray(file.read_bytes())
            raw[offset % len(raw)] ^= flip
            file.write_bytes(raw)

    @rule(
        error=st.sampled_from([errno.ENOSPC, errno.EIO]), root=roots, path=runs, exact=st.booleans()
    )
    def break_down(self, error: int, root: bytes, path: Tokens, exact: bool) -> None:
        """Nothing can be written for a while, and everything is to be."""

        def fail(records: Iterable[Record]) -> None:
            raise OSError(error, "no")

        self.flush()
        vault = self.disk.folder.vault
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(vault, "write", fail)
            self.put(root, path, exact, True, Wish.SOON)
            self.store.write_everything()
            self.flush()
        self.flush()

    @rule()
    def try_again(self) -> None:
        self.store.retry_disk()

    # -- what must hold ------------------------------------------------------------------------

    @invariant()
    def the_budgets_hold(self) -> None:
        if not self.begun:
            return
        assert self.store.used_bytes <= self.store.limit_bytes
        assert self.disk.used_bytes <= self.disk.limit_bytes
        assert self.disk.used_bytes == sum(block.disk_bytes for block in self.store)

    @invariant()
    def the_disk_is_closed_under_parents(self) -> None:
        if not self.begun:
            return
        for block in self.store:
            above = block.parent
            assert above is not None
            assert not block.disk_bytes or above.is_root or above.disk_bytes
            assert not block.stored or above.is_root or above.stored

    @invariant()
    def what_is_pinned_is_there_whole(self) -> None:
        for key, (root, path) in self.pins.items():
            entry = self.entries.by_key(root, key)
            assert entry is not None
            assert entry.block is not None
            found = self.store.match(root, pack(path)).tokens
            resumes = entry.block.resumable and entry.block.stop == len(path) - 1
            assert found == len(path) or (resumes and found == len(path) - 1)

    @invariant()
    def every_entry_rests_on_the_last_block_that_has_its_tokens(self) -> None:
        if not self.begun:
            return
        for entry in self.entries.of(None):
            path = tuple(unpack(entry.packed))
            through = [
                block.start
                for block in self.store
                if block.root == entry.root
                and block.start < len(path)
                and _path(block)[: len(path)] == path[: block.stop]
            ]
            assert entry.block is not None
            assert entry.block.is_root == (not through)
            assert entry.block.start == max(through, default=0)

    def teardown(self) -> None:
        if self.begun:
            self.flush()
            for block in list(self.store):
                state = self.fetch(block.root, _path(block))
                assert all(is_right(each, blob) for each, blob in state)
            self.disk.close()
        shutil.rmtree(self.folder)


def _path(block: Block) -> Tokens:
    return tuple(unpack(b"".join(each.packed for each in reversed(list(chain(block))))))


TestTiers = Tiers.TestCase
TestTiers.settings = settings(
    max_examples=40, stateful_step_count=40, phases=(Phase.explicit, Phase.reuse, Phase.generate)
)
