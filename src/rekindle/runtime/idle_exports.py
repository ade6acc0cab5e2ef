"""State of idle sequences on its way to the store, within the step's allowance."""

from __future__ import annotations

from rekindle.engine.base import Engine, KvType, Work
from rekindle.runtime.offload import Allowance, IdleSequence, Offloader


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
        if self._engine.free_tokens(self._kv_type) < len(idle.tokens):
            return False
        idle.copy = self._engine.open(exact=False, kv_type=self._kv_type)
        self.copied = idle
        self._engine.share(idle.sequence, len(idle.tokens), idle.copy)
        return True

    def close_copy(self, idle: IdleSequence | None = None) -> None:
        """Let the copy go; if it is of this sequence."""
        copied = self.copied
        if copied is None or (idle is not None and idle is not copied):
            return
        self.copied = None
        if copied.copy is not None:
            self._engine.close_sequence(copied.copy)
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
            self._engine.truncate(idle.sequence, start)
            idle.uncut, idle.tokens = idle.tokens, idle.tokens[:start]

    def gather(self, idle: IdleSequence, *, computes: bool = False) -> None:
        """Do without state whose cells lie apart, or compute it again, side by side: both are
        faster than to move it."""
        self.cut(idle)
        tokens, idle.uncut = idle.uncut, None
        if tokens is None or not computes:
            return
        rest = tokens[len(idle.tokens) :]
        free_tokens = self._engine.free_tokens(self._kv_type)
        most = min(self._engine.capabilities.batch_tokens, free_tokens)
        if len(rest) <= most and not rest.media:
            self._engine.step([Work(idle.sequence, rest.ids(), None)])
            idle.tokens = tokens
