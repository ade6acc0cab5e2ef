"""What is learnt of blocks: how many hits to expect of one for each unit of time it is kept.

After LHD (NSDI 2018). A block is of a class, and a *life* of it goes from one
use to the next; time is counted in uses and entries of the whole tier.
"""

from __future__ import annotations

from array import array
from collections import Counter
from itertools import pairwise
from math import isfinite, log2
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# ----------------------------------------------------------------------
# Blocks that have left, remembered for a time: their class, and when they were last used.

WAYS = 8  # of a set; of a full one that is forgotten which left first
LEAST_SLOTS = 1 << 12
MOST_SLOTS = 1 << 19
SLOT_BYTES = 17  # fingerprint, tick and class
_FINGERPRINT_BYTES = 8
_FINGERPRINT_BITS = 8 * _FINGERPRINT_BYTES
_ODD = 0x9E3779B97F4A7C15  # spreads keys that differ in few bits, and mistakes none for another


class Ghost(NamedTuple):
    class_: int
    used_tick: int


class Ghosts:
    """A set-associative table in flat arrays: SLOT_BYTES for each slot, whatever is in it, and
    MOST_SLOTS of them at most. (A dictionary was rejected: a third of a kilobyte for each.)"""

    def __init__(self) -> None:
        self._bits = (LEAST_SLOTS // WAYS).bit_length() - 1  # of a fingerprint, that name its set
        self._fingerprints = array("Q", bytes(8 * LEAST_SLOTS))  # 0: the slot is free
        self._ticks = array("Q", bytes(8 * LEAST_SLOTS))
        self._classes = array("B", bytes(LEAST_SLOTS))

    @property
    def slots(self) -> int:
        return len(self._fingerprints)

    def take(self, key: bytes) -> Ghost | None:
        """What is remembered of a block that is back; it is no ghost any more."""
        fingerprint = _fingerprint(key)
        begin = self._begin(fingerprint)
        ways = self._fingerprints[begin : begin + WAYS]
        if fingerprint not in ways:
            return None
        slot = begin + ways.index(fingerprint)
        self._fingerprints[slot] = 0
        return Ghost(self._classes[slot], self._ticks[slot])

    def put(self, key: bytes, ghost: Ghost) -> Ghost | None:
        """Remember a block; the one that is forgotten for it, if one is."""
        fingerprint = _fingerprint(key)
        begin = self._begin(fingerprint)
        ways = self._fingerprints[begin : begin + WAYS]
        gap = ways.index(0) if 0 in ways else 0  # of a full set the first goes
        slot = begin + gap
        forgotten = Ghost(self._classes[slot], self._ticks[slot]) if ways[gap] else None
        # A set is in the order in which its blocks left. (By their last use was tried: then one
        # that was kept for long is forgotten at once, and how it fares is never known.)
        last = begin + WAYS - 1
        columns = (self._fingerprints, self._classes, self._ticks)
        for column, value in zip(columns, (fingerprint, *ghost), strict=True):
            column[slot:last] = column[slot + 1 : last + 1]
            column[last] = value
        return forgotten

    def grow(self, slots: int) -> None:
        """Have room for so many, within the limit; each set is split in two, as often as needed."""
        while self.slots < min(slots, MOST_SLOTS):
            old = np.frombuffer(self._fingerprints, np.uint64).reshape(-1, WAYS)
            self._bits += 1
            halves = (old >> np.uint64(_FINGERPRINT_BITS - self._bits)) & np.uint64(1)
            split = np.repeat(old, 2, axis=0)
            split[0::2][halves == 1] = 0
            split[1::2][halves == 0] = 0
            self._ticks = array("Q", _twice(np.frombuffer(self._ticks, np.uint64)))
            self._classes = array("B", _twice(np.frombuffer(self._classes, np.uint8)))
            self._fingerprints = array("Q", split.tobytes())

    def _begin(self, fingerprint: int) -> int:
        return (fingerprint >> (_FINGERPRINT_BITS - self._bits)) * WAYS


def _fingerprint(key: bytes) -> int:
    start = int.from_bytes(key[:_FINGERPRINT_BYTES], "big")
    return start * _ODD % (1 << _FINGERPRINT_BITS) or 1


def _twice(column: NDArray[np.uint64] | NDArray[np.uint8]) -> bytes:
    return np.repeat(column.reshape(-1, WAYS), 2, axis=0).tobytes()


#: A class is the number of uses, so many at most, and whether another block ever followed.
MOST_USES = 4
EXTENDED = MOST_USES
CLASSES = 2 * MOST_USES
AGES = 32  # bins of age
BINS_PER_DOUBLING = 0.75
EDGES = [2 ** (age / BINS_PER_DOUBLING) for age in range(AGES + 1)]
WIDTHS = [above - at for at, above in pairwise(EDGES)]
SPAN_TICKS = 16  # blocks that were last used within one such span are taken for equally old
RANK_TICKS = 1024  # between two looks at the counts, at least
FADE_TICKS = 12 * RANK_TICKS  # until old lives count less
FADE = 0.9
LEAST_LIVES = 256  # to say how likely it is that one ends in a use
GHOSTS = 4  # for each block that is held

Counts = list[list[float]]  # by class and age


def age_bin(ticks: int) -> int:
    return min(int(log2(ticks) * BINS_PER_DOUBLING), AGES - 1) if ticks > 1 else 0


class HitDensity:
    """Counts lives by class and age at their end, those that ended in a use and all. A block that
    has left is remembered for a time: so it is known what keeping it would have brought. Lives that
    have not ended count up to now: else what is used again late would seem to be used again always,
    and what is kept for nothing would never count."""

    def __init__(self) -> None:
        self.tick = 0
        self.held_blocks = 0
        self._hits: Counts = [[0.0] * AGES for _ in range(CLASSES)]
        self._lives: Counts = [[0.0] * AGES for _ in range(CLASSES)]
        #: Lives that have not ended, held or remembered, by class and the ticks they began in.
        self._open: Counter[int] = Counter()
        self._ghosts = Ghosts()
        self._next_rank = RANK_TICKS
        self._starts = [0]
        #: Hits for each tick, by class and age; before they are known the oldest goes first, and
        #: what was used again counts twice.
        self.worths = [
            [(2 if class_ % MOST_USES else 1) / edge for edge in EDGES[:AGES]]
            for class_ in range(CLASSES)
        ]
        #: That a block is used again, by class and age; sure as long as little is known.
        self._chances: Counts = [[1.0] * AGES for _ in range(CLASSES)]
        #: Class and age of all that can be held now, those that go first first.
        self.order = _ordered(self.worths, AGES - 1)

    # -- counting ------------------------------------------------------------------------------

    def enter(self, key: bytes) -> int:
        """A block is held from now on; its class."""
        self._advance()
        self.held_blocks += 1
        ghost = self._ghosts.take(key)
        if ghost is not None:
            return self._ended_by_use(*ghost)
        self._open[_cohort(0, self.tick)] += 1
        return 0

    def use(self, class_: int, used_tick: int) -> int:
        """A block that is held is used; its class from now on."""
        self._advance()
        return self._ended_by_use(class_, used_tick)

    def extend(self, class_: int, used_tick: int) -> int:
        """Another block follows one that is held; its class from now on."""
        if class_ < EXTENDED:
            self._close(class_, used_tick)
            class_ += EXTENDED
            self._open[_cohort(class_, used_tick)] += 1
        return class_

    def leave(self, key: bytes | None, class_: int, used_tick: int) -> None:
        """A block is held no longer; it is remembered by its key, if one is given."""
        self.held_blocks -= 1
        if key is None:
            self._close(class_, used_tick)
            return
        self._ghosts.grow(GHOSTS * self.held_blocks)
        forgotten = self._ghosts.put(key, Ghost(class_, used_tick))
        if forgotten is not None:
            self._close(*forgotten)
            age = age_bin(self.tick - forgotten.used_tick)
            self._lives[forgotten.class_][age] += 1

    def _ended_by_use(self, class_: int, used_tick: int) -> int:
        self._close(class_, used_tick)
        age = age_bin(self.tick - used_tick)
        self._hits[class_][age] += 1
        self._lives[class_][age] += 1
        if class_ % MOST_USES < MOST_USES - 1:
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
        if self.tick % FADE_TICKS == 0:
            for counts in (*self._hits, *self._lives):
                counts[:] = [count * FADE for count in counts]
        if self.tick >= self._next_rank:
            self._rank()
            # It takes time by the cohorts: so each tick's share of it stays the same.
            self._next_rank = self.tick + max(RANK_TICKS, len(self._open))

    @property
    def open_lives(self) -> int:
        """Those that have not ended: of what is held and what is remembered."""
        return self._open.total()

    def chance(self, class_: int, used_tick: int) -> float:
        """That such a block is used again while one like it would be remembered."""
        return self._chances[class_][age_bin(self.tick - used_tick)]

    def age_starts(self) -> list[int]:
        """The first span of each age, and of what is older still: a span is of one age."""
        now = self.tick // SPAN_TICKS
        if self._starts[0] != now + 1:
            self._starts = [int(self.tick - edge) // SPAN_TICKS + 1 for edge in EDGES]
            self._starts[0] = now + 1  # the youngest age has all that is used now
        return self._starts

    # -- ranking -------------------------------------------------------------------------------

    def _rank(self) -> None:
        for class_, lives in enumerate(self._all_lives()):
            if any(lives):
                self.worths[class_] = densities(self._hits[class_], lives)
                self._chances[class_] = chances(self._hits[class_], lives)
        self.order = _ordered(self.worths, age_bin(2 * max(self.tick, RANK_TICKS)))

    def _all_lives(self) -> Counts:
        """With those that have not ended, up to now."""
        cohorts = np.fromiter(self._open, np.int64, len(self._open))
        lives = np.fromiter(self._open.values(), np.float64, len(self._open))
        classes, began = cohorts % CLASSES, cohorts // CLASSES * RANK_TICKS + RANK_TICKS // 2
        ages = np.log2(np.maximum(self.tick - began, 1)) * BINS_PER_DOUBLING
        bins = classes * AGES + np.minimum(ages.astype(np.int64), AGES - 1)
        counted = np.bincount(bins, lives, CLASSES * AGES).reshape(CLASSES, AGES)
        added: Counts = (self._lives + counted).tolist()
        return added

    # -- keeping it ----------------------------------------------------------------------------

    def dump(self) -> list[Counts]:
        """What is learnt, to be loaded by another process: hits and lives."""
        return [self._hits, self._all_lives()]

    def load(self, counts: object) -> None:
        """Go on from what `dump` gave; raises ValueError if that is not what it is."""
        try:
            found = np.asarray(counts, np.float64)
        except (TypeError, OverflowError) as error:
            raise ValueError(str(error)) from None
        if found.shape != (2, CLASSES, AGES) or not all(map(isfinite, found.flat)):
            raise ValueError("these are no counts of hits and lives")
        if (found < 0).any() or (found[0] > found[1]).any():
            raise ValueError("there are more hits than lives")
        self._hits, self._lives = found.tolist()
        try:
            self._rank()
        except ArithmeticError as error:
            raise ValueError(str(error)) from None


def _cohort(class_: int, used_tick: int) -> int:
    """Lives of one class that began at about the same time, as a number."""
    return used_tick // RANK_TICKS * CLASSES + class_


def densities(hits: list[float], lives: list[float]) -> list[float]:
    """For each age, the most hits for each tick kept that any time to stop at gives. (Counting up
    to the age of the last life instead undervalues whatever is seldom kept so long.) It falls no
    faster than age grows: where few have lived so long, none of them used again says little."""
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


def chances(hits: list[float], lives: list[float]) -> list[float]:
    """For each age, the share of lives that reach it and end in a use; 1 if they are too few."""
    found = [1.0] * AGES
    hits_after = lives_after = 0.0
    for age in range(AGES - 1, -1, -1):
        hits_after += hits[age]
        lives_after += lives[age]
        if lives_after >= LEAST_LIVES:
            found[age] = hits_after / lives_after
    return found


def _ordered(worths: list[list[float]], oldest: int) -> list[tuple[int, int]]:
    """Those of least worth first; of equals the oldest."""
    buckets = [(class_, age) for class_ in range(CLASSES) for age in range(oldest + 1)]
    return sorted(buckets, key=lambda bucket: (worths[bucket[0]][bucket[1]], -bucket[1]))
