"""Ranks blocks by hit density: expected hits per unit of time that a block is kept.

Follows LHD (NSDI 2018). Each block belongs to a class, given by its number of uses and by whether
another block follows it. A *life* is the time from one use of a block to the next, or to its
eviction for good. Time is counted in ticks: one tick per use or insertion in the whole tier.
"""

from __future__ import annotations

from array import array
from collections import Counter
from itertools import pairwise
from math import isfinite, log2
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MAX_USES = 4  # uses beyond this number do not change the class
EXTENDED = MAX_USES  # added to the class of a block that another block follows
CLASSES = 2 * MAX_USES
AGES = 32  # logarithmic age bins
BINS_PER_DOUBLING = 0.75
EDGES = [2 ** (age / BINS_PER_DOUBLING) for age in range(AGES + 1)]
WIDTHS = [above - at for at, above in pairwise(EDGES)]
SPAN_TICKS = 16  # blocks last used within the same span count as equally old
RANK_TICKS = 1024  # minimum number of ticks between two updates of the ranking

Counts = list[list[float]]  # by class and age


class Ghost(NamedTuple):
    """What is remembered of an evicted block."""

    class_: int
    used_tick: int


class GhostTable:
    """A set-associative table of evicted blocks in flat arrays, 17 bytes per slot.

    A dictionary was rejected because it takes a third of a kilobyte per block.
    """

    WAYS = 8
    MIN_SLOTS = 1 << 12
    MAX_SLOTS = 1 << 19
    SLOT_BYTES = 17  # fingerprint, tick and class

    def __init__(self) -> None:
        sets = self.MIN_SLOTS // self.WAYS
        self._set_bits = sets.bit_length() - 1  # leading bits of a fingerprint that select its set
        self._fingerprints = array("Q", bytes(8 * self.MIN_SLOTS))  # 0 marks a free slot
        self._ticks = array("Q", bytes(8 * self.MIN_SLOTS))
        self._classes = array("B", bytes(self.MIN_SLOTS))

    @property
    def slots(self) -> int:
        return len(self._fingerprints)

    def take(self, key: bytes) -> Ghost | None:
        """Remove and return the ghost of a block that is back."""
        fingerprint = _fingerprint(key)
        begin = self._set_start(fingerprint)
        ways = self._fingerprints[begin : begin + self.WAYS]
        if fingerprint not in ways:
            return None
        slot = begin + ways.index(fingerprint)
        self._fingerprints[slot] = 0
        return Ghost(self._classes[slot], self._ticks[slot])

    def put(self, key: bytes, ghost: Ghost) -> Ghost | None:
        """Remember an evicted block. Returns the ghost that was overwritten, if any."""
        fingerprint = _fingerprint(key)
        begin = self._set_start(fingerprint)
        ways = self._fingerprints[begin : begin + self.WAYS]
        free = ways.index(0) if 0 in ways else 0  # a full set loses its first ghost
        slot = begin + free
        overwritten = Ghost(self._classes[slot], self._ticks[slot]) if ways[free] else None
        # A set keeps the order of eviction. Ordering by last use was rejected: it forgets a block
        # that was kept for long right away, so its outcome is never learned.
        last = begin + self.WAYS - 1
        columns = (self._fingerprints, self._classes, self._ticks)
        for column, value in zip(columns, (fingerprint, *ghost), strict=True):
            column[slot:last] = column[slot + 1 : last + 1]
            column[last] = value
        return overwritten

    def grow(self, slots: int) -> None:
        """Grow to at least `slots`, up to the maximum, by splitting each set in two."""
        while self.slots < min(slots, self.MAX_SLOTS):
            old = np.frombuffer(self._fingerprints, np.uint64).reshape(-1, self.WAYS)
            self._set_bits += 1
            halves = (old >> np.uint64(64 - self._set_bits)) & np.uint64(1)
            split = np.repeat(old, 2, axis=0)
            split[0::2][halves == 1] = 0
            split[1::2][halves == 0] = 0
            self._ticks = array("Q", self._repeated(np.frombuffer(self._ticks, np.uint64)))
            self._classes = array("B", self._repeated(np.frombuffer(self._classes, np.uint8)))
            self._fingerprints = array("Q", split.tobytes())

    def _repeated(self, column: NDArray[np.uint64] | NDArray[np.uint8]) -> bytes:
        return np.repeat(column.reshape(-1, self.WAYS), 2, axis=0).tobytes()

    def _set_start(self, fingerprint: int) -> int:
        return (fingerprint >> (64 - self._set_bits)) * self.WAYS


def _fingerprint(key: bytes) -> int:
    """64 bits, never 0. The odd factor spreads keys that differ in few bits without collisions."""
    return int.from_bytes(key[:8], "big") * 0x9E3779B97F4A7C15 % (1 << 64) or 1


def age_bin(ticks: int) -> int:
    return min(int(log2(ticks) * BINS_PER_DOUBLING), AGES - 1) if ticks > 1 else 0


class HitDensity:
    """Learns from all blocks of a tier how likely and how soon a block is used again.

    It counts lives by class and by age at their end, and separately the lives that ended in a hit.
    Evicted blocks are remembered as ghosts, so the estimator also learns what keeping them would
    have gained. Lives that are still open count up to now. Otherwise blocks that are used again
    late would look as if they were always used again, and blocks that are kept for nothing would
    never count.
    """

    def __init__(self) -> None:
        self.tick = 0
        self.held_blocks = 0
        self._hits: Counts = [[0.0] * AGES for _ in range(CLASSES)]
        self._lives: Counts = [[0.0] * AGES for _ in range(CLASSES)]
        #: Lives that have not ended, by cohort (see `_cohort`).
        self._open: Counter[int] = Counter()
        self._ghosts = GhostTable()
        self._next_rank = RANK_TICKS
        self._starts = [0]
        #: Hits per tick by class and age. The initial values evict the oldest block first and
        #: count a block that was used again twice.
        self.densities = [
            [(2 if class_ % MAX_USES else 1) / edge for edge in EDGES[:AGES]]
            for class_ in range(CLASSES)
        ]
        #: Probability of another use by class and age; 1 until enough is known.
        self._probabilities: Counts = [[1.0] * AGES for _ in range(CLASSES)]
        #: Pairs of class and age in the order of eviction.
        self.order = _eviction_order(self.densities, AGES - 1)

    def add(self, key: bytes) -> int:
        """Record a new block and return its class."""
        self._advance()
        self.held_blocks += 1
        ghost = self._ghosts.take(key)
        if ghost is not None:
            return self._record_hit(*ghost)
        self._open[_cohort(0, self.tick)] += 1
        return 0

    def use(self, class_: int, used_tick: int) -> int:
        """Record a hit and return the block's new class."""
        self._advance()
        return self._record_hit(class_, used_tick)

    def extend(self, class_: int, used_tick: int) -> int:
        """Record that another block follows this one, and return its new class."""
        if class_ < EXTENDED:
            self._close(class_, used_tick)
            class_ += EXTENDED
            self._open[_cohort(class_, used_tick)] += 1
        return class_

    def remove(self, key: bytes | None, class_: int, used_tick: int) -> None:
        """Record that a block left the tier. With a key it is remembered as a ghost."""
        self.held_blocks -= 1
        if key is None:
            self._close(class_, used_tick)
            return
        self._ghosts.grow(4 * self.held_blocks)
        overwritten = self._ghosts.put(key, Ghost(class_, used_tick))
        if overwritten is not None:
            self._close(*overwritten)
            age = age_bin(self.tick - overwritten.used_tick)
            self._lives[overwritten.class_][age] += 1

    def _record_hit(self, class_: int, used_tick: int) -> int:
        self._close(class_, used_tick)
        age = age_bin(self.tick - used_tick)
        self._hits[class_][age] += 1
        self._lives[class_][age] += 1
        if class_ % MAX_USES < MAX_USES - 1:
            class_ += 1
        self._open[_cohort(class_, self.tick)] += 1
        return class_

    def _close(self, class_: int, used_tick: int) -> None:
        cohort = _cohort(class_, used_tick)
        if self._open[cohort] > 1:
            self._open[cohort] -= 1
        else:
            del self._open[cohort]

    def _advance(self) -> None:
        self.tick += 1
        if self.tick % (12 * RANK_TICKS) == 0:  # older lives count less and less
            for counts in (*self._hits, *self._lives):
                counts[:] = [count * 0.9 for count in counts]
        if self.tick >= self._next_rank:
            self._rank()
            # Ranking takes time in proportion to the cohorts. This bounds the cost per tick.
            self._next_rank = self.tick + max(RANK_TICKS, len(self._open))

    def reuse_probability(self, class_: int, used_tick: int) -> float:
        """Probability that the block is used again while a ghost of it would be remembered."""
        return self._probabilities[class_][age_bin(self.tick - used_tick)]

    def age_starts(self) -> list[int]:
        """The first span of each age bin, and of everything older. A span has one age."""
        now = self.tick // SPAN_TICKS
        if self._starts[0] != now + 1:
            self._starts = [int(self.tick - edge) // SPAN_TICKS + 1 for edge in EDGES]
            self._starts[0] = now + 1  # the youngest bin includes the current span
        return self._starts

    def _rank(self) -> None:
        for class_, lives in enumerate(self._all_lives()):
            if any(lives):
                self.densities[class_] = hit_densities(self._hits[class_], lives)
                self._probabilities[class_] = reuse_probabilities(self._hits[class_], lives)
        self.order = _eviction_order(self.densities, age_bin(2 * max(self.tick, RANK_TICKS)))

    def _all_lives(self) -> Counts:
        """Ended lives, and open ones at their current age."""
        cohorts = np.fromiter(self._open, np.int64, len(self._open))
        lives = np.fromiter(self._open.values(), np.float64, len(self._open))
        classes, began = cohorts % CLASSES, cohorts // CLASSES * RANK_TICKS + RANK_TICKS // 2
        ages = np.log2(np.maximum(self.tick - began, 1)) * BINS_PER_DOUBLING
        bins = classes * AGES + np.minimum(ages.astype(np.int64), AGES - 1)
        counted = np.bincount(bins, lives, CLASSES * AGES).reshape(CLASSES, AGES)
        added: Counts = (self._lives + counted).tolist()
        return added

    def dump(self) -> list[Counts]:
        """Hits and lives, for the next process to load."""
        return [self._hits, self._all_lives()]

    def load(self, counts: object) -> None:
        """Continue from the result of `dump`. Raises ValueError for anything else."""
        try:
            found = np.asarray(counts, np.float64)
        except (TypeError, OverflowError) as error:
            raise ValueError(str(error)) from None
        if found.shape != (2, CLASSES, AGES) or not all(map(isfinite, found.flat)):
            raise ValueError("these are not counts of hits and lives")
        if (found < 0).any() or (found[0] > found[1]).any():
            raise ValueError("there are more hits than lives")
        self._hits, self._lives = found.tolist()
        try:
            self._rank()
        except ArithmeticError as error:
            raise ValueError(str(error)) from None


def _cohort(class_: int, used_tick: int) -> int:
    """A number for the lives of one class that began at about the same time."""
    return used_tick // RANK_TICKS * CLASSES + class_


def hit_densities(hits: list[float], lives: list[float]) -> list[float]:
    """For each age, the most hits per tick that any later eviction time gives.

    Counting until the last life ends was rejected: it undervalues blocks that are rarely kept that
    long. The density never falls faster than the age grows, because a few old lives without a hit
    say little.
    """
    older = [0.0] * (AGES + 1)  # lives that reach the end of each bin
    for age in range(AGES - 1, -1, -1):
        older[age] = older[age + 1] + lives[age]
    ticks = [WIDTHS[age] * (older[age + 1] + lives[age] / 2) for age in range(AGES)]
    best = [0.0] * AGES
    for age in range(AGES):
        best[age] = best[age - 1] * EDGES[age - 1] / EDGES[age] if age else 0.0
        hits_until = ticks_until = 0.0
        for stop in range(age, AGES):
            if not older[stop]:
                break
            hits_until += hits[stop]
            ticks_until += ticks[stop]
            best[age] = max(best[age], hits_until / ticks_until)
    return best


def reuse_probabilities(hits: list[float], lives: list[float]) -> list[float]:
    """For each age, the share of lives that reach it and end in a hit; 1 below 256 lives."""
    found = [1.0] * AGES
    hits_after = lives_after = 0.0
    for age in range(AGES - 1, -1, -1):
        hits_after += hits[age]
        lives_after += lives[age]
        if lives_after >= 256:
            found[age] = hits_after / lives_after
    return found


def _eviction_order(densities: list[list[float]], oldest: int) -> list[tuple[int, int]]:
    """Lowest density first; the older bin first among equals."""
    buckets = [(class_, age) for class_ in range(CLASSES) for age in range(oldest + 1)]
    return sorted(buckets, key=lambda bucket: (densities[bucket[0]][bucket[1]], -bucket[1]))
