"""Runs the turns of one model: admits them, steps the engine, delivers text, finishes them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rekindle.engine.base import Engine, Sampled
from rekindle.errors import EngineBroken, PoolFull, ServerError
from rekindle.fair_queue import EngineShare
from rekindle.protocol.events import Cancelled, Event, Failed, Started
from rekindle.runtime.device.idle_pool import RowsByType
from rekindle.runtime.device.images import PictureEncoder
from rekindle.runtime.device.kv_manager import KvManager
from rekindle.runtime.schedule.batch import Batch, Batcher, StepTiming
from rekindle.runtime.schedule.outbox import Outbox
from rekindle.runtime.schedule.pipeline import Pipeline, Start
from rekindle.runtime.schedule.turn import Turn, TurnQueues, insert

# A turn fails when the engine has lost its state more often than this.
MAX_RESTARTS = 3
# Longest multi-step decode. Then new turns, messages and background work get their chance.
MAX_MULTI_STEP_S = 0.02
# A turn that has waited for this long takes the place of a tenant that has more than its share.
MAX_WAIT_S = 0.5

Emit = Callable[[list[Event]], None]


class Scheduler:
    """Runs all turns of one model. Owns the engine's time and is called from a single thread."""

    def __init__(
        self,
        engine: Engine,
        kv: KvManager,
        pictures: PictureEncoder,
        pipeline: Pipeline,
        emit: Emit,
        is_undisturbed: Callable[[], bool],
        *,
        parallel: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`is_undisturbed` tells whether nothing but running turns wants the engine's thread."""
        self._clock = clock
        self._engine = engine
        self._pictures = pictures
        self._kv = kv
        self._pipeline = pipeline
        self._emit = emit
        self._parallel = parallel
        self._is_undisturbed = is_undisturbed
        self._overlaps = engine.capabilities.async_launch
        share = EngineShare()
        self._queues = TurnQueues(share)
        self._restoring, self._running = self._queues.restoring, self._queues.running
        self._batcher = Batcher(engine.capabilities, parallel, share)
        self._outbox = Outbox()

    @property
    def turns(self) -> int:
        return len(self._queues)

    @property
    def wait_s(self) -> float | None:
        """Longest time to sleep when `step` had nothing to do. None means until a message comes."""
        restorations = (turn.restoration for turn in self._restoring)
        waits = [self._kv.restorer.wait_s(each) for each in restorations if each]
        waits += [self._pictures.wait_s(turn) for turn in self._running if turn.waits_for_vectors]
        return min((wait_s for wait_s in waits if wait_s is not None), default=None)

    def submit(self, turn: Turn) -> None:
        turn.waiting_since_s = self._clock()
        self._queues.submit(turn)

    def step(self) -> bool:
        """Advance every turn by one engine step, or by a few if nothing else wants the engine.
        Returns False when there is nothing to do."""
        try:
            if self._kv.broken is not None:  # since the last step
                raise self._kv.broken
            self._kv.budget.renew(is_shared=any(turn.pending_tokens == 1 for turn in self._running))
            self._restore()
            self._admit()
            self._yield_place()
            self._requantise()
            has_flushed = self._kv.export_some(self._running)
            has_encoded = self._encode_picture()
            batch = self._batcher.compose(self._running, self._queues.waiting)
            if batch:
                self._compute(batch, is_alone=has_flushed)
                return True
            if self._outbox:
                self._flush()
                return True
            return has_encoded or self._kv.budget.is_spent or self._kv.offload_one()
        except EngineBroken as error:
            self._restart_all(error)
            return True

    def _compute(self, batch: Batch, *, is_alone: bool) -> None:
        """Launch a step, deliver the text of the last one, collect the results, finish turns.

        Steps in which replies only grow by a token repeat without returning to `step`, while
        nothing else wants the engine. Between launch and collect only text is delivered: sequences,
        cache and entries stay untouched.
        """
        may_repeat = is_alone and self._may_repeat(batch)
        if batch.has_prefill:
            self._outbox.hasten()  # the step is long, so pending text does not wait for its end
        self._deliver_due(in_flight=False)
        timing = StepTiming(batch, self._clock)
        try:
            pending = self._engine.launch(batch.work)
            self._deliver_due(in_flight=True)
            results = self._engine.collect(pending)
            while may_repeat and (decoded := self._continuing(batch, results, timing)):
                self._kv.counts.computed_tokens += len(batch)
                self._outbox.collect_decoded(batch, decoded, timing.next_step())
                self._deliver_due(in_flight=False)
                pending = self._engine.launch_next(pending, [each.token for each in decoded])
                self._deliver_due(in_flight=True)
                results = self._engine.collect(pending)
        except PoolFull:
            timing.drop_last_step()
            if timing.steps:
                self._learn(timing)
            self._preempt(batch)
            return
        timing.stop()
        self._learn(timing)
        self._kv.counts.computed_tokens += batch.rows
        self._collect(batch, results, timing)

    def _deliver_due(self, *, in_flight: bool) -> None:
        """Deliver text that has waited long enough: while a step is in flight if the device
        computes on its own, otherwise between two steps."""
        is_time = self._outbox.is_due and in_flight == self._overlaps
        if is_time and (events := self._outbox.take()):
            self._emit(events)

    def _may_repeat(self, batch: Batch) -> bool:
        """Whether every turn that has started is in the batch and just decodes, and no other turn
        can start now, so nobody misses a step."""
        started = self._queues.started
        can_start = self._queues.waiting and started < self._parallel
        is_everybody = started == len(batch) and not can_start
        return is_everybody and self._is_undisturbed() and all(map(_only_decodes, batch.turns))

    def _continuing(
        self, batch: Batch, results: list[Sampled | None], timing: StepTiming
    ) -> list[Sampled]:
        """The results of a step after which all replies may decode another token, else nothing."""
        if timing.would_exceed(MAX_MULTI_STEP_S) or not self._is_undisturbed():
            return []
        decoded = [sampled for sampled in results if sampled is not None]
        replies = zip(batch.turns, decoded, strict=True)
        if any(turn.output.is_last(each.token, turn.generated_tokens) for turn, each in replies):
            return []
        return decoded

    def _collect(self, batch: Batch, results: list[Sampled | None], timing: StepTiming) -> None:
        """Give every turn its result, and finish those that have ended."""
        if progress := self._outbox.collect(batch, results, timing.step_s):
            self._emit(progress)
        if (
            self._outbox.must_flush
            or self._outbox.ended
            or (self._outbox.is_due and not self._overlaps)
        ):
            self._flush()
            self._kv.keep_prompts(batch.turns)
        if batch.has_prefill:
            self._batcher.rotate(self._running)

    def _learn(self, timing: StepTiming) -> None:
        """Give the time of computed steps to everything that decides by it."""
        batch = timing.batch
        self._batcher.learn(timing)
        self._queues.charge(timing.used_s())
        if len(batch) == 1:  # a single prompt shows what computing costs, compared with restoring
            [turn] = batch.turns
            self._kv.cost_gate.learn_computing(turn.held_tokens, batch.rows, timing.step_s)
        if self._kv.idle:
            self._kv.idle.count_rows(_rows_by_type(batch, timing.steps))

    def _flush(self) -> None:
        """Deliver all text and finish the turns that it ended. No step may be in flight."""
        self._deliver_all()  # first, so that clients do not wait for their state to be kept
        if self._kv.broken is not None:  # remembering a turn may close sequences of others
            raise self._kv.broken
        self._retire_ended()

    def _deliver_all(self) -> None:
        events = self._outbox.take()
        for turn in self._outbox.take_ended():
            events.append(self._pipeline.finish(turn))
            self._queues.end(turn)
        if events:
            self._emit(events)

    # -- admission -----------------------------------------------------------------------------

    def _restore(self) -> None:
        """Continue restoring stored state. Tenants take turns."""
        for turn in self._queues.next_to_restore():
            if turn.requantisation:
                continue
            with self._moving_state(turn):
                outcome = self._pipeline.restore(turn)
            if outcome is not Start.RESTORING:
                self._restoring.remove(turn)
                self._move(turn, outcome)

    def _admit(self) -> None:
        """Start waiting turns while there is memory for them. Tenants take turns, and the turns of
        a tenant start in order of priority.

        A turn is planned here and not when it arrives, so that it can reuse everything that was
        computed before its own prefill begins.
        """
        exact_sequences = self._engine.capabilities.exact_sequences
        while self._queues.waiting and self._queues.started < self._parallel:
            has_room = self._batcher.tenants_with_room(self._running)
            turn = self._queues.next_to_start(exact_sequences, has_room)
            if turn is None:
                return
            try:
                with self._moving_state(turn):
                    outcome = self._pipeline.start(turn, self._running, self._restoring)
            except ServerError as error:  # a resource that only this turn needs is unavailable
                self._fail(turn, error)
                continue
            if outcome is Start.NO_ROOM:
                return
            self._queues.begin(turn)
            self._move(turn, outcome)

    def _yield_place(self) -> None:
        """Preempt a turn of a tenant that has more than its share, for one that waits too long."""
        if not self._queues.waiting or not self._running:
            return
        waiting = self._queues.next_to_start(
            self._engine.capabilities.exact_sequences,
            self._batcher.tenants_with_room(self._running),
        )
        if waiting is None or self._clock() - waiting.waiting_since_s < MAX_WAIT_S:
            return
        is_full = self._queues.started >= self._parallel
        turn = self._queues.to_yield(waiting, is_full=is_full, quantum_s=MAX_WAIT_S)
        if turn is None:
            return
        self._flush()
        if turn.output.finish_reason is None:  # else its text has just ended it
            waiting.waiting_since_s = self._clock()  # freeing its memory may take some steps
            self._put_back(turn)
        self._admit()

    def _put_back(self, turn: Turn) -> None:
        """Preempt a turn. It waits before the other turns of its tenant, and its state is kept."""
        self._kv.counts.preemptions += 1
        self._queues.remove(turn)
        turn.waiting_since_s = self._clock()
        self._queues.wait_first(turn)
        self._kv.preempt(turn)

    def _requantise(self) -> None:
        """Convert the state of turns that have reached the start of KV quantisation. They do not
        run until that is done. Tenants take turns."""
        for turn in self._queues.next_to_requantise():
            if turn.output.finish_reason is not None:
                continue  # the failure of another turn has delivered its last text
            others = [other for other in (*self._running, *self._restoring) if other is not turn]
            try:
                with self._moving_state(turn):
                    outcome = self._pipeline.requantise(turn, others)
            except ServerError as error:  # a resource that only this turn needs is unavailable
                self._fail(turn, error)
            else:
                self._queues.remove(turn)
                self._move(turn, outcome)

    @contextmanager
    def _moving_state(self, turn: Turn) -> Iterator[None]:
        """Count the state that is moved for a turn, and the time that it takes, as its tenant's."""
        before_bytes, before_s = self._kv.counts.moved_bytes, self._clock()
        yield
        self._queues.count_moved(turn, self._kv.counts.moved_bytes - before_bytes)
        self._queues.charge({turn.tenant: self._clock() - before_s})

    def _encode_picture(self) -> bool:
        """Get the vectors of one image for a turn whose prefill has reached it. At most one image
        is encoded in a step, so that other turns are not delayed for long."""
        wanting = [turn for turn in self._running if turn.tokens.media and turn.wants_vectors]
        for turn in self._batcher.in_prefill_order(wanting):
            self._flush()
            if turn.output.finish_reason is not None:
                continue
            try:
                if self._pictures.supply(turn):
                    return True
            except ServerError as error:
                self._fail(turn, error)
        return False

    def _move(self, turn: Turn, outcome: Start) -> None:
        """Put a turn that is in no queue into the one that its start has led to."""
        if outcome is Start.RESTORING:
            insert(self._restoring, turn)
            return
        if outcome is not Start.STARTED:
            self._queues.wait(turn)
            return
        insert(self._running, turn)
        if turn.is_started:
            return
        turn.is_started = True
        shown = turn.encoded.shown_prompt
        self._emit([Started(turn.id, turn.prompt_tokens, turn.held_tokens, turn.report, shown)])
        if turn.request.prepare is None:
            prompt = turn.tokens.text_ids  # nothing is sampled yet
            mask = turn.encoded.decoding.token_mask
            turn.sampler = self._engine.sampler(turn.request.sampling, prompt, mask)

    # -- ending --------------------------------------------------------------------------------

    def cancel(self, turn_id: int) -> bool:
        """End a turn and keep what it computed. Returns False if it has already ended."""
        try:
            if self._kv.broken is not None:  # since the last step
                raise self._kv.broken
            self._flush()
        except EngineBroken as error:
            self._restart_all(error)
        for turn in self._queues:
            if turn.id == turn_id:
                self._emit([Cancelled(turn.id)])
                try:
                    self._end(turn)
                except EngineBroken as error:
                    self._restart_all(error)
                return True
        return False

    def stop(self) -> None:
        """End every turn and keep what it computed."""
        for turn in self._queues:
            self.cancel(turn.id)

    def _fail(self, turn: Turn, error: ServerError) -> None:
        self._flush()
        if turn.output.finish_reason is not None:
            return  # its pending text has just ended it
        self._emit([Failed(turn.id, error.info)])  # first: keeping its state may break the engine
        self._end(turn)

    def _end(self, turn: Turn) -> None:
        """End a turn that has not finished, and keep what it computed."""
        self._pipeline.abandon(turn)
        self._queues.end(turn)
        if self._kv.broken is not None:  # remembering a turn may close sequences of others
            raise self._kv.broken
        self._retire_ended()

    def _retire_ended(self) -> None:
        """Keep what ended turns computed and free what they hold. Each leaves the list first,
        because keeping its state may break the engine."""
        has_ended = bool(self._queues.ended)
        while self._queues.ended:
            self._kv.retire(self._queues.ended.pop(0))
        if has_ended:
            self._kv.enforce_cache_limits()

    def _preempt(self, batch: Batch) -> None:
        """Make room in a full pool. If idle sequences do not free enough, a turn has to wait."""
        rows = _rows_by_type(batch)
        free_tokens = self._engine.sequences.free_tokens
        full = [kv_type for kv_type in rows if free_tokens(kv_type) < rows[kv_type]]
        self._flush()
        if not full:
            self._engine.sequences.reset()
            raise EngineBroken("the engine reported a full KV pool, but the pool has free cells")
        if all(self._kv.make_room(rows[kv_type], kv_type) for kv_type in full):
            return
        if self._kv.budget.is_spent:
            return  # the next step continues
        shared = (turn for turn in (*self._restoring, *self._running) if not turn.request.exact)
        holding = [turn for turn in shared if turn.kv_format.kv_type in full]
        if not holding:
            return  # all of them ended in the flush
        self._put_back(self._queues.to_preempt(holding))

    def _restart_all(self, error: EngineBroken) -> None:
        """Start every turn again from its tokens after the engine has lost all sequences. Turns
        that were restarted too often fail."""
        self._kv.lose_everything()
        self._deliver_all()
        for turn in (*self._queues.ended, *self._queues):
            self._kv.release(turn)  # a waiting turn may have been starting
        self._retire_ended()
        lost = self._queues.take_started()
        for turn in lost:
            turn.restarts += 1
            if turn.sampler is not None:  # it may have sampled a token that was lost
                turn.sampler.replay(turn.tokens.part(turn.prompt_tokens))
        for turn in reversed(lost):
            self._queues.wait_first(turn)
        for turn in [turn for turn in lost if turn.restarts > MAX_RESTARTS]:
            self._fail(turn, ServerError(f"the engine failed repeatedly: {error}"))


def _only_decodes(turn: Turn) -> bool:
    """Whether the next steps of a turn depend on nothing but its sampled tokens."""
    return turn.is_decoding and turn.only_decodes and turn.output.ends_by_token


def _rows_by_type(batch: Batch, steps: int = 1) -> RowsByType:
    """Rows that steps compute in each KV pool."""
    rows = RowsByType()
    for turn, work in batch:
        if not turn.request.exact:
            rows[turn.kv_format.kv_type] += steps * len(work.tokens)
    return rows
