"""The stages of one turn, from request to terminal event. The scheduler calls them in this order.

encode    messages to tokens                       on an encoder thread
find      the entry that a name stands for         from here on the engine's thread
plan      the longest prefix to reuse
place     a sequence in the engine, with shared state
restore   stored blocks, within the step budget    lower tiers are read by other threads
report    what was reused, and why not more
run       prefill and decode (Scheduler.step)
finish    remember the conversation under its names
retire    keep the computed state, free the sequence (KvManager.retire)
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
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
    divergence,
    opening_tokens,
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


@dataclass(eq=False)
class Pipeline:
    """The stages of a turn. The scheduler decides when each one runs."""

    engine: Engine
    input_processor: InputProcessor
    sessions: Sessions
    admission: Admission
    kv: KvManager
    #: Number of turns by reuse status, for each namespace and (None) in total.
    statuses: defaultdict[bytes | None, Counter[Status]] = field(
        default_factory=lambda: defaultdict(Counter)
    )

    def encode_choices(self, request: GenerateRequest, stopwatch: Stopwatch) -> list[Turn]:
        """Encode a request once and build a turn for each choice. Callable from any thread. Raises
        ServerError for an invalid request."""
        stopwatch.lap("front")
        choices = self.input_processor.encode(request)
        stopwatch.lap("encode")
        return [self.begin(encoded, stopwatch.copy()) for encoded in choices]

    def begin(self, encoded: EncodedRequest, stopwatch: Stopwatch) -> Turn:
        """Make the turn of an encoded request. Any thread may call it."""
        request, context_tokens = encoded.request, self.engine.capabilities.context_tokens
        room = context_tokens - len(encoded.prompt.tokens)
        max_tokens = room if request.max_tokens is None else min(request.max_tokens, room)
        output = ReplyOutput(
            request, encoded.decoding, self.engine.tokenizer, max_tokens=max_tokens
        )
        return Turn(encoded, output, stopwatch)

    def find(self, turn: Turn) -> None:
        """Look up the entry that a name in the request stands for; raises NoRoomForPins."""
        turn.lookup = self.sessions.find(turn.encoded)

    def start(self, turn: Turn, running: list[Turn], restoring: list[Turn]) -> Start:
        """Plan a turn, make room for it, open its sequence and start restoring."""
        turn.stopwatch.lap("queue")
        planned = self.admission.plan(turn, running)
        plan = self.admission.reserve(turn, planned, [*running, *restoring])
        turn.stopwatch.lap("plan")
        if plan is None:
            return Start.NO_ROOM
        self.admission.place(turn, plan)
        return self.restore(turn)

    def restore(self, turn: Turn) -> Start:
        """Restore within the step budget. Report what was reused when that is done."""
        assert turn.restoration is not None
        assert turn.sequence is not None
        is_over = self.kv.restorer.advance(turn.restoration, turn.sequence)
        turn.stopwatch.lap("restore")
        if not is_over:
            return Start.RESTORING
        placed = self.admission.placed(turn)
        if placed is None:
            return Start.GONE
        if turn.report is None:  # a turn that starts again has reported
            turn.report = self._report(turn, placed)
            self.kv.counts.reused_tokens += placed.reused_tokens
        return Start.STARTED

    def requantise(self, turn: Turn, others: list[Turn]) -> Start:
        """Convert the state of a turn to its target KV type, within the step budget."""
        return Start.STARTED if self.admission.requantise(turn, others) else Start.RESTORING

    def finish(self, turn: Turn) -> Finished | Failed:
        """Remember a turn that has ended. Returns its terminal event."""
        end = end_of(turn, self.engine.capabilities.kv[turn.kv_format.kv_type])
        if isinstance(end, Finished):
            self.sessions.remember(turn, end)
        else:
            self.abandon(turn)
        return end

    def abandon(self, turn: Turn) -> None:
        """Remember what a cancelled or failed turn has computed."""
        self.sessions.remember_unfinished(turn)

    def _report(self, turn: Turn, placed: Placed) -> CacheReport:
        plan, prompt, hashes = placed.plan, turn.encoded.prompt, turn.encoded.hashes
        entry = None if turn.lookup.problem else turn.lookup.entry  # a wrong key is the answer
        nearest = self.sessions.nearest(turn) if entry is None else None
        named = compare(entry, prompt, hashes) if entry else None
        status, reason = classify(
            ReuseInputs(
                prompt_tokens=turn.prompt_tokens,
                opening_tokens=opening_tokens(prompt, turn.request.tools, self.engine.tokenizer),
                reused_tokens=placed.reused_tokens,
                matched_tokens=plan.matched_tokens,
                diverged=plan.diverged,
                changed=changed_at(prompt, plan.matched_tokens),
                reuse=turn.request.reuse,
                exact=turn.request.exact,
                can_truncate=self.engine.capabilities.can_truncate,
                problem=_problem(turn, plan, entry),
                named=named,
                nearest=compare(nearest, prompt, hashes) if nearest and hashes else None,
            )
        )
        if turn.request.prepare is None:
            for view in (turn.namespace, None):
                self.statuses[view][status] += 1
            if status != "miss" and (hit := entry or nearest):
                self.sessions.count_hit(hit)
        return CacheReport(
            status,
            reason,
            placed.reused_tokens,
            cached_tokens=0,
            tier=placed.tier,
            cache_key=_sent_key(turn) or (entry.key if entry else None),
            diverged_at=divergence(entry, prompt, named) if entry and named else None,
            normalised=list(turn.encoded.normalised),
        )


def _sent_key(turn: Turn) -> str | None:
    return turn.request.names.cache_key if turn.request.names else None


def _problem(turn: Turn, plan: Plan[Sequence], entry: Entry | None) -> Reason | None:
    if problem := turn.lookup.problem or turn.problem:
        return problem
    if plan.is_cut:
        return Reason.COMPUTED_CHEAPER
    formats = (turn.precision.default, turn.precision.target)
    of_use = {each.namespace for each in formats if each is not None}
    if entry is None or entry.namespace == entry.tenant:  # default KV type: always usable
        return None
    return None if entry.namespace in of_use else Reason.KV_BITS_CHANGED
