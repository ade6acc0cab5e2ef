"""Composes the work of one engine step: the next token of every reply, and chunks of prompts.

The size of a prefill chunk follows from measured step times.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

from rekindle.engine.base import Capabilities, Work
from rekindle.fair_queue import EngineShare, interleaved
from rekindle.runtime.schedule.turn import Turn

# Longest time that a prefill chunk may delay a cancellation, and the tokens of other replies.
ALONE_S, SHARED_S = 0.9, 0.25
# Smallest chunk, for the slowest machines.
MIN_CHUNK_TOKENS = 4
# From this size on, a token costs about the same in a chunk of any size. Below it, the attention of
# llama.cpp's CPU kernels works row by row, which is up to 30 times slower after a long context.
EFFICIENT_CHUNK_TOKENS = 64
# The first chunk, before the speed of the machine is known.
FIRST_CHUNK_TOKENS = 16
# After this many smaller chunks, a chunk of the efficient size is tried again.
RETRY_STEPS = 8
# After this many chunks, a long prompt lets the next prompt run.
QUANTUM_CHUNKS = 4
# A tenant's prompts wait while it is this much engine time ahead of another one that is running.
MAX_LEAD_S = 1.0


class Batch:
    """The work of one step, with the turn that each item belongs to."""

    __slots__ = ("decoding", "items", "prefilling", "rows")

    def __init__(self, decoding: list[tuple[Turn, Work]]) -> None:
        self.items = decoding
        self.decoding = len(decoding)
        self.prefilling = 0  # prompts that are being computed or wait for it
        self.rows = len(decoding)

    def add_chunk(self, turn: Turn, work: Work) -> None:
        self.items.append((turn, work))
        self.rows += len(work.tokens)

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[tuple[Turn, Work]]:
        return iter(self.items)

    @property
    def work(self) -> list[Work]:
        return [work for _, work in self.items]

    @property
    def turns(self) -> list[Turn]:
        return [turn for turn, _ in self.items]

    @property
    def has_prefill(self) -> bool:
        return self.rows > len(self.items)


class StepTiming:
    """Duration of one step, or the average of the equal steps of a multi-step decode."""

    __slots__ = ("_clock", "_last_s", "_start_s", "batch", "step_s", "steps")

    def __init__(self, batch: Batch, clock: Callable[[], float] = time.perf_counter) -> None:
        self.batch = batch
        self.steps = 1
        self.step_s = 0.0
        self._clock = clock
        self._start_s = self._last_s = clock()

    def would_exceed(self, limit_s: float) -> bool:
        """Whether another step like the last one would end after the limit."""
        now_s = self._clock()
        return 2 * now_s - self._last_s > self._start_s + limit_s

    def next_step(self) -> float:
        """Begin another step. Returns the duration of the last one."""
        now_s = self._clock()
        last_s, self._last_s = now_s - self._last_s, now_s
        self.steps += 1
        return last_s

    def stop(self) -> None:
        self.step_s = (self._clock() - self._start_s) / self.steps

    def used_s(self) -> dict[bytes, float]:
        """The time of the steps by tenant, in proportion to the tokens that were computed."""
        used_s: dict[bytes, float] = {}
        row_s = self.step_s * self.steps / max(self.batch.rows, 1)
        for turn, work in self.batch:
            used_s[turn.tenant] = used_s.get(turn.tenant, 0.0) + len(work.tokens) * row_s
        return used_s

    def drop_last_step(self) -> None:
        """Leave out the last step, because it was not computed."""
        self.steps -= 1
        if self.steps:
            self.step_s = (self._last_s - self._start_s) / self.steps


class Batcher:
    """Composes batches of running turns.

    The tenant that has received the least engine time comes first. The prompts of one tenant take
    turns after a quantum of a few chunks.
    """

    # Prompts with at most this much left do not wait for the long ones of other tenants, nor, on a
    # GPU, for their budget.
    SHORT_TOKENS = 64

    def __init__(self, capabilities: Capabilities, parallel: int, share: EngineShare) -> None:
        self._share = share
        self._step_tokens = capabilities.step_tokens
        self._whole_pictures = capabilities.whole_pictures
        self._chunk_size = ChunkSize(capabilities.batch_tokens - parallel)
        self._budget = PrefillBudget() if capabilities.device == "gpu" else None

    def learn(self, timing: StepTiming) -> None:
        batch = timing.batch
        self._chunk_size.learn(batch.rows, timing.step_s)
        if self._budget:
            chunk_tokens = batch.rows - batch.decoding
            for _ in range(timing.steps):
                self._budget.learn(batch.decoding, chunk_tokens, batch.prefilling, timing.step_s)

    def tenants_with_room(self, running: list[Turn]) -> Callable[[bytes], bool]:
        """Return a test of whether the next batch has rows for another prompt of a tenant. A tenant
        without a prompt always has room, because the others share the rows with it."""
        first: dict[bytes, Turn] = {}
        pending = 0
        for turn in _prefilling(running):
            first.setdefault(turn.tenant, turn)
            pending += turn.pending_tokens
        has_rows = pending < self._max_chunk_tokens(running)

        def has_room(tenant: bytes) -> bool:
            turn = first.get(tenant)
            return has_rows or turn is None or self._has_used_quantum(turn, running)

        return has_room

    def in_prefill_order(self, turns: list[Turn]) -> list[Turn]:
        """Order running turns by whose prompt is computed first: turns that outrank the others,
        then the first turn of each tenant, then the second of each, and so on."""
        by_tenant: dict[bytes, list[Turn]] = {}
        for turn in turns:
            by_tenant.setdefault(turn.tenant, []).append(turn)

        def order(tenant: bytes) -> tuple[float, int]:
            """Among equal tenants, such as one that has just come, the shortest prompt is first."""
            pending = min(turn.pending_tokens for turn in by_tenant[tenant])
            return self._share.received_s(tenant), pending

        fair = interleaved(by_tenant[tenant] for tenant in sorted(by_tenant, key=order))
        return sorted(fair, key=lambda turn: -turn.rank)  # stable

    def compose(self, running: list[Turn], waiting: int = 0) -> Batch:
        """Compose the next step. `waiting` is the number of turns that have not started yet."""
        batch = Batch([(turn, turn.last_work()) for turn in running if turn.is_decoding])
        if len(batch) < len(running):
            self._add_prefill(batch, running, waiting)
        return batch

    def _add_prefill(self, batch: Batch, running: list[Turn], waiting: int) -> None:
        prefilling = [turn for turn in _prefilling(running) if not turn.wants_vectors]
        if not prefilling:
            return
        batch.prefilling = len(prefilling) + waiting
        if batch.decoding:
            prefilling = self._within_lead(prefilling, running)
        prefilling = self.in_prefill_order(prefilling)
        limit, budget = self._max_chunk_tokens(running), self._budget if batch.decoding else None
        if budget or len({turn.tenant for turn in prefilling}) > 1:
            prefilling = self._short_first(prefilling)
        pending = sum(turn.pending_tokens for turn in prefilling)
        if budget:
            room = budget.next_chunk(batch.decoding, batch.prefilling, pending, limit)
        else:
            room = _even_chunk(pending, limit)
        for turn in prefilling:
            if room <= 0:
                break
            work = turn.next_work(room, self._step_tokens, whole_pictures=self._whole_pictures)
            if len(work.tokens) > room and len(batch) > batch.decoding and not turn.request.exact:
                continue  # an image that has to be computed whole gets a step of its own
            batch.add_chunk(turn, work)
            room -= len(work.tokens)

    def _within_lead(self, prefilling: list[Turn], running: list[Turn]) -> list[Turn]:
        """Leave out the prompts of tenants that are too far ahead of another running tenant, so
        that a tenant that only decodes gets its share of the engine's time.

        Responses are not held back: in a batch, one more row costs the others little.
        """
        received_s = self._share.received_s
        limit_s = min(received_s(turn.tenant) for turn in running) + MAX_LEAD_S
        return [turn for turn in prefilling if turn.rank or received_s(turn.tenant) <= limit_s]

    def _short_first(self, prefilling: list[Turn]) -> list[Turn]:
        """Leave only short prompts, if the tenant that comes first has one. Otherwise its long
        prompt would wait for the short ones of other tenants."""
        short = [turn for turn in prefilling if turn.pending_tokens <= self.SHORT_TOKENS]
        is_next = any(turn.tenant == prefilling[0].tenant for turn in short)
        return short if is_next else prefilling

    def rotate(self, running: list[Turn]) -> None:
        """Move a prompt that has used its quantum behind the other prompts of its tenant."""
        by_tenant: dict[bytes, list[Turn]] = {}
        for turn in _prefilling(running) if len(running) > 1 else []:
            by_tenant.setdefault(turn.tenant, []).append(turn)
        for first, *others in by_tenant.values():
            if others and self._has_used_quantum(first, running):
                first.chunk_tokens = 0
                running.remove(first)
                running.append(first)

    def _has_used_quantum(self, turn: Turn, running: list[Turn]) -> bool:
        chunks = 1 if self._budget and _has_replies(running) else QUANTUM_CHUNKS
        return turn.chunk_tokens >= chunks * self._max_chunk_tokens(running)

    def _max_chunk_tokens(self, running: list[Turn]) -> int:
        if not _has_replies(running):
            return self._chunk_size.tokens(ALONE_S)
        if self._budget:
            max_s, max_tokens = PrefillBudget.MAX_CHUNK_S, PrefillBudget.MAX_CHUNK_TOKENS
            return min(self._chunk_size.tokens(max_s), max_tokens)
        return self._chunk_size.tokens(SHARED_S)


def _has_replies(running: list[Turn]) -> bool:
    return any(turn.is_decoding for turn in running)


def _prefilling(running: list[Turn]) -> list[Turn]:
    return [turn for turn in running if turn.pending_tokens > 1 or turn.next_picture]


def _even_chunk(pending: int, max_tokens: int) -> int:
    """Divide a prompt into chunks of equal size. A short last chunk would be a slow one."""
    chunks = max(1, math.ceil(pending / max_tokens))
    even = math.ceil(pending / chunks)
    return max(even, EFFICIENT_CHUNK_TOKENS) if max_tokens >= EFFICIENT_CHUNK_TOKENS else even


class ChunkSize:
    """Learns how many prompt tokens fit into a given time.

    A step takes a fixed time plus a time for each row. A large model reads all of its weights in
    every step. If that time were attributed to the rows, chunks would shrink until they are nothing
    but overhead.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._step_s = self._row_s = 0.0
        self._has_seen_two_sizes = False
        self._last_rows, self._last_s = 0, 0.0
        self._retry_steps: float = math.inf  # until an efficient chunk is tried again
        self._patience_steps = RETRY_STEPS

    def learn(self, rows: int, step_s: float) -> None:
        """Learn from a step. A slower speed is adopted immediately, a faster one gradually.

        Where efficient chunks fit, smaller steps are ignored: other kernels compute them, and
        chunks that shrink to their size would stay slow.
        """
        if rows < MIN_CHUNK_TOKENS / 2:
            return
        shared = self.tokens(SHARED_S)
        min_rows = EFFICIENT_CHUNK_TOKENS if shared >= EFFICIENT_CHUNK_TOKENS else shared / 2
        if rows < min_rows or step_s <= 0:
            return
        self._count_small(rows, step_s)
        more_rows, more_s = rows - self._last_rows, step_s - self._last_s
        expected_s = self._step_s + rows * self._row_s
        if self._last_rows < EFFICIENT_CHUNK_TOKENS <= rows and 2 * step_s < expected_s:
            # Another kernel computes this size, so what was known does not apply to it.
            self._step_s, self._row_s = 0.0, step_s / rows
            self._has_seen_two_sizes = False
        elif self._is_other_size(rows) and more_rows * more_s > 0:
            # Two sizes show what a row costs. The remaining time belongs to the step itself.
            self._has_seen_two_sizes = self._last_rows > 0
            self._row_s = min(more_s / more_rows, step_s / rows)
            self._step_s = step_s - rows * self._row_s
        else:
            slower = step_s / expected_s
            factor = slower if slower > 1 else 0.7 + 0.3 * slower
            self._step_s, self._row_s = self._step_s * factor, self._row_s * factor
        self._last_rows, self._last_s = rows, step_s

    def _count_small(self, rows: int, step_s: float) -> None:
        """Schedule a retry of efficient chunks. A busy moment can make chunks too small, and they
        would stay slow. Each failed retry doubles the time to the next one."""
        if rows < EFFICIENT_CHUNK_TOKENS:
            self._retry_steps -= 1
            return
        has_failed = self._retry_steps <= 0 and step_s * EFFICIENT_CHUNK_TOKENS / rows > ALONE_S
        self._patience_steps = 2 * self._patience_steps if has_failed else RETRY_STEPS
        self._retry_steps = self._patience_steps

    def _is_other_size(self, rows: int) -> bool:
        return 3 * abs(rows - self._last_rows) > max(rows, self._last_rows)

    def tokens(self, allowed_s: float) -> int:
        """Largest chunk that takes at most `allowed_s`. An efficient size is used even next to
        replies, if it fits into the time that a lone prompt may take."""
        wanted = self._fitting(allowed_s)
        if allowed_s < ALONE_S:
            wanted = max(wanted, min(self._fitting(ALONE_S), EFFICIENT_CHUNK_TOKENS))
        if self._retry_steps <= 0 and EFFICIENT_CHUNK_TOKENS * self._row_s <= 2 * ALONE_S:
            wanted = max(wanted, EFFICIENT_CHUNK_TOKENS)
        return min(wanted, self._max_tokens)

    def _fitting(self, allowed_s: float) -> int:
        """At least half of a step is spent on rows, even if it then takes longer than allowed."""
        if not self._row_s:
            return FIRST_CHUNK_TOKENS
        wanted = int(max(allowed_s - self._step_s, self._step_s) / self._row_s)
        if not (self._has_seen_two_sizes or self._is_other_size(wanted)):
            wanted = self._last_rows // 2
        # Times vary, so a chunk at most doubles, or uses half of the time by the average speed.
        safe = max(2 * self._last_rows, int(self._last_rows * allowed_s / 2 / self._last_s))
        wanted = max(min(wanted, safe), MIN_CHUNK_TOKENS)
        return wanted - wanted % 16 if wanted > EFFICIENT_CHUNK_TOKENS else wanted


class PrefillBudget:
    """Decides when a GPU step with replies also gets a prefill chunk.

    Prefill runs in a few large chunks with pure decode steps in between, instead of a little in
    every step. Changing the shape of a step invalidates its CUDA graph and costs several
    milliseconds, so small chunks in every step are slower for everybody.

    Replies may be slower than alone by a factor on average. If more prompts wait than replies run,
    the factor grows. Time that replies did not use is saved for the next chunk.
    """

    # Decoding may slow down by this factor while a prompt is prefilled (the target is 1.5).
    MAX_SLOWDOWN = 1.45
    # The KV cells of a prompt slow decoding down as well. Always allow this much on top of that.
    MIN_SLOWDOWN = 1.1
    MAX_CHUNK_TOKENS = 512
    # The first chunk, before the cost of a token is known.
    FIRST_TOKENS = 256
    # Longest time that one chunk should delay the next token of a reply.
    MAX_CHUNK_S = 0.1
    # Longest time that prompts may take in one go after a time without prefill.
    BURST_S = 0.15
    # Schedule a chunk after this many steps even if the budget does not cover it.
    MAX_STEPS_BETWEEN_CHUNKS = 64
    # The first steps of a new shape are slow and are not learnt from.
    UNSETTLED_STEPS = 2
    # Smaller chunks say nothing about the cost of a token.
    MIN_LEARNT_TOKENS = 64
    # Weight of a new measurement.
    SLOW, QUICK = 0.05, 0.3

    def __init__(self) -> None:
        # Duration of decode steps, by the bit length of the number of replies.
        self._alone_s: dict[int, float] = {}  # without any prompt, if that was ever seen
        self._between_s: dict[int, float] = {}  # between the chunks of current prompts
        self._row_s: float | None = None  # what each token of a chunk adds
        self._saved_s = self.BURST_S
        self._wanted_s = self.BURST_S  # duration of the next chunk
        self._steps_since_chunk = 0
        self._kind, self._equal_steps = 0, 0  # of the last step, and how many before it were equal

    def next_chunk(self, decoding: int, prefilling: int, pending_tokens: int, limit: int) -> int:
        """Size of the next prefill chunk in tokens, or 0 to skip prefill in this step."""
        kind = decoding.bit_length()
        if kind not in self._alone_s:
            return 0  # measure a step without a chunk first
        size = min(pending_tokens, limit)
        if self._row_s is None:
            return min(size, self.FIRST_TOKENS)
        self._wanted_s = size * self._row_s
        left_s = self._saved_s + self._allowed_s(decoding, prefilling) - self._base_s(kind)
        is_overdue = self._steps_since_chunk >= self.MAX_STEPS_BETWEEN_CHUNKS
        return size if self._wanted_s <= left_s or is_overdue else 0

    def learn(self, decoding: int, chunk_tokens: int, prefilling: int, step_s: float) -> None:
        """Learn from a step. `chunk_tokens` is 0 for a pure decode step."""
        if not decoding:
            self._saved_s = self.BURST_S  # no reply was slowed down
            return
        kind = decoding.bit_length()
        self._steps_since_chunk = 0 if chunk_tokens else self._steps_since_chunk + 1
        is_new = chunk_tokens or kind != self._kind
        self._equal_steps = 0 if is_new else self._equal_steps + 1
        self._kind = kind
        if chunk_tokens >= self.MIN_LEARNT_TOKENS:
            row_s = max(step_s - self._base_s(kind), 0.0) / chunk_tokens
            self._row_s = _blend(self._row_s, row_s, self.QUICK)
        elif self._equal_steps > self.UNSETTLED_STEPS:
            self._learn_base(kind, step_s, is_alone=not prefilling)
        if kind not in self._alone_s:
            return
        saved_s = self._saved_s + self._allowed_s(decoding, prefilling) - step_s
        self._saved_s = min(max(saved_s, -self.BURST_S), max(self._wanted_s, self.BURST_S))

    def _learn_base(self, kind: int, step_s: float, *, is_alone: bool) -> None:
        if is_alone or kind not in self._alone_s:
            self._alone_s[kind] = _blend(self._alone_s.get(kind), step_s, self.SLOW)
        if is_alone:
            self._between_s.clear()  # the next prompt begins with an empty context
        else:
            self._between_s[kind] = _blend(self._between_s.get(kind), step_s, self.QUICK)

    def _base_s(self, kind: int) -> float:
        return self._between_s.get(kind, self._alone_s.get(kind, 0.0))

    def _allowed_s(self, decoding: int, prefilling: int) -> float:
        """Average duration that steps may have."""
        kind = decoding.bit_length()
        slowdown = 1 + (self.MAX_SLOWDOWN - 1) * max(1.0, prefilling / decoding)
        return max(slowdown * self._alone_s[kind], self.MIN_SLOWDOWN * self._base_s(kind))


def _blend(known: float | None, seen: float, weight: float) -> float:
    return seen if known is None else known + weight * (seen - known)
