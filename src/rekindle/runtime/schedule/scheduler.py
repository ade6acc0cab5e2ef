"""Who goes next: turns are admitted fairly, batched continuously, and each ends exactly once."""

from __future__ import annotations

from rekindle.engine.base import Engine, Sampled, run_step
from rekindle.errors import EngineBroken, PoolFull, ServerError
from rekindle.protocol.events import Cancelled, Failed, Started
from rekindle.runtime.device.idle_pool import RowsByType
from rekindle.runtime.device.images import PictureEncoder
from rekindle.runtime.device.kv_manager import KvManager
from rekindle.runtime.schedule.batch import Batch, Batcher
from rekindle.runtime.schedule.delivery import Delivery, Emit, ReplyRun
from rekindle.runtime.schedule.pipeline import Pipeline, Start
from rekindle.runtime.schedule.queues import TurnQueues, insert
from rekindle.runtime.schedule.turn import Turn

MOST_RESTARTS = 3


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
        self._queues = TurnQueues()
        self._waiting = self._queues.waiting
        self._restoring, self._running = self._queues.restoring, self._queues.running
        beside = engine.capabilities.async_launch
        self._delivery = Delivery(pipeline, emit, self._queues.end, beside=beside)
        self.reply_run = ReplyRun(self._delivery)
        if beside:
            engine.meanwhile = self._delivery.deliver_due

    @property
    def turns(self) -> int:
        return len(self._queues)

    @property
    def wait_s(self) -> float | None:
        """How long there is nothing to do unless something is reported; None: for ever."""
        waits = [self._pipeline.wait_s(turn) for turn in self._restoring]
        waits += [self._pictures.wait_s(turn) for turn in self._running if turn.waits_for_vectors]
        return min((wait_s for wait_s in waits if wait_s is not None), default=None)

    def submit(self, turn: Turn) -> None:
        self._queues.submit(turn)

    def cancel(self, turn_id: int) -> bool:
        """End a turn now, keeping what it computed; False when it is not here."""
        if self._kv.broken is not None:  # since the last step
            self._restart_all(self._kv.broken)
        try:
            self._settle()
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
        """End every turn, keeping what it computed."""
        for turn in [*self._running, *self._restoring, *self._waiting]:
            self.cancel(turn.id)

    def step(self) -> bool:
        """One native call's worth of work; False when there is nothing to do but wait."""
        if self._kv.broken is not None:  # since the last step
            self._restart_all(self._kv.broken)
        allowance = self._kv.allowance
        allowance.renew(is_shared=any(turn.pending_tokens == 1 for turn in self._running))
        try:
            self._restore()
            self._admit()
            self._cross()
            is_at_rest = self._kv.export_some(self._running)
            has_encoded = self._encode_picture()
            batch = self._batcher.compose(self._running, len(self._waiting))
            if batch:
                may_run_on = is_at_rest and self._queues.are_all(len(batch), self._parallel)
                return self._compute(batch, may_run_on=may_run_on)
            if self._delivery.brought:
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
            self._settle()
            try:
                if self._pictures.supply(turn):
                    return True
            except ServerError as error:
                self._end(turn)
                self._emit([Failed(turn.id, error.info)])
        return False

    def _compute(self, batch: Batch, *, may_run_on: bool) -> bool:
        if any(len(work.tokens) > 1 for _, work in batch):
            self._delivery.hurry()
        go_on = self.reply_run.begin(batch, may_run_on=may_run_on)
        self._kv.is_computing = True
        try:
            results = run_step(self._engine, [work for _, work in batch], go_on)
        except PoolFull:
            self._kv.is_computing = False
            self._preempt(batch)
            return True
        finally:
            self._kv.is_computing = False
            self._kv.counts.computed_tokens += len(batch) * (self.reply_run.steps - 1)
        took_s = self.reply_run.end()
        self._delivery.deliver_due()
        self._retire_ended()
        self._take_in(batch, results, took_s)
        return True

    # -- admitting -----------------------------------------------------------------------------

    def _restore(self) -> None:
        """Go on with turns whose state is being restored, those that came first first."""
        for turn in list(self._restoring):
            if turn.requantisation:
                continue
            outcome = self._pipeline.restore(turn)
            if outcome is not Start.RESTORING:
                self._restoring.remove(turn)
                self._take(turn, outcome)

    def _cross(self) -> None:
        """Bring over turns that go on in cells of another type, those that came first first; while
        they are on their way they do not run."""
        ready = [
            turn
            for turn in self._running
            if turn.requantise_at is not None and turn.must_requantise
        ]
        for turn in [*(turn for turn in self._restoring if turn.requantisation), *ready]:
            others = [other for other in (*self._running, *self._restoring) if other is not turn]
            try:
                outcome = self._pipeline.requantise(turn, others)
            except ServerError as error:  # what only this turn needs is not to be had
                self._end(turn)
                self._emit([Failed(turn.id, error.info)])
            else:
                self._queues.remove(turn)
                self._take(turn, outcome)

    def _admit(self) -> None:
        """Start waiting turns in their order, while they can be fed; plans are made late, so that
        a turn sees everything computed before its own prefill begins."""
        while (
            self._waiting
            and self._queues.started < self._parallel
            and self._batcher.has_room(self._running)  # rows for another prompt
        ):
            turn = self._queues.next_to_start(self._engine.capabilities.exact_sequences)
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
            insert(self._restoring if outcome is Start.RESTORING else self._waiting, turn)

    def _begin(self, turn: Turn) -> None:
        insert(self._running, turn)
        if not turn.is_started:
            turn.is_started = True
            self._emit([Started(turn.id, turn.prompt_tokens, turn.held_tokens, turn.report)])
            if turn.request.prepare is None:
                turn.sampler = self._engine.sampler(
                    turn.request.sampling,
                    turn.tokens.text_ids,  # nothing is sampled yet
                    turn.encoded.decoding.token_mask,
                )

    # -- computing -----------------------------------------------------------------------------

    def _take_in(self, batch: Batch, results: list[Sampled | None], took_s: float) -> None:
        """What a step brought. Replies that only go on are delivered a few steps together where
        steps are short, and while the next one is computed, where it is computed beside."""
        rows = self._batcher.learn(batch, took_s, self.reply_run.steps)
        self._kv.counts.computed_tokens += rows
        if len(batch) == 1:
            self._kv.cost_gate.learn_computing(batch[0][0].held_tokens, rows, took_s)
        if self._kv.idle:
            self._kv.idle.count_rows(_shared_rows(batch, self.reply_run.steps))
        if self._delivery.take_in(batch, results, took_s):
            self._settle()
            self._kv.keep_prompts(turn for turn, _ in batch)
        if rows > len(batch):
            self._batcher.rotate(self._running)

    def _settle(self) -> None:
        """Deliver, and keep what ended turns have computed, no step being under way."""
        if self._delivery.brought:
            self._delivery.deliver()
        self._retire_ended()

    # -- ending --------------------------------------------------------------------------------

    def _end(self, turn: Turn) -> None:
        """Give back everything a turn holds; what it computed is kept."""
        self._queues.end(turn)
        self._retire_ended()

    def _retire_ended(self) -> None:
        self._kv.forget_rest()
        ended = self._queues.ended
        while ended:  # all have left, before keeping the first can break the engine
            self._pipeline.retire(ended.pop(0))

    def _preempt(self, batch: Batch) -> None:
        """The pool is full in mid-reply: the last turn waits until there is room again."""
        rows = _shared_rows(batch)
        full = [name for name in rows if self._engine.sequences.free_tokens(name) < rows[name]]
        self._settle()
        if not full:
            self._engine.sequences.reset()
            raise EngineBroken("the engine found no room where there must be some")
        if all(self._kv.make_room(rows[name], name) for name in full):
            return
        if self._kv.allowance.is_spent:
            return  # the next step goes on
        shared = (turn for turn in (*self._restoring, *self._running) if not turn.request.exact)
        holding = [turn for turn in shared if turn.kv_format.kv_type in full]
        if not holding:
            return  # all have ended meanwhile
        last = max(holding, key=lambda turn: turn.place)
        self._kv.counts.preemptions += 1
        self._queues.remove(last)
        self._waiting.insert(0, last)
        self._pipeline.retire(last)

    def _restart_all(self, error: EngineBroken) -> None:
        """The engine lost every sequence: all turns go on from their tokens, or end in an error
        when they have been here too often."""
        self._kv.lose_everything()
        self._delivery.deliver()
        for turn in (*self._queues.ended, *self._queues):
            self._kv.release(turn)  # of those that wait, one may have been starting
        self._queues.ended.clear()
        lost = self._queues.take_started()
        for turn in lost:
            turn.restarts += 1
            if turn.sampler is not None:  # it may have chosen a token that was lost
                turn.sampler.replay(turn.tokens.part(turn.prompt_tokens))
        self._waiting[:0] = lost
        for turn in [turn for turn in lost if turn.restarts > MOST_RESTARTS]:
            self._end(turn)
            failure = ServerError(f"the engine failed repeatedly: {error}")
            self._emit([Failed(turn.id, failure.info)])


def _shared_rows(batch: Batch, steps: int = 1) -> RowsByType:
    """Rows that are computed in pools, by the KV type of each."""
    rows = RowsByType()
    for turn, work in batch:
        if not turn.request.exact:
            rows[turn.kv_format.kv_type] += steps * len(work.tokens)
    return rows
