"""Exports the state of finished sequences to the store, block by block, within a step budget."""

from __future__ import annotations

from dataclasses import dataclass

from rekindle.engine.base import Engine, Sequence, Work, run_step
from rekindle.kvcache.block import PrefixHandle, WriteBack
from rekindle.kvcache.store import Store
from rekindle.runtime.schedule.turn import Offloaded, Turn
from rekindle.tokens import Tokens

# The budget of a step is this many times larger while no reply is being decoded.
ALONE_FACTOR = 16
# Requantising a byte takes as long as copying this many.
REQUANTISATION_COST = 8
# An export starts again when its blocks have left the store, at most this often.
MAX_EXPORT_RESTARTS = 3


@dataclass(slots=True, eq=False)
class IdleSequence:
    """A finished sequence that stays in the engine until its memory is needed."""

    sequence: Sequence
    tokens: Tokens
    namespace: bytes
    tenant: bytes
    exact_tokens: int  # the first tokens, which were computed in canonical steps
    write_back: WriteBack
    offloaded: Offloaded
    owner: PrefixHandle | None = None  # the entry that it is freed with, or a turn that waits
    restarts: int = 0  # exports begun again because blocks had left the store
    rows_since_idle: int = 0  # computed by other turns
    is_unused: bool = False  # since the last upkeep
    is_evicting: bool = False  # its export has begun, to make room
    copy: Sequence | None = None  # a parked sequence is exported from a copy in the pool
    dropped: Tokens | None = None  # all its tokens, after its scattered cells were freed


@dataclass(slots=True)
class Counts:
    """What reuse saved and what it cost, in tokens and bytes, since the start."""

    computed_tokens: int = 0
    reused_tokens: int = 0
    restored_bytes: int = 0
    exported_bytes: int = 0
    requantised_bytes: int = 0
    requantised_tokens: int = 0
    preemptions: int = 0
    rebuilds: int = 0

    @property
    def moved_bytes(self) -> int:
        """Bytes copied between engine and store, weighted by how long each takes."""
        requantised_bytes = REQUANTISATION_COST * self.requantised_bytes
        return self.restored_bytes + self.exported_bytes + requantised_bytes


class StepBudget:
    """Limits how much state one step may restore, export and requantise.

    Replies wait while state is moved. The budget is larger while no reply is being decoded, because
    then only the turn that is being restored waits.
    """

    def __init__(self, counts: Counts, step_bytes: int) -> None:
        self.step_bytes = step_bytes
        self._counts = counts
        self._stop_bytes = ALONE_FACTOR * step_bytes

    def renew(self, *, is_shared: bool) -> None:
        """Start a step. `is_shared` means that replies are being decoded."""
        steps = 1 if is_shared else ALONE_FACTOR
        self._stop_bytes = self._counts.moved_bytes + steps * self.step_bytes

    @property
    def is_spent(self) -> bool:
        return self._counts.moved_bytes >= self._stop_bytes


class Offloader:
    """Exports blocks that the store does not have.

    A parked sequence is exported from a copy in the pool, one at a time. Scattered cells are not
    exported: copying them takes longer than computing them again.
    """

    def __init__(self, engine: Engine, store: Store, counts: Counts, budget: StepBudget) -> None:
        self._engine = engine
        self._store = store
        self._capabilities = engine.capabilities
        self._counts = counts
        self.budget = budget
        self.copied: IdleSequence | None = None  # the sequence that has a copy

    def idle(self, turn: Turn, sequence: Sequence) -> IdleSequence:
        """Describe the sequence that a turn leaves. If a block has left the store since it was
        exported, the export starts again from the first one."""
        known = self._store.knows(turn.offloaded.key)
        return IdleSequence(
            sequence,
            turn.tokens.first(sequence.length),
            turn.kv_format.namespace,
            turn.namespace,
            exact_tokens=turn.prompt_tokens if sequence.exact else 0,
            write_back=turn.lookup.write_back,
            owner=turn.entry or turn.handle,
            offloaded=turn.offloaded if known else Offloaded(0, turn.kv_format.namespace),
        )

    def offload(self, idle: IdleSequence) -> bool:
        """Export every block that the store lacks. Returns False if the store was full."""
        has_room = True
        while not self.is_offloaded(idle):
            has_room = self.offload_next(idle)
        return has_room

    def is_offloaded(self, idle: IdleSequence) -> bool:
        """Whether every block is in the store. If blocks have left it, the export starts again,
        unless that happened too often."""
        key_is_known = not idle.offloaded.tokens or self._store.knows(idle.offloaded.key)
        if not key_is_known and idle.restarts < MAX_EXPORT_RESTARTS:
            idle.restarts += 1
            idle.offloaded = Offloaded(0, idle.namespace)
        return idle.offloaded.tokens >= len(idle.tokens)

    def offload_next(self, idle: IdleSequence) -> bool:
        """Export one block if the store lacks it. Returns False if the store was full."""
        start = idle.offloaded.tokens
        stop = min(start + self._capabilities.block_tokens, len(idle.tokens))
        tokens = idle.tokens[start:stop]
        if not self._store.conversations.reach(idle.offloaded.key, tokens):
            # No conversation needs the rest, for example after a reply was cut at a stop string.
            idle.offloaded = Offloaded(len(idle.tokens), idle.offloaded.key)
            return True
        exact = self._is_exact(idle, start, stop)
        resumable = stop == len(idle.tokens) and not self._capabilities.can_truncate
        has_room = True
        if self._store.wants(idle.offloaded.key, tokens, exact=exact, resumable=resumable):
            source = idle.copy or idle.sequence
            blob = self._engine.sequences.export(source, start, stop, resumable=resumable)
            self._counts.exported_bytes += len(blob)
            has_room = self._store.put(
                idle.namespace,
                idle.offloaded.key,
                tokens,
                blob,
                exact=exact,
                resumable=resumable,
                write_back=idle.write_back,
                tenant=idle.tenant,
            )
        idle.offloaded = idle.offloaded.after(tokens)
        # Another conversation may have stored the block before, to be written later or never.
        self._store.set_write_back(idle.offloaded.key, idle.write_back)
        if not has_room:  # later blocks do not fit either
            idle.offloaded = Offloaded(len(idle.tokens), idle.offloaded.key)
        return has_room

    def _is_exact(self, idle: IdleSequence, start: int, stop: int) -> bool:
        """Whether the block was computed in whole canonical steps."""
        canonical = idle.exact_tokens - idle.exact_tokens % self._capabilities.step_tokens
        return stop - start == self._capabilities.block_tokens and stop <= canonical

    def export(self, idle: IdleSequence, tokens: int | None = None) -> bool:
        """Export a sequence, or at least its first `tokens`. Returns False if the budget is spent
        and the next step has to continue."""
        while not self.is_offloaded(idle):
            if tokens is not None and idle.offloaded.tokens >= tokens:
                return True
            if self.budget.is_spent or not self.is_ready(idle):
                return False
            if idle.offloaded.tokens < len(idle.tokens):  # scattered cells may be gone by now
                self.offload_next(idle)
        return True

    def export_wanted(self, idle: IdleSequence) -> None:
        """Export the blocks that other conversations need, before the sequence of a deleted one is
        closed."""
        if self.is_offloaded(idle):
            return
        start = idle.offloaded.tokens
        tokens = idle.tokens[start : start + self._capabilities.block_tokens]
        if self._store.conversations.reach(idle.offloaded.key, tokens):
            self.export_all_of(idle)

    def export_all_of(self, idle: IdleSequence) -> None:
        """Export a sequence whatever the budget, unless a copy does not fit into the pool."""
        if self.is_ready(idle):
            self.offload(idle)

    def export_block(self, idle: IdleSequence) -> bool:
        """Export one more block. Returns False if nothing is left or a copy does not fit."""
        self.drop_or_recompute(idle, computes=True)
        if idle.offloaded.tokens >= len(idle.tokens) or not self.is_ready(idle):
            return False
        if not self.is_offloaded(idle):
            self.offload_next(idle)
        if self.is_offloaded(idle):
            self.close_copy()
        return True

    def can_leave(self, idle: IdleSequence) -> bool:
        return self.is_offloaded(idle) or self.is_ready(idle)

    def is_ready(self, idle: IdleSequence) -> bool:
        """Prepare a sequence for export. Returns False if a copy does not fit into the pool."""
        if not idle.sequence.is_parked:
            self.drop_or_recompute(idle)
            return True
        if idle.copy is not None:
            return True
        self.close_copy()
        if self._engine.sequences.free_tokens(idle.sequence.kv_type) < len(idle.tokens):
            return False
        idle.copy = self._engine.sequences.open(exact=False, kv_type=idle.sequence.kv_type)
        self.copied = idle
        self._engine.sequences.share(idle.sequence, len(idle.tokens), idle.copy)
        return True

    def close_copy(self, idle: IdleSequence | None = None) -> None:
        """Close the copy, if it is of this sequence."""
        copied = self.copied
        if copied is None or (idle is not None and idle is not copied):
            return
        self.copied = None
        if copied.copy is not None:
            self._engine.sequences.close(copied.copy)
            copied.copy = None

    def close_spare_copy(self) -> None:
        """Close the copy, unless it belongs to a sequence that is being evicted."""
        if self.copied is not None and not self.copied.is_evicting:
            self.close_copy()

    def drop_scattered(self, idle: IdleSequence) -> None:
        """Free scattered cells. A sequence restored into scattered cells needs one copy per
        contiguous run, so every fragmented sequence frees its cells before the next restore."""
        start = idle.sequence.scattered_from
        if start is not None and self._capabilities.can_truncate:
            self._engine.sequences.truncate(idle.sequence, start)
            idle.dropped, idle.tokens = idle.tokens, idle.tokens[:start]

    def drop_or_recompute(self, idle: IdleSequence, *, computes: bool = False) -> None:
        """Free scattered cells and, with `computes`, compute their tokens again in contiguous
        ones. Both are faster than moving them."""
        self.drop_scattered(idle)
        tokens, idle.dropped = idle.dropped, None
        if tokens is None or not computes:
            return
        rest = tokens[len(idle.tokens) :]
        free_tokens = self._engine.sequences.free_tokens(idle.sequence.kv_type)
        most = min(self._capabilities.batch_tokens, free_tokens)
        if len(rest) <= most and not rest.media:
            run_step(self._engine, [Work(idle.sequence, rest.ids(), None)])
            idle.tokens = tokens
