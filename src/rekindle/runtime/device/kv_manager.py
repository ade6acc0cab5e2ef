"""Manages KV state in the engine: keeps it when turns end, copies it to the store, makes room."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rekindle.engine.base import Engine, KvType
from rekindle.errors import EngineBroken
from rekindle.kvcache.block import PrefixHandle
from rekindle.kvcache.eviction.hit_density import HitDensity
from rekindle.kvcache.eviction.policy import Evictor
from rekindle.kvcache.store import Store
from rekindle.protocol.settings import EvictionPolicy
from rekindle.runtime.device.idle_pool import IdlePool, IdlePools, RowsByType
from rekindle.runtime.device.offload import Counts, Offloader, StepBudget
from rekindle.runtime.reuse.restorer import CostGate, NowS, Restorer
from rekindle.runtime.schedule.turn import Turn

# State that one step moves while replies are being decoded. Both take a few hundredths of a second.
STEP_BYTES, GPU_STEP_BYTES = 64 << 20, 256 << 20
# A prompt with at most this many tokens left is computed sooner than idle sequences are parked.
NEARLY_DONE_TOKENS = 1024


class KvManager:
    """Keeps the state of ended turns, first in idle sequences and then in the store."""

    def __init__(
        self,
        engine: Engine,
        store: Store,
        now_s: NowS,
        estimator: HitDensity,
        *,
        eviction: EvictionPolicy,
        idle_tokens: int,
        idle_by_cost: bool,
        parallel: int,
    ) -> None:
        self._engine = engine
        self._store = store
        self._capabilities = engine.capabilities
        self.counts = Counts()
        step_bytes = GPU_STEP_BYTES if self._capabilities.device == "gpu" else STEP_BYTES
        self.budget = StepBudget(self.counts, step_bytes)
        self.cost_gate = CostGate(store.tiers)
        self.restorer = Restorer(engine, store, self.counts, self.budget, self.cost_gate, now_s)
        self._offloader = Offloader(engine, store, self.counts)
        # One sequence is reserved for the copy from which a parked one is exported.
        copies = 0 if engine.sequences.parking is None else 1
        self.max_sequences = self._capabilities.sequences - copies

        def idle_pool(kv_type: KvType) -> IdlePool:
            is_default = kv_type == self._capabilities.kv_type
            return IdlePool(
                engine,
                self._offloader,
                self.budget,
                Evictor(eviction, estimator if is_default else None),
                kv_type=kv_type,
                max_sequences=self.max_sequences - parallel,
                max_tokens=idle_tokens,
                by_cost=idle_by_cost,
            )

        self.idle = IdlePools(self._capabilities.kv_type, idle_pool)
        self.broken: EngineBroken | None = None  # outside of a step, since the last one

    # -- keeping -------------------------------------------------------------------------------

    def retire(self, turn: Turn) -> None:
        """Free everything that a turn holds, and keep the state that it computed."""
        sequence, is_whole = turn.sequence, turn.restoration is None
        if turn.requantisation and turn.requantisation.into:
            self._engine.sequences.close(turn.requantisation.into)
        self.release(turn)
        if sequence is None:
            return
        if not turn.request.reuse or not sequence.length or not is_whole:
            self._engine.sequences.close(sequence)
            return
        idle = self._offloader.idle(turn, sequence)
        if sequence.exact:
            self._offloader.offload(idle)  # the next exact turn needs its context
            self._engine.sequences.close(sequence)
            return
        self.idle.add(idle)

    def release(self, turn: Turn) -> None:
        """Drop all handles of a turn. If it starts again, it makes a new plan."""
        if turn.restoration is not None:
            self.restorer.release(turn.restoration)
        turn.sequence = turn.restoration = turn.requantisation = None
        turn.plans = 0

    def _offload_prompt(self, turn: Turn) -> None:
        """Copy the prompt of an exact turn to the store while the turn runs."""
        if turn.sequence and turn.request.reuse and self._capabilities.can_truncate:
            self._offloader.offload(self._offloader.idle(turn, turn.sequence))

    def _offload_checkpoint(self, turn: Turn) -> None:
        """Copy what a turn has computed, with a checkpoint, while the turn runs."""
        assert turn.sequence is not None
        idle = self._offloader.idle(turn, turn.sequence)
        if self._offloader.offload(idle):
            turn.offloaded = idle.offloaded.full_blocks(self._capabilities.block_tokens)

    def keep_prompts(self, turns: Iterable[Turn]) -> None:
        """Copy state that other turns wait for or will resume from, after a step of these turns."""
        for turn in turns:
            if turn.request.exact and turn.generated_tokens == 1:
                self._offload_prompt(turn)  # other exact turns may wait for this prefix
            if turn.checkpoints and turn.sequence and turn.checkpoints.reach(turn.held_tokens):
                self._offload_checkpoint(turn)

    def export_some(self, running: list[Turn]) -> bool:
        """Continue exports, and trim idle sequences. Returns False if the next step has to
        continue."""
        if not self.idle.continue_flushes() and self.budget.is_spent:
            return False
        if not self.idle:
            return True
        rows_ahead = RowsByType()
        for turn in running if self.idle.holds_cells else ():
            if not turn.request.exact and not self._is_nearly_done(turn):
                rows_ahead[turn.kv_format.kv_type] += turn.pending_tokens
        return self.idle.trim(rows_ahead)

    def _is_nearly_done(self, turn: Turn) -> bool:
        """Whether its first token is so close that parking idle sequences would delay it more."""
        is_near = not turn.generated_tokens and turn.pending_tokens <= NEARLY_DONE_TOKENS
        return is_near and self._engine.sequences.parking is not None

    def offload_one(self) -> bool:
        """Use an idle moment to copy one block to the store. Returns False if there is nothing to
        copy, or if the disk writer is behind."""
        return not self._store.tiers.is_congested and self.idle.work_in_idle_moment()

    def export(self, handle: PrefixHandle, then: Callable[[], None]) -> None:
        """Copy the state of one conversation to the store, then call back."""
        with self._noting_breakage():
            self.idle.export(handle, then)

    def offload_all(self) -> None:
        """Copy everything to the store that only the engine holds."""
        with self._noting_breakage():
            self.idle.export_all()

    # -- making room ---------------------------------------------------------------------------

    def make_room(self, tokens: int, kv_type: KvType | None = None) -> bool:
        """Evict idle sequences until this many cells of a KV type are free. Returns False if there
        are none left, or the step budget is spent."""
        idle = self.idle.of(kv_type or self._capabilities.kv_type)
        return idle.make_room(tokens, len(idle))

    def release_idle(self) -> None:
        """Free memory that was not used since the last call."""
        with self._noting_breakage():
            self.idle.release_unused()
        self._engine.sequences.release_idle()

    def forget(self, handle: PrefixHandle) -> None:
        """Close the idle sequences of a deleted conversation, so that they are not reused."""
        with self._noting_breakage():
            self.idle.forget(handle)

    @contextmanager
    def _noting_breakage(self) -> Iterator[None]:
        """Remember that the engine broke outside of a step. Running turns have lost their
        sequences as well, so the next step has to restart them."""
        try:
            yield
        except EngineBroken as error:
            self.idle.clear()
            self.broken = error

    def lose_everything(self) -> None:
        """Forget all sequences after the engine was rebuilt."""
        self.idle.clear()
        self.broken = None
        self.counts.rebuilds += 1
