"""Sequences into blocks: what a turn computed, exported to the store block by block."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container
from dataclasses import dataclass

from rekindle.engine.base import Engine, KvType, Sequence, Work, run_step
from rekindle.kvcache.block import WriteBack
from rekindle.kvcache.store import Store
from rekindle.runtime.schedule.turn import Offloaded, Turn
from rekindle.tokens import Tokens

ALONE_STEPS = 16  # that a step's allowance is worth while no reply waits
TRANSCODING_WORTH = 8  # copies that take as long as writing state again in other cells
MOST_RESTARTS = 3  # of one sequence's export


@dataclass(slots=True)
class Counts:
    """What reuse has saved and cost, in tokens and bytes."""

    computed_tokens: int = 0
    reused_tokens: int = 0
    restored_bytes: int = 0
    exported_bytes: int = 0
    transcoded_bytes: int = 0
    transcoded_tokens: int = 0
    preemptions: int = 0
    rebuilds: int = 0

    @property
    def moved_bytes(self) -> int:
        """As the time goes: writing state again takes longer than copying it."""
        transcoded_bytes = TRANSCODING_WORTH * self.transcoded_bytes
        return self.restored_bytes + self.exported_bytes + transcoded_bytes


class Allowance:
    """How much state a step may move between engine and store: replies wait meanwhile. More while
    none is being written, for steps are long then, and a turn that is restored waits for them."""

    def __init__(self, counts: Counts, step_bytes: int) -> None:
        self.step_bytes = step_bytes
        self._counts = counts
        self._stop_bytes = ALONE_STEPS * step_bytes

    def renew(self, *, is_shared: bool) -> None:
        """A step begins; `is_shared` with replies."""
        steps = 1 if is_shared else ALONE_STEPS
        self._stop_bytes = self._counts.moved_bytes + steps * self.step_bytes

    @property
    def is_spent(self) -> bool:
        return self._counts.moved_bytes >= self._stop_bytes


@dataclass(slots=True, eq=False)
class IdleSequence:
    """A finished sequence that stays in the pool until room is needed."""

    sequence: Sequence
    tokens: Tokens
    namespace: bytes  # of its state
    tenant: bytes
    exact_tokens: int  # up to here it was computed in canonical steps
    write_back: WriteBack  # when its blocks are to be written to disk
    offloaded: Offloaded  # up to here its blocks are in the store
    restarts: int = 0  # how often they had left it, and were exported again
    rows_meanwhile: int = 0  # that other turns have computed beside it
    is_unused: bool = False  # for some time
    is_leaving: bool = False  # its export was begun to make room
    copy: Sequence | None = None  # in the pool, of one that is parked: it is exported from there
    uncut: Tokens | None = None  # all its tokens, while those whose cells lay apart are cut off


class Offloader:
    """Exports each block once."""

    def __init__(self, engine: Engine, store: Store, counts: Counts) -> None:
        self._engine = engine
        self._store = store
        self._capabilities = engine.capabilities
        self._counts = counts

    def idle(self, turn: Turn, sequence: Sequence) -> IdleSequence:
        """What a turn has computed; all of it is to be exported again if a block left since."""
        known = self._store.knows(turn.offloaded.key)
        return IdleSequence(
            sequence,
            turn.tokens.first(sequence.length),
            turn.kv_format.namespace,
            turn.namespace,
            exact_tokens=turn.prompt_tokens if sequence.exact else 0,
            write_back=turn.lookup.write_back,
            offloaded=turn.offloaded if known else Offloaded(0, turn.kv_format.namespace),
        )

    def offload(self, idle: IdleSequence) -> bool:
        """Export all that is not in the store; False: there was no room for all of it."""
        has_room = True
        while not self.is_offloaded(idle):
            has_room = self.offload_next(idle)
        return has_room

    def is_offloaded(self, idle: IdleSequence) -> bool:
        """Whether there is nothing left to export; blocks that have left the store since they were
        exported are exported again, if that has not happened too often."""
        key_is_known = not idle.offloaded.tokens or self._store.knows(idle.offloaded.key)
        if not key_is_known and idle.restarts < MOST_RESTARTS:
            idle.restarts += 1
            idle.offloaded = Offloaded(0, idle.namespace)
        return idle.offloaded.tokens >= len(idle.tokens)

    def offload_next(self, idle: IdleSequence) -> bool:
        """Export one block, unless the store has it; False: there was no room for it."""
        start = idle.offloaded.tokens
        stop = min(start + self._capabilities.block_tokens, len(idle.tokens))
        tokens = idle.tokens[start:stop]
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
        # The block may have been another conversation's before, which is written later or never.
        self._store.set_write_back(idle.offloaded.key, idle.write_back)
        if not has_room:  # then nothing more fits
            idle.offloaded = Offloaded(len(idle.tokens), idle.offloaded.key)
        return has_room

    def _is_exact(self, idle: IdleSequence, start: int, stop: int) -> bool:
        """Whether the block was computed in whole canonical steps."""
        canonical = idle.exact_tokens - idle.exact_tokens % self._capabilities.step_tokens
        return stop - start == self._capabilities.block_tokens and stop <= canonical


# ----------------------------------------------------------------------
# State of idle sequences on its way to the store, within the step's allowance.


class IdleExports:
    """Exports are made from the pool, those of a parked sequence from a copy, of which there is one
    at a time. What lies apart in the pool is not exported at all."""

    def __init__(
        self, engine: Engine, offloader: Offloader, allowance: Allowance, kv_type: KvType
    ) -> None:
        self._engine = engine
        self._offloader = offloader
        self._allowance = allowance
        self._kv_type = kv_type
        self.copied: IdleSequence | None = None  # the one that has a copy

    def export(self, idle: IdleSequence, tokens: int | None = None) -> bool:
        """Export a sequence, or so many tokens of it at least; False: the next step goes on."""
        while not self._is_exported(idle, tokens):
            if self._allowance.is_spent or not self.is_ready(idle):
                return False
            if idle.offloaded.tokens < len(idle.tokens):  # it may have been cut just now
                self._offloader.offload_next(idle)
        return True

    def _is_exported(self, idle: IdleSequence, tokens: int | None) -> bool:
        is_whole = self._offloader.is_offloaded(idle)
        return is_whole or (tokens is not None and idle.offloaded.tokens >= tokens)

    def export_at_once(self, idle: IdleSequence) -> None:
        """All of it, whatever the allowance; as far as there is room for a copy."""
        if self.is_ready(idle):
            self._offloader.offload(idle)

    def export_block(self, idle: IdleSequence) -> bool:
        """One block more, for idle moments; False: all of them are there, or there is no room for a
        copy."""
        self.gather(idle, computes=True)
        if idle.offloaded.tokens >= len(idle.tokens) or not self.is_ready(idle):
            return False
        if not self._offloader.is_offloaded(idle):
            self._offloader.offload_next(idle)
        if self._offloader.is_offloaded(idle):
            self.close_copy()
        return True

    def can_leave(self, idle: IdleSequence) -> bool:
        """Whether nothing is left to export, or it can be."""
        return self._offloader.is_offloaded(idle) or self.is_ready(idle)

    def is_ready(self, idle: IdleSequence) -> bool:
        """Whether it can be exported; False: there is no room for a copy of it."""
        if not idle.sequence.is_parked:
            self.gather(idle)
            return True
        if idle.copy is not None:
            return True
        self.close_copy()
        if self._engine.sequences.free_tokens(self._kv_type) < len(idle.tokens):
            return False
        idle.copy = self._engine.sequences.open(exact=False, kv_type=self._kv_type)
        self.copied = idle
        self._engine.sequences.share(idle.sequence, len(idle.tokens), idle.copy)
        return True

    def close_copy(self, idle: IdleSequence | None = None) -> None:
        """Let the copy go; if it is of this sequence."""
        copied = self.copied
        if copied is None or (idle is not None and idle is not copied):
            return
        self.copied = None
        if copied.copy is not None:
            self._engine.sequences.close(copied.copy)
            copied.copy = None

    def close_spare_copy(self) -> None:
        """Let the copy go, unless it is of a sequence that is on its way out."""
        if self.copied is not None and not self.copied.is_leaving:
            self.close_copy()

    def cut(self, idle: IdleSequence) -> None:
        """Free the cells that lie apart. What is placed next fills them, and copying it takes as
        many calls as they were runs: so all that lie between one another are freed before that."""
        start = idle.sequence.scattered_from
        if start is not None and self._engine.capabilities.can_truncate:
            self._engine.sequences.truncate(idle.sequence, start)
            idle.uncut, idle.tokens = idle.tokens, idle.tokens[:start]

    def gather(self, idle: IdleSequence, *, computes: bool = False) -> None:
        """Do without state whose cells lie apart, or compute it again, side by side: both are
        faster than to move it."""
        self.cut(idle)
        tokens, idle.uncut = idle.uncut, None
        if tokens is None or not computes:
            return
        rest = tokens[len(idle.tokens) :]
        free_tokens = self._engine.sequences.free_tokens(self._kv_type)
        most = min(self._engine.capabilities.batch_tokens, free_tokens)
        if len(rest) <= most and not rest.media:
            run_step(self._engine, [Work(idle.sequence, rest.ids(), None)])
            idle.tokens = tokens


# ----------------------------------------------------------------------
# Exports of idle sequences that somebody waits for.


@dataclass(frozen=True, slots=True)
class _Asked:
    idle: IdleSequence
    tokens: int  # so many of it at least
    then: Callable[[], None]


class AskedExports:
    """Made in the order in which they were asked for, as the allowance of each step goes."""

    def __init__(self, exports: IdleExports) -> None:
        self._exports = exports
        self._asked: deque[_Asked] = deque()

    def ask(self, idle: IdleSequence, tokens: int, then: Callable[[], None]) -> None:
        self._asked.append(_Asked(idle, tokens, then))

    @property
    def first(self) -> IdleSequence:
        """The one that is to be gone on with."""
        return self._asked[0].idle

    def go_on(self, here: Container[IdleSequence]) -> bool:
        """Call back for those that are done, or whose sequence is not here any more; False: the
        next step goes on."""
        while self._asked:
            asked = self._asked[0]
            if asked.idle in here and not self._exports.export(asked.idle, asked.tokens):
                return False
            self._asked.popleft()
            asked.then()
        return True
