"""State in the engine's own memory: what turns leave there, what is copied, what makes room."""

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
from rekindle.runtime.device.offload import Allowance, Counts, Offloader
from rekindle.runtime.reuse.restorer import CostGate, NowS, Restorer
from rekindle.runtime.schedule.turn import Turn

STEP_BYTES = 64 << 20  # of state that a step moves beside replies: some hundredths of a second
GPU_STEP_BYTES = 256 << 20  # as long, over a bus
HURRIED_TOKENS = 1024  # to be computed for a first token, which idle sequences do not delay much


class KvManager:
    """Keeps what turns leave, in idle sequences and in the store; `Admission` lets them begin."""

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
        self.allowance = Allowance(self.counts, step_bytes)
        self.cost_gate = CostGate(store.tiers)
        self.restorer = Restorer(engine, store, self.counts, self.allowance, self.cost_gate, now_s)
        self._offloader = Offloader(engine, store, self.counts)
        copies = 0 if engine.sequences.parking is None else 1  # of parked sequences, to be exported
        self.most_sequences = self._capabilities.sequences - copies

        def idle_pool(kv_type: KvType) -> IdlePool:
            is_usual = kv_type == self._capabilities.kv_type
            return IdlePool(
                engine,
                self._offloader,
                self.allowance,
                Evictor(eviction, estimator if is_usual else None),
                kv_type=kv_type,
                most_sequences=self.most_sequences - parallel,
                most_tokens=idle_tokens,
                by_cost=idle_by_cost,
            )

        self.idle = IdlePools(self._capabilities.kv_type, idle_pool)
        self.broken: EngineBroken | None = None  # since the last step

    # -- keeping -------------------------------------------------------------------------------

    def retire(self, turn: Turn) -> None:
        """Take the sequence off a turn, however it ended, and keep what it computed."""
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
            self._offloader.offload(idle)  # its context is wanted by the next exact turn
            self._engine.sequences.close(sequence)
            return
        self.idle.add(idle)

    def release(self, turn: Turn) -> None:
        """Let a turn hold nothing any more; should it start again, it looks again."""
        if turn.restoration is not None:
            self.restorer.release(turn.restoration)
        turn.sequence = turn.restoration = turn.requantisation = None
        turn.plans = 0

    def _offload_prompt(self, turn: Turn) -> None:
        """Copy the prompt of an exact turn to the store while it goes on."""
        if turn.sequence and turn.request.reuse and self._capabilities.can_truncate:
            self._offloader.offload(self._offloader.idle(turn, turn.sequence))

    def _offload_checkpoint(self, turn: Turn) -> None:
        """Copy a turn's state as far as it has got, with a checkpoint, while it goes on."""
        assert turn.sequence is not None
        idle = self._offloader.idle(turn, turn.sequence)
        if self._offloader.offload(idle):
            turn.offloaded = idle.offloaded.full_blocks(self._capabilities.block_tokens)

    def keep_prompts(self, turns: Iterable[Turn]) -> None:
        """Copy state that others wait for, or may resume from, of turns that a step was of."""
        for turn in turns:
            if turn.request.exact and turn.generated_tokens == 1:
                self._offload_prompt(turn)  # for exact turns that wait for this prefix
            if turn.checkpoints and turn.sequence and turn.checkpoints.reach(turn.held_tokens):
                self._offload_checkpoint(turn)

    def export_some(self, running: list[Turn]) -> bool:
        """Go on with exports that were begun; False: the next step has to."""
        if not self.idle.export_asked() and self.allowance.is_spent:
            return False
        if not self.idle:
            return True
        rows_ahead = RowsByType()
        for turn in running if self.idle.is_in_pool else ():
            if not turn.request.exact and not self._hurries(turn):
                rows_ahead[turn.kv_format.kv_type] += turn.pending_tokens
        return self.idle.trim(rows_ahead)

    def _hurries(self, turn: Turn) -> bool:
        """Whether its first token is so near that parking others would take longer."""
        is_near = not turn.generated_tokens and turn.pending_tokens <= HURRIED_TOKENS
        return is_near and self._engine.sequences.parking is not None

    def offload_one(self) -> bool:
        """Copy one block of an idle sequence to the store, for idle moments; False when all of
        them are there, or the writer has to catch up first."""
        return not self._store.tiers.is_congested and self.idle.use_moment()

    def export(self, handle: PrefixHandle, then: Callable[[], None]) -> None:
        """Call back when the state of a conversation that is in the engine's memory alone is in the
        store."""
        with self._noting_breakage():
            self.idle.export(handle, then)

    def offload_all(self) -> None:
        """Copy to the store all that is still in the engine's memory alone."""
        with self._noting_breakage():
            self.idle.export_all()

    # -- making room ---------------------------------------------------------------------------

    def make_room(self, tokens: int, kv_type: KvType | None = None) -> bool:
        """Move idle sequences down to the store until so many cells of a type are free; False:
        there are no more, or the step's allowance is spent."""
        idle = self.idle.of(kv_type or self._capabilities.kv_type)
        return idle.make_room(tokens, len(idle))

    def release_idle(self) -> None:
        """Give memory back that nobody has used since the last call."""
        with self._noting_breakage():
            self.idle.release_unused()
        self._engine.sequences.release_idle()

    def forget(self, handle: PrefixHandle) -> None:
        """Close the idle sequences of a deleted conversation, so that they are not reused."""
        with self._noting_breakage():
            self.idle.forget(handle)

    @contextmanager
    def _noting_breakage(self) -> Iterator[None]:
        """The engine may break between two steps: turns that run are not there either any more,
        and whoever steps next has to know."""
        try:
            yield
        except EngineBroken as error:
            self.idle.clear()
            self.broken = error

    def lose_everything(self) -> None:
        """The engine was rebuilt: nothing lives there any more."""
        self.idle.clear()
        self.broken = None
        self.counts.rebuilds += 1
