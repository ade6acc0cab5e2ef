"""Who goes next: turns are admitted fairly, batched continuously, and each ends exactly once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from rekindle.engine.base import Engine, Sampled, Work
from rekindle.errors import EngineBroken, PoolFull, ServerError
from rekindle.protocol.events import TERMINAL, Cancelled, Event, Failed, Prefill, Started
from rekindle.runtime.kv_manager import KvManager
from rekindle.runtime.pipeline import Pipeline, Start
from rekindle.runtime.turn import Turn

ALONE_S, SHARED_S = 2.0, 0.25  # how long a prefill slice may hold up a cancel, or other replies
LEAST_SLICE_TOKENS = 64
UNKNOWN_SLICE_TOKENS = 256  # before the first slice has shown how fast the machine is
QUANTUM_SLICES = 4  # slices after which a long prompt lets the next one in
FOLLOW_TOKENS = 32  # a prefix worth waiting for while another turn computes it
OVERTAKEN_TURNS = 8  # turns that a turn may overtake for each point of its priority
MOST_RESTARTS = 3
REPORT_S = 1.0  # between two words on how a prompt is getting on, for whoever did not ask

Emit = Callable[[list[Event]], None]


class Scheduler:
    """Owns the engine's time. Called from the one thread that owns the engine."""

    def __init__(
        self, engine: Engine, kv: KvManager, pipeline: Pipeline, emit: Emit, *, parallel: int
    ) -> None:
        self._engine = engine
        self._kv = kv
        self._pipeline = pipeline
        self._emit = emit
        self._parallel = parallel
        self._step_tokens = engine.capabilities.step_tokens
        self._waiting: list[Turn] = []
        self._active: list[Turn] = []
        self._tickets = 0
        self._slice = SliceSize(engine.capabilities.batch_tokens - parallel)

    @property
    def turns(self) -> int:
        return len(self._waiting) + len(self._active)

    def submit(self, turn: Turn) -> None:
        """Take a turn in. Its priority moves it ahead of so many that came before, or lets so many
        that come after pass: nobody waits for ever."""
        self._tickets += 1
        turn.place = self._tickets - OVERTAKEN_TURNS * turn.request.priority
        _insert(self._waiting, turn)

    def cancel(self, turn_id: int) -> bool:
        """End a turn now, keeping what it computed; False when it is not here."""
        self._check_engine()
        for turn in [*self._waiting, *self._active]:
            if turn.id == turn_id:
                self._emit([Cancelled(turn.id)])
                try:
                    self._end(turn)
                except EngineBroken as error:
                    self._restart_all(error)
                return True
        return False

    def stop(self) -> None:
        """End every turn, keeping what it computed."""
        for turn in [*self._active, *self._waiting]:
            self.cancel(turn.id)

    def step(self) -> bool:
        """One native call's worth of work; False when there is nothing at all to do."""
        self._check_engine()
        try:
            self._admit()
            work = self._compose()
            return self._compute(work) if work else self._kv.offload_one()
        except EngineBroken as error:
            self._restart_all(error)
            return True

    def _compute(self, work: list[tuple[Turn, Work]]) -> bool:
        started = time.perf_counter()
        try:
            results = self._engine.step([item for _, item in work])
        except PoolFull:
            self._preempt(work)
            return True
        self._distribute(work, results, time.perf_counter() - started)
        return True

    # -- admitting -----------------------------------------------------------------------------

    def _admit(self) -> None:
        """Start waiting turns in their order, while they can be fed; plans are made late, so that
        a turn sees everything computed before its own prefill begins."""
        while self._waiting and len(self._active) < self._parallel and self._has_capacity():
            turn = next((t for t in self._waiting if self._may_start(t)), None)
            if turn is None:
                return
            outcome = self._pipeline.start(turn, self._active)
            if outcome is Start.NO_ROOM:
                return
            if outcome is Start.STARTED:
                self._begin(turn)

    def _may_start(self, turn: Turn) -> bool:
        """Turns that hold what they fetched count as running: their state takes memory."""
        if turn.fetch is None:
            holding = sum(other.fetch is not None for other in self._waiting)
            if len(self._active) + holding >= self._parallel:
                return False
        return not turn.is_fetching and not self._follows(turn)

    def _begin(self, turn: Turn) -> None:
        self._waiting.remove(turn)
        _insert(self._active, turn)
        if not turn.is_started:
            turn.is_started = True
            self._emit([Started(turn.id, turn.prompt_tokens, turn.held_tokens)])
            if turn.request.prepare is None:
                turn.sampler = self._engine.sampler(
                    turn.request.sampling,
                    turn.tokens.ids[: turn.prompt_tokens],
                    turn.encoded.decoding.token_mask,
                )

    def _has_capacity(self) -> bool:
        """Whether the next step has rows left for another prompt."""
        prefilling = self._prefilling()
        pending = sum(turn.pending_tokens for turn in prefilling)
        return pending < self._slice_tokens() or prefilling[0].slice_tokens >= self._quantum()

    def _follows(self, turn: Turn) -> bool:
        """Whether a prefix this turn needs is just being computed or fetched for another: then it
        waits, and that is done once."""
        reading = (leader for leader in self._active if leader.is_prefilling)
        fetching = (leader for leader in self._waiting if leader.is_fetching)
        return any(self._leads(leader, turn) for leader in (*reading, *fetching))

    def _leads(self, leader: Turn, turn: Turn) -> bool:
        ahead_of, behind = leader.request, turn.request
        together = ahead_of.reuse and behind.reuse and ahead_of.exact == behind.exact
        if not together or leader.namespace != turn.namespace:
            return False
        common = min(leader.tokens.common_prefix(turn.tokens), len(turn.tokens) - 1)
        # An exact prefix can be had when the leader's whole prompt is in the store, not before.
        ahead = turn.request.exact or common > leader.held_tokens
        if common < FOLLOW_TOKENS or not ahead:
            return False
        if leader.checkpoints and common > leader.held_tokens:
            leader.checkpoints.add(common)
        return True

    def _prefilling(self) -> list[Turn]:
        return [turn for turn in self._active if turn.pending_tokens > 1]

    def _slice_tokens(self) -> int:
        decoding = any(turn.pending_tokens == 1 for turn in self._active)
        return self._slice.tokens(SHARED_S if decoding else ALONE_S)

    def _quantum(self) -> int:
        return QUANTUM_SLICES * self._slice_tokens()

    # -- computing -----------------------------------------------------------------------------

    def _compose(self) -> list[tuple[Turn, Work]]:
        """The next token of every reply, and a slice of the prompts that are being read."""
        work = [
            (turn, self._work(turn, [turn.tokens.ids[-1]]))
            for turn in self._active
            if turn.pending_tokens == 1
        ]
        if len(work) < len(self._active):
            work += self._compose_prefill()
        return work

    def _compose_prefill(self) -> list[tuple[Turn, Work]]:
        prefilling = self._prefilling()
        room = self._even_slice(sum(turn.pending_tokens for turn in prefilling))
        work = []
        for turn in prefilling:
            if room <= 0:
                break
            tokens = turn.next_tokens(room, self._step_tokens)
            work.append((turn, self._work(turn, tokens)))
            room -= len(tokens)
        return work

    def _even_slice(self, pending: int) -> int:
        """As many slices as it takes anyway, but of one size: a short last one is a slow one."""
        slices = max(1, math.ceil(pending / self._slice_tokens()))
        return math.ceil(pending / slices)

    @staticmethod
    def _work(turn: Turn, tokens: list[int]) -> Work:
        assert turn.sequence is not None
        last = len(tokens) == turn.pending_tokens
        return Work(turn.sequence, tokens, turn.sampler if last else None)

    def _distribute(
        self, work: list[tuple[Turn, Work]], results: list[Sampled | None], took_s: float
    ) -> None:
        events: list[Event] = []
        ended = []
        rows = sum(len(item.tokens) for _, item in work)
        self._kv.counts.computed_tokens += rows
        self._slice.learn(rows, took_s)
        for (turn, item), sampled in zip(work, results, strict=True):
            self._account(turn, item, took_s, events)
            brought = self._pipeline.accept(turn, sampled)
            events += brought
            if brought and isinstance(brought[-1], TERMINAL):
                ended.append(turn)
        if events:
            self._emit(events)  # before keeping: clients do not wait for that
        for turn in ended:  # all of them, before keeping the first can break the engine
            self._leave(turn)
        for turn in ended:
            self._pipeline.retire(turn)
        for turn, _ in work:
            if turn.request.exact and turn.generated_tokens == 1:
                self._kv.offload_prompt(turn)  # for exact turns that wait for this prefix
            if turn.checkpoints and turn.sequence and turn.checkpoints.reach(turn.held_tokens):
                self._kv.offload_checkpoint(turn)
        self._rotate()

    def _account(self, turn: Turn, item: Work, took_s: float, events: list[Event]) -> None:
        turn.slice_tokens += len(item.tokens)
        if not turn.generated_tokens:
            turn.prompt_eval_s += took_s
            turn.unreported_s += took_s
            if turn.request.progress or turn.unreported_s >= REPORT_S:
                turn.unreported_s = 0.0
                events.append(Prefill(turn.id, turn.held_tokens, turn.prompt_tokens))

    def _rotate(self) -> None:
        """A prompt that has had its quantum goes behind the others."""
        prefilling = self._prefilling() if len(self._active) > 1 else []
        if len(prefilling) > 1 and prefilling[0].slice_tokens >= self._quantum():
            prefilling[0].slice_tokens = 0
            self._active.remove(prefilling[0])
            self._active.append(prefilling[0])

    # -- ending --------------------------------------------------------------------------------

    def _end(self, turn: Turn) -> None:
        """Give back everything a turn holds; what it computed is kept."""
        self._leave(turn)
        self._pipeline.retire(turn)

    def _leave(self, turn: Turn) -> None:
        if turn in self._active:
            self._active.remove(turn)
        else:
            self._waiting.remove(turn)
        if turn.sampler is not None:
            turn.sampler.close()
            turn.sampler = None

    def _preempt(self, work: list[tuple[Turn, Work]]) -> None:
        """The pool is full in mid-reply: the last turn waits until there is room again."""
        rows = sum(len(item.tokens) for turn, item in work if not turn.request.exact)
        if self._engine.free_tokens >= rows:
            self._engine.reset()
            raise EngineBroken("the engine found no room where there must be some")
        if self._kv.make_room(rows):
            return
        last = max((t for t in self._active if not t.request.exact), key=lambda turn: turn.place)
        self._kv.counts.preemptions += 1
        self._pipeline.retire(last)
        self._kv.make_room(self._engine.capabilities.pool_tokens)
        self._active.remove(last)
        self._waiting.insert(0, last)

    def _check_engine(self) -> None:
        """Start over if the engine broke since the last step."""
        if self._kv.broken is not None:
            self._restart_all(self._kv.broken)

    def _restart_all(self, error: EngineBroken) -> None:
        """The engine lost every sequence: all turns go on from their tokens, or end in an error
        when they have been here too often."""
        self._kv.lose_everything()
        lost, self._active = self._active, []
        for turn in lost:
            turn.sequence = turn.fetch = None
            turn.restarts += 1
            token_mask = turn.encoded.decoding.token_mask
            if token_mask is not None:  # it may have seen a token that was lost
                token_mask.replay(turn.tokens.ids[turn.prompt_tokens :])
        self._waiting[:0] = lost
        for turn in [turn for turn in lost if turn.restarts > MOST_RESTARTS]:
            self._end(turn)
            failure = ServerError(f"the engine failed repeatedly: {error}")
            self._emit([Failed(turn.id, failure.info)])


def _insert(turns: list[Turn], turn: Turn) -> None:
    """Put a turn behind those whose place is before its own."""
    behind = (at for at, other in enumerate(turns) if other.place > turn.place)
    turns.insert(next(behind, len(turns)), turn)


class SliceSize:
    """How many prompt tokens one step may take, learnt from how fast they go."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._tokens_per_s = 0.0

    def learn(self, rows: int, took_s: float) -> None:
        if rows >= LEAST_SLICE_TOKENS and took_s > 0:
            speed = rows / took_s
            self._tokens_per_s = 0.7 * (self._tokens_per_s or speed) + 0.3 * speed

    def tokens(self, allowed_s: float) -> int:
        if not self._tokens_per_s:
            return min(UNKNOWN_SLICE_TOKENS, self._most)
        wished = round(self._tokens_per_s * allowed_s / LEAST_SLICE_TOKENS) * LEAST_SLICE_TOKENS
        return min(max(wished, LEAST_SLICE_TOKENS), self._most)
