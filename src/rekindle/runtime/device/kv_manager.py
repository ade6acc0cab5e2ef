"""Manages KV state in the engine: keeps it when turns end, copies it to the store, makes room."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rekindle.engine.base import Engine, KvType
from rekindle.errors import EngineBroken
from rekindle.kvcache.block import PrefixHandle
from rekindle.kvcache.entries.entry import Entry
from rekindle.kvcache.eviction.policy import Evictor
from rekindle.runtime.device.idle_pool import IdlePool, IdlePools, RowsByType
from rekindle.runtime.device.offload import Counts, Offloader, StepBudget
from rekindle.runtime.reuse.restorer import CostGate, Restorer
from rekindle.runtime.schedule.turn import Turn
from rekindle.runtime.storage.storage import Storage

# State that one step moves while replies are being decoded. Both take a few hundredths of a second.
STEP_BYTES, GPU_STEP_BYTES = 64 << 20, 256 << 20
# A prompt with at most this many tokens left is computed sooner than idle sequences are parked.
NEARLY_DONE_TOKENS = 1024


class KvManager:
    """Keeps the state of ended turns, first in idle sequences and then in the store."""

    def __init__(self, engine: Engine, storage: Storage, idle_tokens: int | None) -> None:
        """`idle_tokens` limits how much of the pool idle sequences may hold. If it is None, a CPU
        keeps the idle sequences that are worth their cost."""
        store, now_s = storage.store, storage.clock.steady_s
        capabilities, settings = engine.capabilities, storage.settings
        self._engine = engine
        self._store = store
        self._storage = storage
        self._capabilities = capabilities
        self.counts = Counts()
        step_bytes = GPU_STEP_BYTES if capabilities.device == "gpu" else STEP_BYTES
        self.budget = StepBudget(self.counts, step_bytes)
        self.cost_gate = CostGate(store.tiers)
        self.restorer = Restorer(engine, store, self.counts, self.budget, self.cost_gate, now_s)
        self._offloader = Offloader(engine, store, self.counts, self.budget)
        # One sequence is reserved for the copy from which a parked one is exported.
        copies = 0 if engine.sequences.parking is None else 1
        self.max_sequences = capabilities.sequences - copies
        is_costly = capabilities.device == "cpu" and not capabilities.idle_is_free

        def idle_pool(kv_type: KvType) -> IdlePool:
            estimator = storage.device_estimator if kv_type == capabilities.kv_type else None
            return IdlePool(
                engine,
                Offloader(engine, store, self.counts, self.budget),
                Evictor(settings.cache_eviction, estimator),
                kv_type=kv_type,
                max_sequences=self.max_sequences - settings.parallel,
                max_tokens=capabilities.pool_tokens if idle_tokens is None else idle_tokens,
                by_cost=idle_tokens is None and is_costly,
            )

        self.idle = IdlePools(capabilities.kv_type, idle_pool)
        self.broken: EngineBroken | None = None  # outside of a step, since the last one

    # -- keeping -------------------------------------------------------------------------------

    def retire(self, turn: Turn) -> None:
        """Free everything that an ended turn holds. Its entry keeps the state that it computed; if
        it has none, the state is freed too."""
        if turn.entry is not None and not turn.entry.place:
            turn.entry = None  # it was removed in the meantime
        try:
            self._put_away(turn, is_kept=turn.entry is not None)
        finally:  # the engine may break
            self._let_go(turn)
            if turn.entry is None:
                self._storage.drop_pictures(turn.namespace, turn.encoded.prompt.tokens.pictures)

    def preempt(self, turn: Turn) -> None:
        """Free everything that a turn holds, because it has to wait. Its state is kept until it
        resumes or ends."""
        self._hold(turn)
        self._put_away(turn, is_kept=True)

    def _hold(self, turn: Turn) -> None:
        """Make the turn the owner of the state that it stores before it has an entry."""
        before, namespace = turn.handle, turn.kv_format.namespace
        if before and before.namespace == namespace and len(before.tokens) >= turn.held_tokens:
            return
        turn.handle = PrefixHandle(namespace, turn.tokens.all(), tenant=turn.namespace)
        self._store.conversations.attach(turn.handle)
        if before is not None:
            self._hand_over(before, turn.handle)

    def _let_go(self, turn: Turn) -> None:
        """Free what a turn has stored, except what its entry or another one needs."""
        if turn.handle is not None:
            handle, turn.handle = turn.handle, None
            self._hand_over(handle, turn.entry)

    def _hand_over(self, handle: PrefixHandle, successor: PrefixHandle | None) -> None:
        with self._noting_breakage():
            for pool in self.idle.by_type.values():
                pool.replace_owner(handle, successor)
        self._store.conversations.release(handle)

    def _put_away(self, turn: Turn, *, is_kept: bool) -> None:
        sequence, is_whole = turn.sequence, turn.restoration is None
        if turn.requantisation and turn.requantisation.into:
            self._engine.sequences.close(turn.requantisation.into)
        self.release(turn)
        if sequence is None:
            return
        if not (is_kept and turn.request.reuse and sequence.length and is_whole):
            self._engine.sequences.close(sequence)
            return
        idle = self._offloader.idle(turn, sequence)
        if sequence.exact:
            self._offloader.offload(idle)  # the next exact turn needs its context
            self._engine.sequences.close(sequence)
            return
        self.idle.of(sequence.kv_type).add(idle)

    def release(self, turn: Turn) -> None:
        """Drop all handles of a turn. If it starts again, it makes a new plan."""
        if turn.restoration is not None:
            self.restorer.release(turn.restoration)
        turn.sequence = turn.restoration = turn.requantisation = None
        turn.plans = 0

    def keep_prompts(self, turns: Iterable[Turn]) -> None:
        """Copy state that other turns wait for or will resume from, after a step of these turns."""
        for turn in turns:
            if turn.sequence is None:
                continue
            shares = turn.request.exact and turn.request.reuse and self._capabilities.can_truncate
            if shares and turn.generated_tokens == 1:  # other exact turns may wait for this prefix
                self._hold(turn)
                self._offloader.offload(self._offloader.idle(turn, turn.sequence))
            if turn.checkpoints and turn.checkpoints.reach(turn.held_tokens):
                self._hold(turn)
                idle = self._offloader.idle(turn, turn.sequence)
                if self._offloader.offload(idle):
                    turn.offloaded = idle.offloaded.full_blocks(self._capabilities.block_tokens)

    def export_some(self, running: list[Turn]) -> bool:
        """Continue exports, and trim idle sequences. Returns False if the next step has to
        continue."""
        pools = self.idle.by_type
        if not all(pool.continue_flushes() for pool in pools.values()) and self.budget.is_spent:
            return False
        if not self.idle:
            return True
        rows_ahead = RowsByType()
        holds_cells = any(pool.holds_cells for pool in pools.values())
        for turn in running if holds_cells else ():
            if not turn.request.exact and not self._is_nearly_done(turn):
                rows_ahead[turn.kv_format.kv_type] += turn.pending_tokens
        return all(pool.trim(rows_ahead[kv_type]) for kv_type, pool in pools.items())

    def _is_nearly_done(self, turn: Turn) -> bool:
        """Whether its first token is so close that parking idle sequences would delay it more."""
        is_near = not turn.generated_tokens and turn.pending_tokens <= NEARLY_DONE_TOKENS
        return is_near and self._engine.sequences.parking is not None

    def offload_one(self) -> bool:
        """Use an idle moment to copy one block to the store. Returns False if there is nothing to
        copy, or if the disk writer is behind."""
        pools = self.idle.by_type.values()
        has_worked = not self._store.tiers.is_congested and any(
            pool.work_in_idle_moment() for pool in pools
        )
        if has_worked:
            self.enforce_cache_limits()
        return has_worked

    def enforce_cache_limits(self) -> None:
        """Remove state of tenants that store more than their API key allows."""
        self._storage.entries.enforce_cache_limits()

    def export(self, handle: PrefixHandle, then: Callable[[], None]) -> None:
        """Copy the state of one conversation to the store, then call back."""
        with self._noting_breakage():
            idle = (each for each in self.idle if each.namespace == handle.namespace)
            kv_type = next((each.sequence.kv_type for each in idle), self._capabilities.kv_type)
            self.idle.of(kv_type).export(handle, then)

    def offload_all(self) -> None:
        """Copy everything to the store that only the engine holds."""
        with self._noting_breakage():
            for pool in self.idle.by_type.values():
                pool.export_all()

    # -- making room ---------------------------------------------------------------------------

    def make_room(self, tokens: int, kv_type: KvType | None = None) -> bool:
        """Evict idle sequences until this many cells of a KV type are free. Returns False if there
        are none left, or the step budget is spent."""
        idle = self.idle.of(kv_type or self._capabilities.kv_type)
        return idle.make_room(tokens, len(idle))

    def release_idle(self) -> None:
        """Free memory that was not used since the last call. The pools of other KV types are freed
        when they are empty."""
        with self._noting_breakage():
            for pool in self.idle.by_type.values():
                if pool is not self.idle.default:
                    pool.evict_unused()
        self._engine.sequences.release_idle()

    def remove(self, entry: Entry) -> None:
        """Free the idle sequences and the images of a deleted conversation, so that they are not
        reused."""
        with self._noting_breakage():
            for pool in self.idle.by_type.values():
                pool.remove(entry)
        self._storage.drop_pictures(entry.tenant, entry.pictures)

    def forget(self, entry: Entry) -> None:
        """Free the idle sequences and the images of a conversation that was superseded or did not
        fit. Sequences that another conversation uses stay."""
        with self._noting_breakage():
            for pool in self.idle.by_type.values():
                pool.replace_owner(entry, None)
        self._storage.drop_pictures(entry.tenant, entry.pictures)

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
