"""Who goes next: turns are admitted fairly, batched continuously, and each ends exactly once."""

from __future__ import annotations

import time
from collections.abc import Callable

from rekindle.engine.base import Engine, Sampled, Work
from rekindle.errors import EngineBroken, PoolFull, ServerError
from rekindle.protocol.events import TERMINAL, Cancelled, Event, Failed, Prefill, Started
from rekindle.runtime.batch import Batch, Batcher
from rekindle.runtime.idle_pools import RowsByType
from rekindle.runtime.kv_manager import KvManager
from rekindle.runtime.picture_encoder import PictureEncoder
from rekindle.runtime.pipeline import Pipeline, Start
from rekindle.runtime.turn import Turn

FOLLOW_TOKENS = 32  # a prefix worth waiting for while another turn computes it
OVERTAKEN_TURNS = 8  # turns that a turn may overtake for each point of its priority
MOST_RESTARTS = 3
REPORT_S = 1.0  # between two Prefill events of a turn whose client did not ask for them

Emit = Callable[[list[Event]], None]


class Scheduler:
    """Owns the engine's time. Called from the one thread that owns the engine."""

    def __init__(
        self,
        engine: Engine,
        kv: KvManager,
        pictures: PictureEncoder,
        pipeline: Pipeline,
        emit: Emit,
        *,
        parallel: int,
    ) -> None:
        self._engine = engine
        self._pictures = pictures
        self._kv = kv
        self._pipeline = pipeline
        self._emit = emit
        self._parallel = parallel
        self._batcher = Batcher(engine.capabilities, parallel)
        self._waiting: list[Turn] = []
        self._restoring: list[Turn] = []  # what they reuse is on its way into their sequences
        self._running: list[Turn] = []
        self._brought: list[tuple[Turn, Sampled | None]] = []  # by the last step: not delivered
        self._ended: list[Turn] = []  # that still have their sequences
        self._tickets = 0
        if engine.capabilities.computes_beside:
            engine.meanwhile = self._deliver

    @property
    def turns(self) -> int:
        return len(self._waiting) + len(self._restoring) + len(self._running)

    @property
    def wait_s(self) -> float | None:
        """How long there is nothing to do unless something is reported; None: for ever."""
        waits = [self._pipeline.wait_s(turn) for turn in self._restoring]
        waits += [self._pictures.wait_s(turn) for turn in self._running if turn.waits_for_vectors]
        return min((wait_s for wait_s in waits if wait_s is not None), default=None)

    def submit(self, turn: Turn) -> None:
        """Take a turn in. Its priority moves it ahead of so many that came before, or lets so many
        that come after pass: nobody waits for ever."""
        self._tickets += 1
        turn.place = self._tickets - OVERTAKEN_TURNS * turn.request.priority
        _insert(self._waiting, turn)

    def cancel(self, turn_id: int) -> bool:
        """End a turn now, keeping what it computed; False when it is not here."""
        self._check_engine()
        try:
            self._settle()
        except EngineBroken as error:
            self._restart_all(error)
        for turn in [*self._waiting, *self._restoring, *self._running]:
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
        for turn in [*self._running, *self._restoring, *self._waiting]:
            self.cancel(turn.id)

    def step(self) -> bool:
        """One native call's worth of work; False when there is nothing to do but wait."""
        self._check_engine()
        allowance = self._kv.allowance
        allowance.renew(is_shared=any(turn.pending_tokens == 1 for turn in self._running))
        try:
            self._restore()
            self._admit()
            self._cross()
            self._kv.export_some(self._running)
            has_encoded = self._encode_picture()
            batch = self._batcher.compose(self._running)
            if batch:
                return self._compute(batch)
            if self._brought:
                self._settle()
                return True
            return has_encoded or allowance.is_spent or self._kv.offload_one()
        except EngineBroken as error:
            self._restart_all(error)
            return True

    def _encode_picture(self) -> bool:
        """Vectors for turns that have come to a picture. One is encoded at most: the other turns go
        on between two."""
        for turn in [turn for turn in self._running if turn.tokens.media and turn.wants_vectors]:
            try:
                if self._pictures.supply(turn):
                    return True
            except ServerError as error:
                self._end(turn)
                self._emit([Failed(turn.id, error.info)])
        return False

    def _compute(self, batch: Batch) -> bool:
        started = time.perf_counter()
        self._kv.is_computing = True
        try:
            results = self._engine.step([work for _, work in batch])
        except PoolFull:
            self._kv.is_computing = False
            self._preempt(batch)
            return True
        finally:
            self._kv.is_computing = False
        self._settle()
        self._take_in(batch, results, time.perf_counter() - started)
        return True

    # -- admitting -----------------------------------------------------------------------------

    def _restore(self) -> None:
        """Go on with turns whose state is being restored, those that came first first."""
        for turn in list(self._restoring):
            if turn.crossing:
                continue
            outcome = self._pipeline.restore(turn)
            if outcome is not Start.RESTORING:
                self._restoring.remove(turn)
                self._take(turn, outcome)

    def _cross(self) -> None:
        """Bring over turns that go on in cells of another type, those that came first first; while
        they are on their way they do not run."""
        ready = [turn for turn in self._running if turn.cross_at is not None and turn.must_cross]
        for turn in [*(turn for turn in self._restoring if turn.crossing), *ready]:
            others = [other for other in (*self._running, *self._restoring) if other is not turn]
            try:
                outcome = self._pipeline.cross(turn, others)
            except ServerError as error:  # what only this turn needs is not to be had
                self._end(turn)
                self._emit([Failed(turn.id, error.info)])
            else:
                self._remove(turn)
                self._take(turn, outcome)

    def _admit(self) -> None:
        """Start waiting turns in their order, while they can be fed; plans are made late, so that
        a turn sees everything computed before its own prefill begins."""
        while self._waiting and self._has_room():
            turn = next((t for t in self._waiting if self._may_start(t)), None)
            if turn is None:
                return
            try:
                outcome = self._pipeline.start(turn, self._running, self._restoring)
            except ServerError as error:  # what only this turn needs is not to be had
                self._end(turn)
                self._emit([Failed(turn.id, error.info)])
                continue
            if outcome is Start.NO_ROOM:
                return
            self._waiting.remove(turn)
            self._take(turn, outcome)

    def _take(self, turn: Turn, outcome: Start) -> None:
        """A turn that is in no list goes on where its start has led it."""
        if outcome is Start.STARTED:
            self._begin(turn)
        else:
            _insert(self._restoring if outcome is Start.RESTORING else self._waiting, turn)

    def _has_room(self) -> bool:
        """Whether another turn may run, and the next batch has rows for its prompt. Turns that are
        being restored count: their state takes memory."""
        turns = len(self._running) + len(self._restoring)
        return turns < self._parallel and self._batcher.has_room(self._running)

    def _may_start(self, turn: Turn) -> bool:
        most = self._engine.capabilities.exact_sequences
        if turn.request.exact and self._exact_sequences >= most:
            return False
        return not self._follows(turn)

    @property
    def _exact_sequences(self) -> int:
        """Those that are open; of turns that cross and have two, the first is not counted twice."""
        exact = [turn for turn in (*self._running, *self._restoring) if turn.request.exact]
        crossing = sum(turn.crossing is not None for turn in exact)
        return len(exact) + max(crossing - 1, 0)

    def _begin(self, turn: Turn) -> None:
        _insert(self._running, turn)
        if not turn.is_started:
            turn.is_started = True
            self._emit([Started(turn.id, turn.prompt_tokens, turn.held_tokens, turn.report)])
            if turn.request.prepare is None:
                turn.sampler = self._engine.sampler(
                    turn.request.sampling,
                    turn.tokens.text_ids,  # nothing is sampled yet
                    turn.encoded.decoding.token_mask,
                )

    def _follows(self, turn: Turn) -> bool:
        """Whether a prefix this turn needs is just being computed or restored for another: then it
        waits, and that is done once."""
        reading = (leader for leader in self._running if leader.is_prefilling)
        return any(self._leads(leader, turn) for leader in (*reading, *self._restoring))

    def _leads(self, leader: Turn, turn: Turn) -> bool:
        ahead_of, behind = leader.request, turn.request
        together = ahead_of.reuse and behind.reuse and ahead_of.exact == behind.exact
        precision = turn.precision
        if not together or not (leader.precision == precision or leader.space == precision.first):
            return False
        common = min(leader.tokens.common_prefix(turn.tokens), len(turn.tokens) - 1)
        if leader.precision != precision and precision.start_tokens:
            common = min(common, precision.start_tokens)  # then it goes on in cells of its own
        is_on_its_way = leader.restoration or leader.crossing
        held_tokens = 0 if is_on_its_way else leader.held_tokens  # that can be shared
        # An exact prefix can be had when the leader's whole prompt is in the store, not before.
        ahead = turn.request.exact or common > held_tokens
        if common < FOLLOW_TOKENS or not ahead:
            return False
        if leader.checkpoints and common > leader.held_tokens:
            leader.checkpoints.add(common)
        return True

    # -- computing -----------------------------------------------------------------------------

    def _take_in(self, batch: Batch, results: list[Sampled | None], took_s: float) -> None:
        """What a step brought, to the turns it was computed for, but for those that have ended
        meanwhile. Replies that only go on are delivered while the next step is computed."""
        rows = self._batcher.learn(batch, took_s)
        self._kv.counts.computed_tokens += rows
        if len(batch) == 1:
            self._kv.cost_gate.learn_computing(batch[0][0].held_tokens, rows, took_s)
        if self._kv.idle:
            self._kv.idle.count_rows(_shared_rows(batch))
        may_wait = self._engine.capabilities.computes_beside
        events: list[Event] = []
        for (turn, work), sampled in zip(batch, results, strict=True):
            if turn.sampler is None and sampled is not None:
                continue  # it has ended
            may_wait = may_wait and turn.only_goes_on
            self._account(turn, work, took_s, events)
            if sampled is not None:
                turn.take(sampled)
            self._brought.append((turn, sampled))
        if events:
            self._emit(events)
        if not may_wait:
            self._settle()
            self._keep_prompts(batch)
        if rows > len(batch):
            self._batcher.rotate(self._running)

    def _deliver(self) -> None:
        """Tell clients what the last step brought."""
        events: list[Event] = []
        brought, self._brought = self._brought, []
        for turn, sampled in brought:
            parts = self._pipeline.accept(turn, sampled)
            events += parts
            if parts and isinstance(parts[-1], TERMINAL):
                self._leave(turn)
                self._ended.append(turn)
        if events:
            self._emit(events)  # before keeping: clients do not wait for that

    def _settle(self) -> None:
        """Deliver, and keep what ended turns have computed, no step being under way."""
        if self._brought:
            self._deliver()
        self._kv.forget_rest()
        while self._ended:  # all have left, before keeping the first can break the engine
            self._pipeline.retire(self._ended.pop(0))

    def _keep_prompts(self, batch: Batch) -> None:
        """State that others wait for, or may resume from."""
        for turn, _ in batch:
            if turn.request.exact and turn.generated_tokens == 1:
                self._kv.offload_prompt(turn)  # for exact turns that wait for this prefix
            if turn.checkpoints and turn.sequence and turn.checkpoints.reach(turn.held_tokens):
                self._kv.offload_checkpoint(turn)

    def _account(self, turn: Turn, work: Work, took_s: float, events: list[Event]) -> None:
        turn.slice_tokens += len(work.tokens)
        if turn.shown and not turn.next_picture:
            turn.shown = None
        if not turn.generated_tokens:
            turn.prompt_eval_s += took_s
            turn.unreported_s += took_s
            if turn.request.progress or turn.unreported_s >= REPORT_S:
                turn.unreported_s = 0.0
                events.append(Prefill(turn.id, turn.held_tokens, turn.prompt_tokens))

    # -- ending --------------------------------------------------------------------------------

    def _end(self, turn: Turn) -> None:
        """Give back everything a turn holds; what it computed is kept."""
        self._leave(turn)
        self._pipeline.retire(turn)

    def _remove(self, turn: Turn) -> None:
        for turns in (self._waiting, self._restoring, self._running):
            if turn in turns:
                turns.remove(turn)

    def _leave(self, turn: Turn) -> None:
        self._remove(turn)
        turn.sampler = None

    def _preempt(self, batch: Batch) -> None:
        """The pool is full in mid-reply: the last turn waits until there is room again."""
        rows = _shared_rows(batch)
        full = [name for name in rows if self._engine.free_tokens(name) < rows[name]]
        self._settle()
        if not full:
            self._engine.reset()
            raise EngineBroken("the engine found no room where there must be some")
        if all(self._kv.make_room(rows[name], name) for name in full):
            return
        if self._kv.allowance.is_spent:
            return  # the next step goes on
        shared = (turn for turn in (*self._restoring, *self._running) if not turn.request.exact)
        holding = [turn for turn in shared if turn.space.kv_type in full]
        if not holding:
            return  # all have ended meanwhile
        last = max(holding, key=lambda turn: turn.place)
        self._kv.counts.preemptions += 1
        self._remove(last)
        self._waiting.insert(0, last)
        self._pipeline.retire(last)

    def _check_engine(self) -> None:
        """Start over if the engine broke since the last step."""
        if self._kv.broken is not None:
            self._restart_all(self._kv.broken)

    def _restart_all(self, error: EngineBroken) -> None:
        """The engine lost every sequence: all turns go on from their tokens, or end in an error
        when they have been here too often."""
        self._kv.lose_everything()
        self._deliver()
        for turn in self._ended:
            self._kv.release(turn)
        self._ended.clear()
        for turn in [*self._waiting, *self._restoring, *self._running]:
            self._kv.release(turn)  # of those that wait, one may have been starting
        lost = [*self._running, *self._restoring]
        self._running, self._restoring = [], []
        for turn in lost:
            turn.restarts += 1
            token_mask = turn.encoded.decoding.token_mask
            if token_mask is not None:  # it may have seen a token that was lost
                token_mask.replay(turn.tokens.part(turn.prompt_tokens))
        self._waiting[:0] = lost
        for turn in [turn for turn in lost if turn.restarts > MOST_RESTARTS]:
            self._end(turn)
            failure = ServerError(f"the engine failed repeatedly: {error}")
            self._emit([Failed(turn.id, failure.info)])


def _shared_rows(batch: Batch) -> RowsByType:
    """Rows that are computed in pools, by the KV type of each."""
    rows = RowsByType()
    for turn, work in batch:
        if not turn.request.exact:
            rows[turn.space.kv_type] += len(work.tokens)
    return rows


def _insert(turns: list[Turn], turn: Turn) -> None:
    """Put a turn behind those whose place is before its own."""
    behind = (at for at, other in enumerate(turns) if other.place > turn.place)
    turns.insert(next(behind, len(turns)), turn)
