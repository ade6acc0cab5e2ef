"""Reads from lower tiers: a window of blocks at a time, so that what they take is bounded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from rekindle.kvcache.block import Block
from rekindle.kvcache.tiered import Tiers
from rekindle.kvcache.tiers.base import Fetch, Tier

WINDOWS = 4  # of a tier's share, in which windows are cut
WINDOW_BYTES = 64 << 20  # at most, unless one block has more: what is read first is restored first
TURNS = 2  # that a tier reads for at once; others wait until there is room


class Fetches:
    """Each lower tier has a share of the limit, so that one that hangs holds up no other. A block
    larger than all of it is read alone. Called by the engine's thread only."""

    def __init__(self, tiers: Tiers, limit_bytes: int) -> None:
        self._tiers = tiers
        self.limit_bytes = limit_bytes
        self._tier_bytes = limit_bytes // max(len(tiers) - 1, 1)
        self.turn_bytes = self._tier_bytes // TURNS  # that a turn has read ahead
        self._in_flight: dict[str, set[Fetch]] = {tier.name: set() for tier in tiers}
        self._late: Counter[str] = Counter()  # reads that were given up and have not ended
        #: Called with a tier that has stopped answering reads, or that answers again.
        self.on_change: Callable[[Tier, bool], None] = lambda tier, answers: None

    @property
    def used_bytes(self) -> int:
        """What all fetches take of memory, from their start to their release."""
        return sum(map(self._used_bytes, self._in_flight))

    def _used_bytes(self, tier: str) -> int:
        return sum(fetch.size_bytes for fetch in self._in_flight[tier])

    def answers(self, tier: Tier) -> bool:
        """Whether no read of a tier is overdue."""
        return not self._late[tier.name]

    def is_readable(self, block: Block) -> bool:
        """Whether a block is at hand, or can be had from a tier that answers."""
        return self._tiers.get(block) is not None or self._source(block) is not None

    def _source(self, block: Block) -> Tier | None:
        return next((t for t in self._tiers if t.holds(block) and self.answers(t)), None)

    # -- a fetch, from start to release ----------------------------------------------------------

    def start(self, blocks: Sequence[Block]) -> Fetch | None:
        """Start reading a window: the first of these that are not at hand and have the same source.
        None: none is missing, none can be had, or there is no room for one now."""
        missing = (block for block in blocks if self._tiers.get(block) is None)
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
        """Reads that nobody waits for, where they alone take the room that a block's would."""
        tier = self._source(block)
        in_flight = self._in_flight[tier.name] if tier else set()
        return list(in_flight) if all(fetch.is_released for fetch in in_flight) else []

    def release(self, fetch: Fetch) -> None:
        """Nobody wants these bytes any more. What is being read takes memory until it is."""
        fetch.is_released = True
        if fetch.is_done:
            self._forget(fetch)

    def give_up(self, fetch: Fetch) -> None:
        """Release a fetch that takes too long; its tier is left out until it has answered."""
        if not fetch.is_done and not fetch.is_late:
            fetch.is_late = True
            self._count_late(fetch, +1)
        self.release(fetch)

    def on_fetched(self, fetch: Fetch) -> None:
        """A tier has read all that it was asked for."""
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
            self.on_change(tier, not answered)

    def _forget(self, fetch: Fetch) -> None:
        """The one place where bytes stop being in flight."""
        self._in_flight[fetch.tier].discard(fetch)
        fetch.records.clear()
