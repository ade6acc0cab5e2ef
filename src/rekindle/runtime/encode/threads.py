"""Runs encoder threads, which turn requests into tokens and tokenise texts for clients."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from rekindle.errors import BadRequest, as_server_error
from rekindle.fair_queue import FairQueue
from rekindle.protocol.admin import (
    AdminReply,
    AdminRequest,
    Detokenize,
    Detokenized,
    Tokenize,
    Tokenized,
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


class Encoders(Generic[T]):
    """The encoder threads. Any thread may call this class.

    `deliver` receives the outcome of every turn: a result of `encode`, or Cancelled.
    """

    def __init__(self, deliver: Callable[[T | Cancelled], None]) -> None:
        self._deliver = deliver
        self._changed = threading.Condition()
        self._small: FairQueue[Job[T]] = FairQueue()
        self._large: FairQueue[Job[T]] = FairQueue()
        self._turns: dict[int, Job[T]] = {}  # of jobs that wait or are being encoded
        # One thread takes small requests only, so they never wait for large ones.
        for queues in ((self._small,), (self._large, self._small)):
            threading.Thread(target=self._run, args=queues, name="encoder", daemon=True).start()

    def submit(self, job: Job[T]) -> None:
        queue = self._large if job.size_bytes > LARGE_BYTES else self._small
        with self._changed:
            queue.put(job.tenant, job)
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
                self._small.remove(job.tenant, job)
                self._large.remove(job.tenant, job)
            self._deliver(Cancelled(turn))
            return True

    def _run(self, *queues: FairQueue[Job[T]]) -> None:
        while True:
            job = self._next(queues)
            self._finish(job, job.encode())
            del job  # free its memory before waiting for the next job

    def _next(self, queues: tuple[FairQueue[Job[T]], ...]) -> Job[T]:
        with self._changed:
            while True:
                for queue in queues:
                    if job := queue.pop():
                        return job
                self._changed.wait()

    def _finish(self, job: Job[T], results: Sequence[T]) -> None:
        with self._changed:  # `cancel` must find a turn either here or after its delivery
            for turn, result in zip(job.turns or (None,), results, strict=True):
                if turn is None or self._turns.pop(turn, None) is not None:
                    self._deliver(result)


EncodeChat = Callable[[Tokenize], list[int]]


class EncodeText(Protocol):
    def __call__(self, text: str, *, special: bool) -> list[int]: ...


def check_token_ids(ids: Iterable[int], tokenizer: Tokenizer, param: str) -> None:
    """Raise BadRequest unless all ids are tokens of this model."""
    last = tokenizer.size - 1
    if not all(0 <= token <= last for token in ids):
        raise BadRequest(f"token ids of this model go from 0 to {last}", param=param)


class Tokenisation:
    """`wrapped` adds the model's special tokens to a text. `chat` encodes a conversation; it is
    None for a model without conversations. Any thread may call this class.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        context_tokens: int,
        wrapped: EncodeText,
        chat: EncodeChat | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._context_tokens = context_tokens
        self._wrapped = wrapped
        self._chat = chat

    def reply(self, request: AdminRequest) -> Sequence[AdminReply]:
        """Answer an admin request, or return its error."""
        assert isinstance(request.op, Tokenize | Detokenize)
        try:
            return [AdminReply(request.id, self.answer(request.op))]
        except Exception as error:
            failure = as_server_error(error, "encoding the text").info
            return [AdminReply(request.id, error=failure)]

    def answer(self, op: Tokenize | Detokenize) -> Tokenized | Detokenized:
        """Raises BadRequest for messages or ids that this model does not take."""
        if isinstance(op, Detokenize):
            check_token_ids(op.tokens, self._tokenizer, "tokens")
            return Detokenized(b"".join(self._pieces(op.tokens)).decode(errors="replace"))
        tokens = self._tokens(op)
        return Tokenized(
            len(tokens),
            self._context_tokens,
            tokens if op.with_tokens else [],
            self._pieces(tokens) if op.with_pieces else [],
        )

    def _tokens(self, op: Tokenize) -> list[int]:
        if op.messages is not None:
            if self._chat is None:
                raise BadRequest("this model has no conversations: send a text", param="messages")
            return self._chat(op)
        assert op.text is not None, "the front sends messages or a text"
        encode = self._wrapped if op.add_special else self._tokenizer.encode
        return encode(op.text, special=op.parse_special)

    def _pieces(self, tokens: list[int]) -> list[bytes]:
        return [self._tokenizer.piece(token, special=True) for token in tokens]
