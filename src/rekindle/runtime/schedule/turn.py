"""One turn as the scheduler sees it: its tokens, and how far the engine has got with them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import dropwhile, takewhile

from rekindle.chat.messages import SYSTEM_ROLES
from rekindle.chat.prompt import Prompt
from rekindle.engine.base import Capabilities, KvType, Matrix, Sampled, Sampler, Sequence, Work
from rekindle.kvcache.block import Block, WriteBack, chain_key
from rekindle.kvcache.plan import Plan
from rekindle.kvcache.tiers.base import Fetch
from rekindle.protocol.events import CacheReport, Delta, Event, Reason
from rekindle.runtime.encode.request import EncodedRequest, Lookup, Stopwatch
from rekindle.runtime.schedule.output import ReplyOutput
from rekindle.tokens import Media, TokenBuffer, Tokens

# ----------------------------------------------------------------------
# Where checkpoints are taken: the places in a prompt where a later turn will want to go on.
#
# A model whose state cannot be cut goes on from a checkpoint or from the beginning, so they are
# laid where conversations part: after what all of them share, before the last user message, where
# the prompt ends and the template's own words begin, and at intervals of a long prompt. The end of
# a reply is one by itself: the sequence stands there when its turn ends.

LEAST_INTERVAL_TOKENS, MOST_INTERVAL_TOKENS = 512, 4096


class Checkpoints:
    """The positions still to come at which one turn's state is to be kept."""

    def __init__(
        self, prompt: Prompt, capabilities: Capabilities, *, exact: bool, held: int
    ) -> None:
        self._grain = capabilities.step_tokens if exact else 1  # canonical steps are not cut short
        self._tokens = prompt.tokens
        self._places: set[int] = set()
        before = held
        for place in sorted({self._rounded(place) for place in _places(prompt, capabilities)}):
            # One just behind another saves next to nothing, and each costs as much.
            if place - before >= capabilities.block_tokens or (place > held and not before):
                self._places.add(place)
                before = place

    def add(self, place: int) -> None:
        """Take one more, where another conversation is seen to part from this one."""
        if (rounded := self._rounded(place)) > 0:
            self._places.add(rounded)

    def next_after(self, tokens: int) -> int | None:
        return min((place for place in self._places if place > tokens), default=None)

    def reach(self, tokens: int) -> bool:
        """Whether a checkpoint is due now."""
        due = tokens in self._places
        self._places.discard(tokens)
        return due

    def _rounded(self, place: int) -> int:
        """Where a later turn computes one token at least, and all of a picture."""
        place = self._tokens.whole_media(min(place, len(self._tokens) - 1))
        return place - place % self._grain


def _places(prompt: Prompt, capabilities: Capabilities) -> Iterator[int]:
    talk = [each for each in prompt.spans if each.role not in SYSTEM_ROLES]
    if talk:
        yield min(each.start for each in talk)
        yield max((each.start for each in talk if each.role == "user"), default=0)
        yield max(each.end for each in talk)
    yield len(prompt.tokens) - 1
    interval = interval_tokens(capabilities)
    yield from range(interval, len(prompt.tokens), interval)


def interval_tokens(capabilities: Capabilities) -> int:
    """As many tokens as take as much as a checkpoint does, within bounds."""
    layout = capabilities.kv_layout
    equal = math.ceil(layout.checkpoint_bytes / max(layout.token_bytes, 1))
    bounded = min(max(equal, LEAST_INTERVAL_TOKENS), MOST_INTERVAL_TOKENS)
    return -(-bounded // capabilities.step_tokens) * capabilities.step_tokens


# ----------------------------------------------------------------------
# How far a turn's stored state has got on its way into the engine.


class Restoration:
    """The blocks of a plan: those in the sequence, those being read, and the rest."""

    __slots__ = (
        "blocks",
        "fetches",
        "plan",
        "problem",
        "read_bytes",
        "reads_since_s",
        "restored",
        "tiers",
        "waits_since_s",
    )

    def __init__(self, plan: Plan[Sequence]) -> None:
        self.plan = plan
        self.blocks = plan.blocks
        self.restored = 0  # of the blocks, the first so many
        self.fetches: list[Fetch] = []  # windows that hold what comes next
        self.tiers: set[str] = set()  # that gave something
        self.waits_since_s: float | None = None  # for a tier
        self.reads_since_s = 0.0  # without a break
        self.read_bytes = 0  # that have come since then
        self.problem: Reason | None = None  # why it ended early

    @property
    def rest(self) -> tuple[Block, ...]:
        return self.blocks[self.restored :]

    @property
    def unclaimed(self) -> tuple[Block, ...]:
        """What comes before the first window."""
        return tuple(takewhile(lambda block: self.window_of(block) is None, self.rest))

    @property
    def unread(self) -> tuple[Block, ...]:
        """What comes after all windows."""
        if not self.fetches:
            return self.rest
        last = next(reversed(self.fetches[-1].blocks))
        behind = dropwhile(lambda block: block.key != last, self.rest)
        return tuple(behind)[1:]

    def window_of(self, block: Block) -> Fetch | None:
        return next((fetch for fetch in self.fetches if block.key in fetch.blocks), None)


# ----------------------------------------------------------------------
# How far a turn's state has got on its way into cells of another type.


class Requantisation:
    """The sequence that holds it, and the one that it is written into again."""

    __slots__ = ("into", "source")

    def __init__(self, source: Sequence) -> None:
        self.source = source
        self.into: Sequence | None = None  # None: there was no room for it yet


@dataclass(frozen=True, slots=True)
class Offloaded:
    """How much of a sequence is in the store: so many tokens, and the key of their last block."""

    tokens: int
    key: bytes
    before: Offloaded | None = None

    def after(self, block: Tokens) -> Offloaded:
        """One block further."""
        tokens = self.tokens + len(block)
        return Offloaded(tokens, chain_key(self.key, block), Offloaded(self.tokens, self.key))

    def full_blocks(self, block_tokens: int) -> Offloaded:
        """Without the tail: what comes next makes a longer block of it."""
        tail = self.tokens % block_tokens
        return self.before if tail and self.before else self


class Turn:
    """`tokens` are the prompt and everything sampled. What the sequence does not hold yet is
    pending: one pending token is a decode step, more are prefill. A turn that loses its sequence
    has everything pending again.
    """

    def __init__(self, encoded: EncodedRequest, output: ReplyOutput, stopwatch: Stopwatch) -> None:
        self.encoded = encoded
        self.lookup = Lookup(write_back=WriteBack.NEVER)  # before its names are looked up
        self.output = output
        self.stopwatch = stopwatch
        self.id = encoded.request.turn
        self.request = encoded.request
        self.namespace = encoded.namespace
        self.precision = encoded.precision
        self.prompt_tokens = len(encoded.prompt.tokens)
        self.tokens = TokenBuffer(encoded.prompt.tokens)
        self.report: CacheReport | None = None  # from its first start on
        self.problem: Reason | None = None  # why state that it wanted to reuse could not be had
        # In the engine.
        self.sequence: Sequence | None = None
        self.sampler: Sampler | None = None
        self.restoration: Restoration | None = None  # its blocks on their way into the sequence
        self.plans = 0  # made since it last held nothing
        self.kv_format = encoded.precision.initial  # of its state, or of the state it will have
        self.requantise_at: int | None = None  # position at which its state is requantised
        self.requantisation: Requantisation | None = None  # in progress
        self.offloaded = Offloaded(0, self.kv_format.namespace)
        self.checkpoints: Checkpoints | None = None  # where state cannot be truncated
        self.shown: tuple[Media, Matrix] | None = None  # a picture and its vectors
        self.waits_for_vectors = False  # that are being read
        # In the queue.
        self.place = 0  # lower goes first
        self.chunk_tokens = 0  # computed since it last came to the front of the prefill queue
        self.restarts = 0
        self.is_started = False
        self.is_over = False  # its last token is taken
        # Its progress.
        self.prompt_eval_s = 0.0
        self.unreported_s = 0.0  # of that, since its progress was last reported
        self.first_token_at_s: float | None = None

    @property
    def generated_tokens(self) -> int:
        return self.tokens.length - self.prompt_tokens

    @property
    def held_tokens(self) -> int:
        return self.sequence.length if self.sequence else 0

    @property
    def pending_tokens(self) -> int:
        return self.tokens.length - (self.sequence.length if self.sequence else 0)

    @property
    def is_decoding(self) -> bool:
        """Whether its next step is of one token of text."""
        has_media = self.tokens.media and self.next_picture
        return self.pending_tokens == 1 and not has_media and not self.is_over

    @property
    def is_prefilling(self) -> bool:
        """Whether its prompt is still being computed."""
        return self.pending_tokens > 1 or not self.generated_tokens

    @property
    def only_decodes(self) -> bool:
        """Whether its next tokens change nothing but its reply."""
        is_watched = self.request.exact or self.checkpoints or self.requantise_at is not None
        return self.generated_tokens > 0 and not is_watched

    @property
    def must_requantise(self) -> bool:
        """Whether its next token is to be computed in other cells than it has now."""
        at = self.requantise_at
        return at is not None and self.held_tokens >= at and self.pending_tokens > 0

    def cells_in(self, kv_type: KvType) -> bool:
        """Whether it has, or is getting, cells of a type's pool."""
        into = self.requantisation.into if self.requantisation else None
        here = self.kv_format.kv_type == kv_type or (into is not None and into.kv_type == kv_type)
        return here and not self.request.exact

    def wanted_tokens(self, kv_type: KvType, headroom: int) -> int:
        """Cells of a type that it still needs for its prompt, and some for its reply."""
        headroom = min(self.output.remaining_tokens, headroom)
        if self.requantisation is None or self.kv_format.kv_type == kv_type:
            return self.pending_tokens + headroom
        into = self.requantisation.into
        return len(self.tokens) - (into.length if into else 0) + headroom

    @property
    def shares(self) -> bool:
        """Whether other turns may use this one's state while it runs."""
        return self.request.reuse and not self.request.exact

    @property
    def next_picture(self) -> Media | None:
        """The picture that its next step is of."""
        span = self.tokens.media_from(self.held_tokens) if self.tokens.media else None
        return span if span and span.start <= self.held_tokens else None

    @property
    def wants_vectors(self) -> bool:
        """Whether it has come to a picture whose vectors it does not have."""
        span = self.next_picture
        return span is not None and (self.shown is None or self.shown[0] != span)

    def next_work(self, most: int, step_tokens: int, *, whole_pictures: bool = False) -> Work:
        """The next step: at most `most` tokens, or one canonical step when exact; of a picture all,
        where it has to be computed whole."""
        start = self.held_tokens
        stop = start + most
        if self.request.exact:
            # Sampled tokens were computed one by one; so they are again, or bits would differ.
            boundary = start - start % step_tokens + step_tokens
            stop = min(boundary, self.prompt_tokens) if start < self.prompt_tokens else start + 1
        elif self.checkpoints and (place := self.checkpoints.next_after(start)):
            stop = min(stop, place)
        if self.requantise_at is not None and start < self.requantise_at:
            stop = min(stop, self.requantise_at)
        stop = self._edge(start, stop, whole_pictures=whole_pictures)
        return self._work(start, min(stop, len(self.tokens)))

    def last_work(self) -> Work:
        """The step of one pending token of text."""
        assert self.sequence is not None
        return Work(self.sequence, [self.tokens.last], self.sampler)

    def _edge(self, start: int, stop: int, *, whole_pictures: bool) -> int:
        """Where a step ends that is of text alone, or of one picture."""
        span = self.tokens.media_from(start) if self.tokens.media else None
        if span is None:
            return stop
        if start < span.start:
            return min(stop, span.start)
        return span.stop if whole_pictures else min(stop, span.stop)

    def _work(self, start: int, stop: int) -> Work:
        assert self.sequence is not None
        sampler = self.sampler if stop == len(self.tokens) else None
        tokens, vectors = self.tokens.part(start, stop), None
        if (span := self.next_picture) and self.shown:
            vectors = self.shown[1][start - span.start : stop - span.start]
        return Work(self.sequence, tokens, sampler, vectors)

    def take(self, sampled: Sampled) -> None:
        """A sampled token belongs to the turn; `accept` follows."""
        self.is_over = self.output.is_last(sampled.token, self.generated_tokens)
        if not self.output.ends_with(sampled.token):
            self.tokens.append(sampled.token)

    def accept(self, sampled: Sampled) -> list[Event]:
        """The text of a token that was taken."""
        if self.first_token_at_s is None:
            self.first_token_at_s = time.monotonic()
            self.stopwatch.lap("compute")
        return [Delta(self.id, part) for part in self.output.accept(sampled)]

    def finish_prepared(self) -> None:
        """A turn that generates nothing is over when its prompt is computed."""
        if not self.pending_tokens:
            self.stopwatch.lap("compute")
            self.output.finish("stop")
