"""Blocks that have left, remembered for a time: their class, and when they were last used."""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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
