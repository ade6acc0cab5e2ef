"""Reads blocks from lower tiers in windows, within a memory budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from rekindle.kvcache.block import Block
from rekindle.kvcache.tiers.base import Fetch, Tier, Tiers

WINDOWS = 4  # into which a tier's share of the budget is divided
WINDOW_BYTES = 64 << 20  # upper limit of a window, so that restoring can begin early

OnStall = Callable[[Tier, bool], None]  # a tier, and whether it answers reads


class Fetches:
    """Gives each lower tier a share of the budget, so that a stalled tier holds up no other.

    A block that is larger than the share is read alone. Called from the engine's thread only.
    """

    def __init__(
        self, tiers: Tiers, limit_bytes: int, on_stall: OnStall = lambda tier, answers: None
    ) -> None:
        """`on_stall` is called when a tier stops answering reads or answers again."""
        self._tiers = tiers
        self.limit_bytes = limit_bytes
        self._tier_bytes = limit_bytes // max(len(tiers) - 1, 1)
        self.turn_bytes = self._tier_bytes // 2  # read-ahead of a turn: two turns share a tier
        self._in_flight: dict[str, set[Fetch]] = {tier.name: set() for tier in tiers}
        self._late: Counter[str] = Counter()  # timed-out reads that have not ended
        self._is_short = False  # a turn waits for memory, to read the blocks that it needs next
        self._on_stall = on_stall

    @property
    def used_bytes(self) -> int:
        """Memory of all fetches that are not released yet."""
        return sum(map(self._used_bytes, self._in_flight))

    def _used_bytes(self, tier: str) -> int:
        return sum(fetch.size_bytes for fetch in self._in_flight[tier])

    def answers(self, tier: Tier) -> bool:
        """Whether no read of the tier is overdue."""
        return not self._late[tier.name]

    def is_readable(self, block: Block) -> bool:
        """Whether the block is in memory or in a tier that answers."""
        return self._tiers.get(block) is not None or self._source(block) is not None

    def _source(self, block: Block) -> Tier | None:
        return next((t for t in self._tiers if t.holds(block) and self.answers(t)), None)

    def start(self, blocks: Sequence[Block]) -> Fetch | None:
        """Start reading the first of these blocks that are not in memory and have one source.

        Returns None if no block is missing, none can be read, or there is no room now. In the last
        case nobody reads ahead until there is room.
        """
        fetch = self._start(blocks)
        self._is_short = fetch is None and self._must_read(blocks)
        return fetch

    def read_ahead(self, blocks: Sequence[Block]) -> Fetch | None:
        """The same for blocks that are needed later. None while another turn waits for memory."""
        return None if self._is_short else self._start(blocks)

    def _must_read(self, blocks: Sequence[Block]) -> bool:
        first = next(self._missing(blocks), None)
        return first is not None and self._source(first) is not None

    def _missing(self, blocks: Sequence[Block]) -> Iterator[Block]:
        return (block for block in blocks if self._tiers.get(block) is None)

    def _start(self, blocks: Sequence[Block]) -> Fetch | None:
        missing = self._missing(blocks)
        first = next(missing, None)
        tier = self._source(first) if first is not None else None
        if first is None or tier is None:
            return None
        window = list(self._window(tier, chain([first], missing)))
        if not window:
            return None
        fetch = Fetch.of(tier.name, window)
        self._in_flight[tier.name].add(fetch)
        tier.read(window, fetch)
        return fetch

    def _window(self, tier: Tier, missing: Iterable[Block]) -> Iterator[Block]:
        room_bytes = self._tier_bytes - self._used_bytes(tier.name)
        may_exceed = not self._in_flight[tier.name]
        window_bytes = 0
        for block in missing:
            room_bytes -= block.size_bytes
            window_bytes += block.size_bytes
            is_first = window_bytes == block.size_bytes
            if self._source(block) is not tier or (
                room_bytes < 0 and not (is_first and may_exceed)
            ):
                return
            if not is_first and window_bytes > min(self._tier_bytes // WINDOWS, WINDOW_BYTES):
                return
            yield block

    def abandoned(self, block: Block) -> list[Fetch]:
        """Fetches that nobody waits for, if only they take the memory that this block needs."""
        tier = self._source(block)
        in_flight = self._in_flight[tier.name] if tier else set()
        return list(in_flight) if all(fetch.is_released for fetch in in_flight) else []

    def release(self, fetch: Fetch) -> None:
        """Nobody needs the bytes any more. A running read takes memory until it ends."""
        fetch.is_released = True
        if fetch.is_done:
            self._forget(fetch)

    def give_up(self, fetch: Fetch) -> None:
        """Release a fetch that timed out. Its tier is not used until the read has ended."""
        if not fetch.is_done and not fetch.is_late:
            fetch.is_late = True
            self._count_late(fetch, +1)
        self.release(fetch)

    def complete(self, fetch: Fetch) -> None:
        """Handle the end of a read."""
        fetch.is_done = True
        if fetch.is_late:
            self._count_late(fetch, -1)
        if fetch.is_released:
            self._forget(fetch)

    def _count_late(self, fetch: Fetch, more: int) -> None:
        tier = next(tier for tier in self._tiers if tier.name == fetch.tier)
        answered = self.answers(tier)
        self._late[tier.name] += more
        if self.answers(tier) != answered:
            self._on_stall(tier, not answered)

    def _forget(self, fetch: Fetch) -> None:
        self._in_flight[fetch.tier].discard(fetch)
        fetch.records.clear()
