"""Compares the store and its tiers with a dictionary through restarts, corruption, expiry and
eviction. Reads give the exact bytes or nothing, pins are never lost, and budgets hold after
every step."""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rekindle.kvcache.block import Block, WriteBack, chain, chain_key
from rekindle.kvcache.codec import HEADER_BYTES, Record, parse_header
from rekindle.kvcache.disk.folder import open_folder
from rekindle.kvcache.entries.entries import Draft, Entries
from rekindle.kvcache.store import Store
from rekindle.kvcache.tiers.base import Tier, TierEvent, TierState
from rekindle.kvcache.tiers.disk import DiskTier
from rekindle.kvcache.tiers.ram import RamTier
from rekindle.tokens import Tokens, pack
from tests.support.clock import FakeClock
from tests.support.memory_tier import MemoryTier
from tests.support.rounds import rounds

from .naive import ROOT, STRANGER, Ids, ends, last_block

BLOCK_TOKENS = 3
MEMORY_BYTES = 30_000
DISK_BYTES = (1 << 20) + 140_000  # less the shares of index and bad files: room for a few blocks
PATIENCE_S = 20.0
STATE_BYTES = 300
CHECKPOINT = b"checkpoint of ".ljust(5000, b".")  # larger than a page, as real ones are


def state_of(root: bytes, path: Ids, *, resumable: bool = False) -> bytes:
    """The only valid state of a path."""
    cells = (root[:1] + pack(path)).ljust(STATE_BYTES, b".")
    return cells + CHECKPOINT + pack(path) if resumable else cells


def is_right(block: Block, state: bytes) -> bool:
    return state == state_of(block.namespace, _path(block), resumable=block.resumable)


runs = st.lists(st.integers(0, 2), min_size=1, max_size=11).map(tuple)
roots = st.sampled_from([ROOT, STRANGER])
write_backs = st.sampled_from(WriteBack)


class Tiers(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.clock = FakeClock()
        self.pins: dict[str, tuple[bytes, Ids]] = {}  # entry key -> what it stands for
        self.spoiled: set[str] = set()  # files that were ever corrupted
        self.ram_bytes = 0
        self.begun = False

    @initialize(blocks=st.integers(0, 9))
    def begin(self, blocks: int) -> None:
        self.ram_bytes = blocks * 1900
        self.begun = True
        self.open()

    def open(self) -> None:
        self.events: SimpleQueue[TierEvent] = SimpleQueue()
        folder = open_folder(self.folder, b"model", limit_bytes=DISK_BYTES)
        self.disk = DiskTier(folder, self.events.put)
        tiers: list[Tier] = [RamTier(self.ram_bytes), self.disk, *self.open_more()]
        self.store = Store(block_tokens=BLOCK_TOKENS, tiers=tiers)
        self.entries = Entries(self.store, self.clock, self.disk.journal)
        entries = folder.index_db.entries()
        self.store.load()
        self.entries.load(entries)
        self.entries.settle()

    def open_more(self) -> list[Tier]:
        """Tiers below the disk."""
        return []

    def advance(self) -> None:
        """Advance tiers that work only on request."""

    def take_in(self, *, wait: bool = False) -> None:
        """Handle the events of the tiers. With `wait`, at least one."""
        self.advance()
        with suppress(Empty):
            while True:
                self.store.on_event(
                    self.events.get(timeout=PATIENCE_S) if wait else self.events.get_nowait()
                )
                wait = False

    def flush(self) -> None:
        done: list[bool] = []
        self.store.tiers.flush(done.append)
        while not done:
            self.take_in(wait=True)

    def fetch(self, root: bytes, path: Ids) -> list[tuple[Block, bytes]]:
        """What a turn would get: blocks with their states, up to the first failure."""
        blocks = self.store.match(root, Tokens.of(path)).blocks
        found = []
        for number, block in enumerate(blocks):
            state = self.store.get(block)
            if state is None and (fetch := self.store.fetches.start(blocks[number:])):
                while not fetch.is_done:
                    self.take_in(wait=True)
                state = self.store.get(block) or fetch.blob(block)
                self.store.fetches.release(fetch)
            if state is None:
                break
            found.append((block, bytes(state)))
        assert not self.store.fetches.used_bytes
        return found

    # -- what may happen -----------------------------------------------------------------------

    @rule(root=roots, path=runs, exact=st.booleans(), resumes=st.booleans(), write_back=write_backs)
    def put(
        self, root: bytes, path: Ids, exact: bool, resumes: bool, write_back: WriteBack
    ) -> None:
        parent = root
        for end in ends(path, BLOCK_TOKENS):
            packed = Tokens.of(last_block(end, BLOCK_TOKENS))
            resumable = resumes and end == path
            if self.store.wants(parent, packed, exact=exact, resumable=resumable):
                state = state_of(root, end, resumable=resumable)
                if not self.store.put(
                    root,
                    parent,
                    packed,
                    state,
                    exact=exact,
                    resumable=resumable,
                    write_back=write_back,
                ):
                    return
            parent = chain_key(parent, packed)
        if resumes and self.store.get(known := self.known(parent)):
            assert known.resumable or known.exact > exact

    def known(self, key: bytes) -> Block:
        return next(block for block in self.store if block.key == key)

    @rule(root=roots, path=runs)
    def resume(self, root: bytes, path: Ids) -> None:
        """Every checkpoint on the path is found, and no other."""
        found = list(self.store.checkpoints(root, Tokens.of(path)))
        on_the_way = [
            block
            for block in self.store
            if block.resumable and block.namespace == root and _path(block) == path[: block.stop]
        ]
        assert found == sorted(on_the_way, key=lambda block: -block.stop)

    @rule(root=roots, path=runs)
    def get(self, root: bytes, path: Ids) -> None:
        got = self.fetch(root, path)
        assert all(is_right(block, state) for block, state in got)
        self.store.use([block for block, _ in got], WriteBack.LATE)

    @rule(root=roots, path=runs, ttl_s=st.none() | st.integers(1, 50), pinned=st.booleans())
    def name(self, root: bytes, path: Ids, ttl_s: int | None, pinned: bool) -> None:
        found = self.store.match(root, Tokens.of(path))
        sound = not self.spoiled & {block.key.hex() for block in found.blocks}
        pinned = pinned and sound and found.tokens == len(path) and len(self.pins) < 3
        entry = self.entries.remember(
            Draft(
                namespace=root, tokens=Tokens.of(path), text=root[:1] + bytes(path), keyed=True,
                ttl_s=None if pinned else ttl_s, pinned=pinned,
            )
        )  # fmt: skip
        assert entry is not None
        if pinned and entry.block is not None:
            self.store.write_back.write_chain(entry.block)
            self.pins[entry.key] = (root, path)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(list(self.pins)))  # keys are random, their order is not
        root, _ = self.pins.pop(key)
        entry = self.entries.by_key(root, key)
        assert entry is not None
        self.entries.unpin(entry)

    @rule(seconds=st.integers(1, 60))
    def pass_by(self, seconds: int) -> None:
        self.clock.pass_by(seconds)
        self.entries.collect()

    @rule(root=roots, path=runs)
    def delete(self, root: bytes, path: Ids) -> None:
        entry = self.entries.index.recall(root, root[:1] + bytes(path))
        if entry is not None and not entry.pinned:
            self.entries.remove(entry)

    @rule()
    def wait(self) -> None:
        self.flush()

    @rule(kindly=st.booleans())
    def restart(self, kindly: bool) -> None:
        """After a shutdown every writable block is there, and after a crash every stored one."""
        if kindly:
            self.store.retry()
            self.store.write_back.write_everything()
        self.flush()
        stored = {
            block.key: (block.namespace, _path(block)) for block in self.store if block.stored
        }
        if not kindly:
            for key, (root, _) in list(self.pins.items()):
                entry = self.entries.by_key(root, key)
                assert entry is not None
                if entry.block is None or not entry.block.stored:
                    del self.pins[key]  # it was never reported stored
        self.close()
        self.open()
        found = {block.key for block in self.store}
        assert found <= stored.keys()
        for lost in stored.keys() - found:  # a tail, kept for a pin that rests on a longer one now
            root, path = stored[lost]
            assert any(
                block.namespace == root and _path(block)[: len(path)] == path
                for block in self.store
            )

    def close(self) -> None:
        for tier in self.store.tiers:
            tier.close()

    def unpromised(self, keys: Iterable[str]) -> list[str]:
        """The blocks that no pin depends on."""
        pinned = [block for block in self.store if block.is_pinned]
        safe = {each.key.hex() for block in pinned for each in chain(block)}
        return sorted(set(keys) - safe)

    @rule(pick=st.integers(0, 999), offset=st.integers(0, 400), flip=st.integers(1, 255))
    def corrupt(self, pick: int, offset: int, flip: int) -> None:
        """Damage any file except those of pins. Their number depends on the writer's timing."""
        self.flush()
        self.flush()  # what the first one made superfluous is gone now
        folder = self.disk.folder.path / "blocks"
        if names := self.unpromised(path.name for path in folder.iterdir()):
            name = names[pick % len(names)]
            self.spoiled.add(name)
            raw = bytearray((folder / name).read_bytes())
            raw[offset % len(raw)] ^= flip
            (folder / name).write_bytes(raw)

    @rule(
        error=st.sampled_from([errno.ENOSPC, errno.EIO]), root=roots, path=runs, exact=st.booleans()
    )
    def break_down(self, error: int, root: bytes, path: Ids, exact: bool) -> None:
        """Writes fail for a while, and every block has to be written."""

        def fail(records: Iterable[Record]) -> None:
            raise OSError(error, "no")

        self.flush()
        block_files = self.disk.folder.block_files
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(block_files, "write", fail)
            self.put(root, path, exact, True, WriteBack.SOON)
            self.store.write_back.write_everything()
            self.flush()
        self.flush()

    @rule()
    def try_again(self) -> None:
        self.store.retry()

    # -- what must hold ------------------------------------------------------------------------

    @invariant()
    def the_budgets_hold(self) -> None:
        if not self.begun:
            return
        for tier in self.store.tiers:
            copies = [block.copies[tier.name] for block in self.store if tier.holds(block)]
            used_bytes = sum(copy.size_bytes for copy in copies)
            assert tier.budget.used_bytes == used_bytes <= tier.budget.limit_bytes

    @invariant()
    def every_block_is_somewhere(self) -> None:
        if self.begun:
            assert all(block.copies for block in self.store)

    @invariant()
    def lower_tiers_are_closed_under_parents(self) -> None:
        if not self.begun:
            return
        for block in self.store:
            above = block.parent
            assert above is not None
            for tier in self.store.tiers[1:]:
                copy, copy_above = block.copies.get(tier.name), above.copies.get(tier.name)
                assert copy is None or above.is_root or copy_above is not None
                if copy is not None and copy.written and copy_above is not None:
                    assert copy_above.written

    @invariant()
    def every_copy_can_serve_what_its_block_says_it_is(self) -> None:
        if not self.begun:
            return
        for block in self.store:
            for copy in block.copies.values():
                assert not copy.written or block.kind.weaker(copy.written) in (
                    block.kind,
                    copy.written,  # until the better kind is written, or is not
                )

    @invariant()
    def what_is_pinned_is_there_whole(self) -> None:
        for key, (root, path) in self.pins.items():
            entry = self.entries.by_key(root, key)
            assert entry is not None
            assert entry.block is not None
            found = self.store.match(root, Tokens.of(path)).tokens
            resumes = entry.block.resumable and entry.block.stop == len(path) - 1
            assert found == len(path) or (resumes and found == len(path) - 1)

    @invariant()
    def every_entry_rests_on_the_last_block_that_has_its_tokens(self) -> None:
        if not self.begun:
            return
        for entry in self.entries.of(None):
            path = tuple(entry.tokens)
            through = [
                block.start
                for block in self.store
                if block.namespace == entry.namespace
                and block.start < len(path)
                and _path(block)[: len(path)] == path[: block.stop]
            ]
            assert entry.block is not None
            assert entry.block.is_root == (not through)
            assert entry.block.start == max(through, default=0)
            assert entry.state_bytes == sum(block.size_bytes for block in chain(entry.block))

    @invariant()
    def running_counts_are_those_of_a_count(self) -> None:
        if self.begun:
            sizes = Counter[bytes | None]()
            for block in self.store:
                sizes[block.namespace] += block.size_bytes
                sizes[None] += block.size_bytes
            assert all(self.store.size_bytes(each) == sizes[each] for each in (*sizes, None))

    def teardown(self) -> None:
        if self.begun:
            self.flush()
            for block in list(self.store):
                state = self.fetch(block.namespace, _path(block))
                assert all(is_right(each, blob) for each, blob in state)
            self.close()
        shutil.rmtree(self.folder)


def test_stored_state_of_a_pin_stays_until_the_checkpoint_that_replaces_it_is_stored() -> None:
    state = ThreeTiers()
    state.begin(blocks=2)
    state.put(ROOT, (2, 0, 2), exact=False, resumes=False, write_back=WriteBack.SOON)
    state.name(ROOT, (2,), ttl_s=None, pinned=True)
    assert state.pins
    state.break_down(errno.ENOSPC, ROOT, (2,), exact=False)  # a checkpoint that is never written
    state.what_is_pinned_is_there_whole()
    state.put(ROOT, (2,), exact=False, resumes=True, write_back=WriteBack.SOON)
    state.store.retry()
    state.flush()
    state.what_is_pinned_is_there_whole()
    state.teardown()


def _path(block: Block) -> Ids:
    return tuple(token for each in reversed(list(chain(block))) for token in each.tokens)


class ThreeTiers(Tiers):
    """Adds a third tier below the disk."""

    def __init__(self) -> None:
        super().__init__()
        self.shelf: dict[bytes, bytes] = {}

    def open_more(self) -> list[Tier]:
        self.memory = MemoryTier(MEMORY_BYTES, self.events.put, shelf=self.shelf, queue_bytes=9000)
        return [self.memory]

    def advance(self) -> None:
        self.memory.advance()

    @rule(pick=st.integers(0, 999), offset=st.integers(0, 400), flip=st.integers(1, 255))
    def corrupt_the_third(self, pick: int, offset: int, flip: int) -> None:
        self.flush()
        self.flush()
        if names := self.unpromised(key.hex() for key in self.shelf):
            name = names[pick % len(names)]
            self.spoiled.add(name)
            raw = bytearray(self.shelf[bytes.fromhex(name)])
            listed_bytes = HEADER_BYTES + parse_header(raw).packed_bytes  # what it is known by
            raw[listed_bytes + offset % (len(raw) - listed_bytes)] ^= flip
            self.shelf[bytes.fromhex(name)] = bytes(raw)

    @rule(state=st.sampled_from(["full", "failing"]), root=roots, path=runs, exact=st.booleans())
    def break_down_the_third(self, state: TierState, root: bytes, path: Ids, exact: bool) -> None:
        self.flush()
        self.memory.failure = state
        self.put(root, path, exact, True, WriteBack.SOON)
        self.store.write_back.write_everything()
        self.flush()
        self.memory.failure = "ok"

    @rule()
    def lose_the_disk(self) -> None:
        """Writes to the disk fail, so blocks that RAM evicts go to the next tier."""
        self.disk.state = "failing"


SETTINGS = settings(
    max_examples=rounds(40, 400),
    stateful_step_count=40,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
TestTiers = pytest.mark.long(Tiers.TestCase)
TestTiers.settings = SETTINGS
TestThreeTiers = pytest.mark.long(ThreeTiers.TestCase)
TestThreeTiers.settings = SETTINGS
