"""The stages of one turn, from request to terminal event. The scheduler calls them in this order.

encode    messages to tokens                       on an encoder thread
find      the entry that a name stands for         from here on the engine's thread
plan      the longest prefix to reuse
place     a sequence in the engine, with shared state
restore   stored blocks, within the step budget    lower tiers are read by other threads
report    what was reused, and why not more
run       prefill and decode (Scheduler.step)
finish    remember the conversation under its names
retire    keep the computed state, free the sequence
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from enum import Enum

from rekindle.engine.base import Engine, KvLayout, Sequence
from rekindle.errors import BadRequest
from rekindle.kvcache.entries.entries import Entry
from rekindle.kvcache.plan import Plan
from rekindle.protocol.events import CacheReport, Failed, Finished, Reason, Status
from rekindle.protocol.requests import GenerateRequest
from rekindle.runtime.device.kv_manager import KvManager
from rekindle.runtime.encode.input_processor import InputProcessor
from rekindle.runtime.encode.request import EncodedRequest, Stopwatch
from rekindle.runtime.reuse.admission import Admission, Placed
from rekindle.runtime.reuse.report import (
    ReuseInputs,
    changed_at,
    classify,
    compare,
    first_message_tokens,
)
from rekindle.runtime.reuse.sessions import Sessions
from rekindle.runtime.schedule.output import ReplyOutput
from rekindle.runtime.schedule.turn import Turn


def end_of(turn: Turn, layout: KvLayout) -> Finished | Failed:
    """Build the terminal event of a turn. `layout` is the KV layout that it ended with."""
    token_mask = turn.encoded.decoding.token_mask
    if token_mask is not None and token_mask.trouble:
        return Failed(turn.id, _too_costly(turn, token_mask.trouble).info)
    report, output = turn.report, turn.output
    assert report is not None, "a turn that ends has started"
    assert output.finish_reason is not None
    report.cached_tokens = turn.held_tokens if turn.request.reuse else 0
    report.kv_bits, report.kv_group_size = layout.bits, layout.group_size
    now_s = time.monotonic()
    return Finished(
        turn.id,
        output.finish_reason,
        turn.prompt_tokens,
        turn.generated_tokens,
        turn.prompt_eval_s,
        report,
        stages=turn.stopwatch.stages,
        first_token_at_s=turn.first_token_at_s,
        reasoning_tokens=output.reasoning_tokens,
        completion_s=now_s - (turn.first_token_at_s or now_s),
        stop_string=output.stop_string,
    )


def _too_costly(turn: Turn, trouble: str) -> BadRequest:
    """Some grammars turn out to be too expensive only while a reply follows them."""
    output = turn.request.structured_output
    return BadRequest(
        f"Holding the reply to what was asked for costs too much: {trouble}. Make it simpler.",
        param=output.param if output else "tools",
    )


class Start(Enum):
    STARTED = "started"
    NO_ROOM = "no room"
    RESTORING = "restoring"
    GONE = "gone"  # the planned state has left the store, so the turn plans again


class Pipeline:
    """The stages of a turn. The scheduler decides when each one runs."""

    def __init__(
        self,
        engine: Engine,
        input_processor: InputProcessor,
        sessions: Sessions,
        admission: Admission,
        kv: KvManager,
    ) -> None:
        self._engine = engine
        self._input_processor = input_processor
        self._sessions = sessions
        self._admission = admission
        self._kv = kv
        #: Number of turns by reuse status, for each namespace and (None) in total.
        self.statuses: defaultdict[bytes | None, Counter[Status]] = defaultdict(Counter)

    def encode(self, request: GenerateRequest, stopwatch: Stopwatch | None = None) -> Turn:
        """Encode a request for a single choice."""
        [turn] = self.encode_choices(request, stopwatch or Stopwatch())
        return turn

    def encode_choices(self, request: GenerateRequest, stopwatch: Stopwatch) -> list[Turn]:
        """Encode a request once and build a turn for each choice. Callable from any thread. Raises
        ServerError for an invalid request."""
        stopwatch.lap("front")
        choices = self._input_processor.encode(request)
        stopwatch.lap("encode")
        return [self.begin(encoded, stopwatch.copy()) for encoded in choices]

    def begin(self, encoded: EncodedRequest, stopwatch: Stopwatch) -> Turn:
        """Make the turn of an encoded request. Any thread may call it."""
        request, context_tokens = encoded.request, self._engine.capabilities.context_tokens
        room = context_tokens - len(encoded.prompt.tokens)
        max_tokens = room if request.max_tokens is None else min(request.max_tokens, room)
        output = ReplyOutput(
            request, encoded.decoding, self._engine.tokenizer, max_tokens=max_tokens
        )
        return Turn(encoded, output, stopwatch)

    def find(self, turn: Turn) -> None:
        """Look up the entry that a name in the request stands for; raises NoRoomForPins."""
        turn.lookup = self._sessions.find(turn.encoded)

    def start(self, turn: Turn, running: list[Turn], restoring: list[Turn]) -> Start:
        """Plan a turn, make room for it, open its sequence and start restoring."""
        turn.stopwatch.lap("queue")
        planned = self._admission.plan(turn, running)
        plan = self._admission.reserve(turn, planned, [*running, *restoring])
        turn.stopwatch.lap("plan")
        if plan is None:
            return Start.NO_ROOM
        self._admission.place(turn, plan)
        return self.restore(turn)

    def restore(self, turn: Turn) -> Start:
        """Restore within the step budget. Report what was reused when that is done."""
        is_over = self._admission.restore(turn)
        turn.stopwatch.lap("restore")
        if not is_over:
            return Start.RESTORING
        placed = self._admission.placed(turn)
        if placed is None:
            return Start.GONE
        if turn.report is None:  # a turn that starts again has reported
            turn.report = self._report(turn, placed)
            self._kv.counts.reused_tokens += placed.reused_tokens
        return Start.STARTED

    def wait_s(self, turn: Turn) -> float | None:
        """Time left for a tier to answer. None if the turn waits for no tier."""
        return self._admission.wait_s(turn)

    def requantise(self, turn: Turn, others: list[Turn]) -> Start:
        """Convert the state of a turn to its target KV type, within the step budget."""
        return Start.STARTED if self._admission.requantise(turn, others) else Start.RESTORING

    def finish(self, turn: Turn) -> Finished | Failed:
        """Remember a turn that has ended. Returns its terminal event."""
        end = end_of(turn, self._engine.capabilities.kv[turn.kv_format.kv_type])
        if isinstance(end, Finished):
            self._sessions.remember(turn, end)
        return end

    def retire(self, turn: Turn) -> None:
        """Keep the state that a turn computed, and free what it holds."""
        self._kv.retire(turn)

    def _report(self, turn: Turn, placed: Placed) -> CacheReport:
        """Report what was reused, and why not more."""
        plan = placed.plan
        entry = None if turn.lookup.problem else turn.lookup.entry  # a wrong key is the answer
        prompt = turn.encoded.prompt
        named = compare(entry, prompt, turn.encoded.hashes) if entry else None
        status, reason = classify(
            ReuseInputs(
                prompt_tokens=turn.prompt_tokens,
                first_message_tokens=first_message_tokens(prompt, turn.request.tools),
                reused_tokens=placed.reused_tokens,
                matched_tokens=plan.matched_tokens,
                diverged=plan.diverged,
                changed=changed_at(prompt, plan.matched_tokens),
                reuse=turn.request.reuse,
                exact=turn.request.exact,
                can_truncate=self._engine.capabilities.can_truncate,
                problem=_problem(turn, plan, entry),
                named=named,
            )
        )
        if turn.request.prepare is None:
            for view in (turn.namespace, None):
                self.statuses[view][status] += 1
            if status != "miss":
                self._sessions.count_hit(turn)
        return CacheReport(
            status,
            reason,
            placed.reused_tokens,
            cached_tokens=0,
            tier=placed.tier,
            cache_key=entry.key if entry else None,
            diverged_at=named.diverged_at if named and status != "hit" else None,
            normalised=list(turn.encoded.normalised),
        )


def _problem(turn: Turn, plan: Plan[Sequence], entry: Entry | None) -> Reason | None:
    cut = Reason.COMPUTED_CHEAPER if plan.is_cut else None
    return turn.lookup.problem or turn.problem or cut or _precision_problem(turn, entry)


def _precision_problem(turn: Turn, entry: Entry | None) -> Reason | None:
    """Whether the entry's state is of a precision that this turn cannot start from."""
    precision = turn.precision
    formats = (precision.default, precision.target)
    of_use = {each.namespace for each in formats if each is not None}
    is_strange = entry is not None and entry.namespace not in of_use
    return Reason.KV_BITS_CHANGED if is_strange else None
