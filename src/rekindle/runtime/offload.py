"""Sequences into blocks: what a turn computed, kept in the store block by block."""

from __future__ import annotations

from dataclasses import dataclass

from rekindle.engine.base import Engine, Sequence
from rekindle.kvcache.block import WriteBack
from rekindle.kvcache.store import Store
from rekindle.runtime.turn import Kept, Turn
from rekindle.tokens import Tokens


@dataclass(slots=True)
class Counts:
    """What reuse has saved and cost, in tokens and bytes."""

    computed_tokens: int = 0
    reused_tokens: int = 0
    restored_bytes: int = 0
    exported_bytes: int = 0
    preemptions: int = 0
    rebuilds: int = 0


@dataclass(slots=True, eq=False)
class Resident:
    """A finished sequence that stays in the pool until room is needed."""

    sequence: Sequence
    prefix: Tokens  # what it holds
    namespace: bytes
    exact_tokens: int  # up to here it was computed in canonical steps
    write_back: WriteBack  # when its blocks are written to lower tiers
    kept: Kept  # up to here its blocks are in the store

    @property
    def tokens(self) -> int:
        return len(self.prefix)


class Keeper:
    """Exports each block once."""

    def __init__(self, engine: Engine, store: Store, counts: Counts) -> None:
        self._engine = engine
        self._store = store
        self._abilities = engine.abilities
        self._counts = counts

    def resident(self, turn: Turn, sequence: Sequence) -> Resident:
        """What a turn has got to; kept from the beginning again if what it kept has left since."""
        return Resident(
            sequence,
            turn.buffer.first(sequence.length),
            turn.namespace,
            exact_tokens=turn.prompt_tokens if sequence.exact else 0,
            write_back=turn.write_back,
            kept=turn.kept if self._store.knows(turn.kept.key) else Kept(0, turn.namespace),
        )

    def keep_all(self, resident: Resident) -> bool:
        """False: there was no room for all of it."""
        kept = True
        while resident.kept.tokens < resident.tokens:
            kept = self.keep_next(resident)
        return kept

    def keep_next(self, resident: Resident) -> bool:
        start = resident.kept.tokens
        stop = min(start + self._abilities.block_tokens, resident.tokens)
        tokens = resident.prefix[start:stop]
        exact = self._is_exact(resident, start, stop)
        resumable = stop == resident.tokens and not self._abilities.can_cut
        kept = True
        if self._store.wants(resident.kept.key, tokens, exact=exact, resumable=resumable):
            blob = self._engine.export(resident.sequence, start, stop, resumable=resumable)
            self._counts.exported_bytes += len(blob)
            kept = self._store.put(
                resident.namespace,
                resident.kept.key,
                tokens,
                blob,
                exact=exact,
                resumable=resumable,
                write_back=resident.write_back,
            )
        resident.kept = resident.kept.after(tokens)
        # It may have been another conversation's before.
        self._store.set_write_back(resident.kept.key, resident.write_back)
        if not kept:  # no room: nothing more fits
            resident.kept = Kept(resident.tokens, resident.kept.key)
        return kept

    def _is_exact(self, resident: Resident, start: int, stop: int) -> bool:
        """Whether the block was computed in whole canonical steps."""
        canonical = resident.exact_tokens - resident.exact_tokens % self._abilities.step_tokens
        return stop - start == self._abilities.block_tokens and stop <= canonical
