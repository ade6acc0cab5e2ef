"""Idle sequences outside the pool, on the same device.

Attention passes over every used cell of a pool up to the highest, whoever owns it: on a GPU one row
beside 200k idle tokens takes four times as long as alone. A parked sequence has its cells copied to
buffers of their own at the speed of the device's memory, and is copied back when it is continued.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from rekindle.engine.base import Sequence
from rekindle.engine.llamacpp import bindings
from rekindle.engine.llamacpp.pools import Pool
from rekindle.errors import PoolFull

LOOSE, LEAST_LOOSE_TOKENS = 2, 4096  # cells below the highest one, for each that is in use
CELL_BYTES, LAYERS_BYTES = 32, 1 << 16  # of the record of what is parked, at most about
SPARE_BYTES = 256 << 20  # of the device, that parking leaves for whatever the driver wants


class Parking:
    """Parks sequences of one pool, within so many tokens and while the device has memory free.
    `guard` is what native calls that may break the engine are made in."""

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
        self._kept: dict[int, tuple[bytes, int]] = {}  # by slot, with the number of tokens
        self._one_token = b""  # any state of one token, which takes the place of what is dropped

    @property
    def used_tokens(self) -> int:
        return sum(tokens for _, tokens in self._kept.values())

    def park(self, sequence: Sequence) -> bool:
        if sequence.exact or sequence.is_parked or not sequence.length:
            raise ValueError("only shared sequences park, once, and not empty")
        needed_bytes = sequence.length * self._token_bytes
        has_room = self.used_tokens + sequence.length <= self.tokens
        if not has_room or self._free_bytes() < needed_bytes + SPARE_BYTES:
            return False
        context, slot = self._pool.context, sequence.slot
        with self._guard():  # of memory there is enough: llama.cpp would end the process
            self._one_token = self._one_token or bytes(context.export(slot, 0, 1))
            kept = context.memory.snapshot(slot, _record_bytes(sequence.length))
            context.memory.remove(slot)
        self._kept[slot] = kept, sequence.length
        self._pool.release_cells(slot)
        sequence.is_parked = True
        return True

    def compact(self) -> None:
        """Where many turns ran, and one is left high up in the pool, bring it down."""
        cells = self._pool.cells
        if cells.peak < LOOSE * cells.used + LEAST_LOOSE_TOKENS or not self._one_token:
            return
        holders = cells.holders
        if len(holders) != 1 or self._free_bytes() < cells.used * self._token_bytes + SPARE_BYTES:
            return
        with self._guard():
            self._bring_down(holders[0])
        cells.peak = cells.used

    def _bring_down(self, slot: int) -> None:
        """Move the cells of the only slot that has any to the first ones."""
        context = self._pool.context
        context.memory.copy(slot, context.scratch)
        kept = bytes(context.memory.read(context.scratch, bindings.STATE_ON_DEVICE))
        context.memory.clear()
        context.memory.write(slot, kept, bindings.STATE_ON_DEVICE)
        self._free(context.scratch)

    def copy(self, source: Sequence, into: Sequence) -> None:
        """All of a parked sequence into the cells of an empty one; raises PoolFull."""
        kept, tokens = self._kept[source.slot]
        if self._pool.cells.free < tokens:
            raise PoolFull("no free cells for what is parked")
        with self._guard():
            context = self._pool.context
            context.memory.write(into.slot, kept, bindings.STATE_ON_DEVICE)
            context.positions[into.slot] = context.positions[source.slot]
        self._pool.cells.append(into.slot, tokens)
        into.length = tokens

    def drop(self, sequence: Sequence) -> None:
        """Forget a parked sequence."""
        with self._guard():
            self._free(sequence.slot)
        del self._kept[sequence.slot]
        sequence.is_parked = False

    def _free(self, slot: int) -> None:
        """Give back the device's memory of what was copied there, of a slot that is empty:
        llama.cpp frees it when a smaller state takes its place."""
        memory = self._pool.context.memory
        memory.write(slot, self._one_token, bindings.WHOLE_STATE)
        memory.read(slot, bindings.STATE_ON_DEVICE)
        memory.remove(slot)

    def clear(self) -> None:
        """The pool was rebuilt, and has given all of it back."""
        self._kept.clear()


def _record_bytes(tokens: int) -> int:
    return tokens * CELL_BYTES + LAYERS_BYTES
