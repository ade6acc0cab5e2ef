"""Runs encoder threads, which turn requests into tokens and tokenise texts for clients."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

from rekindle.errors import BadRequest
from rekindle.fair_queue import FairQueue
from rekindle.protocol.admin import (
    AdminReply,
    AdminRequest,
    Detokenize,
    Detokenized,
    Tokenize,
    Tokenized,
    pack_ids,
)
from rekindle.protocol.events import Cancelled
from rekindle.tokens import Tokenizer

LARGE_BYTES = 64 << 10  # encoding a larger request takes long enough to delay small ones

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Job(Generic[T]):
    """A request that waits to be encoded."""

    tenant: bytes
    size_bytes: int
    encode: Callable[[], Sequence[T]]  # returns one result per turn, or one in all; never raises
    turns: tuple[int, ...] = ()  # empty if the request does not generate anything
    is_constrained: bool = False  # encoding it compiles a grammar, which may take seconds


class _Lane(Generic[T]):
    """The queues of two encoder threads. Small requests never wait for large ones."""

    def __init__(self, *, one_per_tenant: bool) -> None:
        self._one_per_tenant = one_per_tenant
        self._small: FairQueue[Job[T]] = FairQueue()
        self._large: FairQueue[Job[T]] = FairQueue()
        self._skipped: set[bytes] = set()  # tenants that have to wait for their own job
        # The queues of each thread. One thread takes small requests only.
        self.threads = ((self._small,), (self._large, self._small))

    def put(self, job: Job[T]) -> None:
        queue = self._large if job.size_bytes > LARGE_BYTES else self._small
        queue.put(job.tenant, job)

    def remove(self, job: Job[T]) -> None:
        self._small.remove(job.tenant, job)
        self._large.remove(job.tenant, job)

    def begin(self, queues: Iterable[FairQueue[Job[T]]]) -> Job[T] | None:
        """Remove and return the next job of these queues."""
        for queue in queues:
            if job := queue.pop(self._skipped):
                if self._one_per_tenant:
                    self._skipped.add(job.tenant)
                return job
        return None

    def end(self, job: Job[T]) -> None:
        self._skipped.discard(job.tenant)


class Encoders(Generic[T]):
    """The encoder threads. Any thread may call this class.

    Requests with a grammar have threads of their own, and only one of each tenant is encoded at a
    time. So a tenant whose grammars are slow to compile delays only its own.

    `deliver` receives the outcome of every turn: a result of `encode`, or Cancelled.
    """

    def __init__(self, deliver: Callable[[T | Cancelled], None]) -> None:
        self._deliver = deliver
        self._changed = threading.Condition()
        self._plain = _Lane[T](one_per_tenant=False)
        self._constrained = _Lane[T](one_per_tenant=True)
        self._turns: dict[int, Job[T]] = {}  # of jobs that wait or are being encoded
        self._begun_s: dict[Job[T], float] = {}  # when each job that is being encoded began
        for lane in (self._plain, self._constrained):
            for queues in lane.threads:
                work = partial(self._run, lane, queues)
                threading.Thread(target=work, name="encoder", daemon=True).start()

    @property
    def working_since_s(self) -> float | None:
        """When the oldest job that is being encoded began. None if there is none."""
        with self._changed:
            return min(self._begun_s.values(), default=None)

    def _lane(self, job: Job[T]) -> _Lane[T]:
        return self._constrained if job.is_constrained else self._plain

    def submit(self, job: Job[T]) -> None:
        with self._changed:
            self._lane(job).put(job)
            self._turns |= dict.fromkeys(job.turns, job)
            self._changed.notify_all()

    def cancel(self, turn: int) -> bool:
        """Cancel a turn. Returns False if it is not being encoded.

        A job is dropped when all its turns are cancelled. A job that has begun cannot be
        interrupted, and its result is discarded.
        """
        with self._changed:
            job = self._turns.pop(turn, None)
            if job is None:
                return False
            if not any(other in self._turns for other in job.turns):
                self._lane(job).remove(job)
            self._deliver(Cancelled(turn))
            return True

    def _run(self, lane: _Lane[T], queues: Sequence[FairQueue[Job[T]]]) -> None:
        while True:
            job = self._next(lane, queues)
            self._finish(lane, job, job.encode())
            del job  # free its memory before waiting for the next job

    def _next(self, lane: _Lane[T], queues: Sequence[FairQueue[Job[T]]]) -> Job[T]:
        with self._changed:
            while (job := lane.begin(queues)) is None:
                self._changed.wait()
            self._begun_s[job] = time.monotonic()
            return job

    def _finish(self, lane: _Lane[T], job: Job[T], results: Sequence[T]) -> None:
        with self._changed:  # `cancel` must find a turn either here or after its delivery
            del self._begun_s[job]
            lane.end(job)
            self._changed.notify_all()  # the tenant's next job may begin
            for turn, result in zip(job.turns or (None,), results, strict=True):
                if turn is None or self._turns.pop(turn, None) is not None:
                    self._deliver(result)


EncodeChat = Callable[[Tokenize], tuple[list[int], str]]  # tokens and text


class EncodeText(Protocol):
    def __call__(self, text: str, *, special: bool) -> list[int]: ...


def check_token_ids(ids: Iterable[int], tokenizer: Tokenizer, param: str) -> None:
    """Raise BadRequest unless all ids are tokens of this model."""
    last = tokenizer.size - 1
    if not all(0 <= token <= last for token in ids):
        raise BadRequest(f"token ids of this model go from 0 to {last}", param=param)


@dataclass(frozen=True, slots=True)
class Tokenisation:
    """Tokenises texts and conversations for clients. Any thread may call this class."""

    tokenizer: Tokenizer
    context_tokens: int
    wrapped: EncodeText  # adds the model's special tokens to a text
    chat: EncodeChat | None = None  # None for a model without conversations

    def reply(self, request: AdminRequest) -> Sequence[AdminReply]:
        assert isinstance(request.op, Tokenize | Detokenize)
        return [AdminReply(request.id, self.answer(request.op))]

    def answer(self, op: Tokenize | Detokenize) -> Tokenized | Detokenized:
        """Raises BadRequest for messages or ids that this model does not take."""
        if isinstance(op, Detokenize):
            check_token_ids(op.tokens, self.tokenizer, "tokens")
            return Detokenized(b"".join(map(self._piece, op.tokens)).decode(errors="replace"))
        tokens, text = self._encoded(op)
        return Tokenized(
            len(tokens),
            self.context_tokens,
            pack_ids(tokens) if op.with_tokens else b"",
            {token: self._piece(token) for token in set(tokens)} if op.with_pieces else {},
            text,
        )

    def _encoded(self, op: Tokenize) -> tuple[list[int], str]:
        if op.messages is not None:
            if self.chat is None:
                raise BadRequest("this model has no conversations: send a text", param="messages")
            return self.chat(op)
        assert op.text is not None, "the front sends messages or a text"
        encode = self.wrapped if op.add_special else self.tokenizer.encode
        return encode(op.text, special=op.parse_special), ""

    def _piece(self, token: int) -> bytes:
        return self.tokenizer.piece(token, special=True)
