"""Moves idle sequences out of the KV pool, within the memory of the same device.

Attention visits every used cell of a pool up to the highest one, whichever sequence owns it. On a
GPU a row next to 200k idle tokens takes four times as long as without them. The cells of a parked
sequence are copied to separate buffers at the speed of device memory, and copied back when the
sequence is continued.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from rekindle.engine.base import Sequence
from rekindle.engine.llamacpp import bindings
from rekindle.engine.llamacpp.pools import Pool
from rekindle.errors import PoolFull

MIN_GAP_TOKENS = 4096  # fewer unused cells below the highest one are not worth a copy
SPARE_BYTES = 256 << 20  # device memory that parking leaves to the driver


class DeviceParking:
    """Parks sequences of one pool while the token limit and the free device memory allow it. Native
    calls that may break the engine run inside `guard`."""

    def __init__(
        self,
        pool: Pool,
        tokens: int,
        token_bytes: int,
        free_bytes: Callable[[], int],
        guard: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.tokens = tokens
        self._pool = pool
        self._token_bytes = token_bytes
        self._free_bytes = free_bytes
        self._guard = guard
        self._kept: dict[int, tuple[bytes, int]] = {}  # record and number of tokens, by slot
        self._one_token = b""  # any state of one token, to replace a dropped one

    @property
    def used_tokens(self) -> int:
        return sum(tokens for _, tokens in self._kept.values())

    def park(self, sequence: Sequence) -> bool:
        if sequence.exact or sequence.is_parked or not sequence.length:
            raise ValueError("an exact, empty or parked sequence cannot be parked")
        needed_bytes = sequence.length * self._token_bytes
        has_room = self.used_tokens + sequence.length <= self.tokens
        if not has_room or self._free_bytes() < needed_bytes + SPARE_BYTES:
            return False
        context, slot = self._pool.context, sequence.slot
        with self._guard():  # memory was checked above: llama.cpp would end the process
            self._one_token = self._one_token or bytes(context.export(slot, 0, 1))
            kept = context.memory.snapshot(slot, _max_record_bytes(sequence.length))
            context.memory.remove(slot)
        self._kept[slot] = kept, sequence.length
        self._pool.release_cells(slot)
        sequence.is_parked = True
        return True

    def compact(self) -> None:
        """Move a single remaining sequence to the start of the pool if it is high up."""
        cells = self._pool.cells
        if cells.peak < 2 * cells.used + MIN_GAP_TOKENS or not self._one_token:
            return
        holders = cells.holders
        if len(holders) != 1 or self._free_bytes() < cells.used * self._token_bytes + SPARE_BYTES:
            return
        with self._guard():
            self._move_down(holders[0])
        cells.peak = cells.used

    def _move_down(self, slot: int) -> None:
        """Move the cells of the only slot that has any to the first cells."""
        context = self._pool.context
        context.memory.copy(slot, context.scratch)
        kept = bytes(context.memory.read(context.scratch, bindings.STATE_ON_DEVICE))
        context.memory.clear()
        context.memory.write(slot, kept, bindings.STATE_ON_DEVICE)
        self._free(context.scratch)

    def copy(self, source: Sequence, into: Sequence) -> None:
        kept, tokens = self._kept[source.slot]
        if self._pool.cells.free < tokens:
            raise PoolFull("no free cells for the parked sequence")
        with self._guard():
            context = self._pool.context
            context.memory.write(into.slot, kept, bindings.STATE_ON_DEVICE)
            context.positions[into.slot] = context.positions[source.slot]
        self._pool.cells.append(into.slot, tokens)
        into.length = tokens

    def drop(self, sequence: Sequence) -> None:
        with self._guard():
            self._free(sequence.slot)
        del self._kept[sequence.slot]
        sequence.is_parked = False

    def _free(self, slot: int) -> None:
        """Release the device memory of an empty slot, by replacing its state with a smaller one."""
        memory = self._pool.context.memory
        memory.write(slot, self._one_token, bindings.WHOLE_STATE)
        memory.read(slot, bindings.STATE_ON_DEVICE)
        memory.remove(slot)

    def clear(self) -> None:
        self._kept.clear()


def _max_record_bytes(tokens: int) -> int:
    """Estimate the size of the record of a parked sequence."""
    return 32 * tokens + (1 << 16)
