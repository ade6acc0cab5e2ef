"""What is learnt of blocks: how many hits to expect of one for each unit of time it is kept.

After LHD (NSDI 2018). A block is of a class, and a *life* of it goes from one
use to the next; time is counted in uses and entries of the whole tier.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise
from math import log2
from typing import NamedTuple

USES = 2  # used once, or again
EXTENSIONS = 3  # how often another block was put after it: never, once, or again
CLASSES = USES * EXTENSIONS
AGES = 32  # bins of age
BINS_PER_DOUBLING = 0.75
EDGES = [2 ** (age / BINS_PER_DOUBLING) for age in range(AGES + 1)]
WIDTHS = [above - at for at, above in pairwise(EDGES)]
RANK_TICKS = 1024  # between two looks at the counts
FADE_RANKS = 12  # such looks until old lives count less
FADE = 0.9
GHOSTS = 4  # for each block that is held
MOST_GHOSTS = 1 << 17
GHOST_KEY_BYTES = 8


class History(NamedTuple):
    """What is remembered of a block, also for a while after it has left."""

    used_tick: int
    uses: int = 1
    extensions: int = 0

    @property
    def class_(self) -> int:
        uses, extensions = min(self.uses, USES), min(self.extensions, EXTENSIONS - 1)
        return (uses - 1) * EXTENSIONS + extensions


def age_bin(ticks: int) -> int:
    return min(int(log2(ticks) * BINS_PER_DOUBLING), AGES - 1) if ticks > 1 else 0


class HitDensity:
    """Counts lives by class and age at their end, those that ended in a use and all. A block that
    has left is remembered for a time: so it is known what keeping it would have brought."""

    def __init__(self) -> None:
        self.tick = 0
        self.held_blocks = 0
        self._hits = [[0.0] * AGES for _ in range(CLASSES)]
        self._lives = [[0.0] * AGES for _ in range(CLASSES)]
        self._ghosts: OrderedDict[bytes, History] = OrderedDict()
        #: Hits for each tick, by class and age; of what is not known yet the oldest goes first.
        self.worths = [[1 / edge for edge in EDGES[:AGES]] for _ in range(CLASSES)]

    # -- counting ------------------------------------------------------------------------------

    def enter(self, key: bytes) -> History:
        """A block is held from now on; what is remembered of it."""
        self._advance()
        self.held_blocks += 1
        ghost = self._ghosts.pop(key[:GHOST_KEY_BYTES], None)
        return History(self.tick) if ghost is None else self._ended_by_use(ghost)

    def use(self, history: History) -> History:
        """A block that is held is used."""
        self._advance()
        return self._ended_by_use(history)

    def leave(self, key: bytes, history: History) -> None:
        """A block is held no longer."""
        self.held_blocks -= 1
        self._ghosts[key[:GHOST_KEY_BYTES]] = history
        while len(self._ghosts) > min(GHOSTS * max(self.held_blocks, 1), MOST_GHOSTS):
            _, ghost = self._ghosts.popitem(last=False)
            self._lives[ghost.class_][age_bin(self.tick - ghost.used_tick)] += 1

    def _ended_by_use(self, history: History) -> History:
        age = age_bin(self.tick - history.used_tick)
        self._hits[history.class_][age] += 1
        self._lives[history.class_][age] += 1
        return History(self.tick, min(history.uses + 1, USES), history.extensions)

    def _advance(self) -> None:
        self.tick += 1
        if self.tick % RANK_TICKS == 0:
            self._rank()
            if self.tick % (FADE_RANKS * RANK_TICKS) == 0:
                self._fade()

    # -- ranking -------------------------------------------------------------------------------

    def _rank(self) -> None:
        for class_ in range(CLASSES):
            if any(self._lives[class_]):
                self.worths[class_] = densities(self._hits[class_], self._lives[class_])

    def _fade(self) -> None:
        for counts in (*self._hits, *self._lives):
            counts[:] = [count * FADE for count in counts]


def densities(hits: list[float], lives: list[float]) -> list[float]:
    """For each age, the most hits for each tick kept that any time to stop at gives. (Counting up
    to the age of the last life instead undervalues whatever is seldom kept so long.)"""
    older = [0.0] * (AGES + 1)  # lives that reach the end of each bin
    for age in range(AGES - 1, -1, -1):
        older[age] = older[age + 1] + lives[age]
    ticks = [WIDTHS[age] * (older[age + 1] + lives[age] / 2) for age in range(AGES)]
    best = [0.0] * AGES
    for age in range(AGES):
        if not older[age]:  # nothing has lived so long
            best[age] = best[age - 1] / 2 if age else 0.0
            continue
        hits_until = ticks_until = 0.0
        for stop in range(age, AGES):
            if not older[stop]:
                break
            hits_until += hits[stop]
            ticks_until += ticks[stop]
            best[age] = max(best[age], hits_until / ticks_until)
    return best
