"""The state of one turn while it runs, and the queues of waiting, restoring and running turns."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, dropwhile, takewhile

from rekindle.chat.messages import SYSTEM_ROLES
from rekindle.chat.prompt import Prompt
from rekindle.engine.base import Capabilities, KvType, Matrix, Sampled, Sampler, Sequence, Work
from rekindle.fair_queue import EngineShare, FairShare
from rekindle.kvcache.block import Block, PrefixHandle, WriteBack, chain_key
from rekindle.kvcache.entries.entry import Entry
from rekindle.kvcache.plan import Plan
from rekindle.kvcache.tiers.base import Fetch
from rekindle.protocol.events import CacheReport, Delta, Event, Reason
from rekindle.runtime.encode.request import EncodedRequest, Lookup, Stopwatch
from rekindle.runtime.schedule.output import ReplyOutput
from rekindle.tokens import Media, TokenBuffer, Tokens

# Distance between the regular checkpoints of a long prompt.
MIN_INTERVAL_TOKENS, MAX_INTERVAL_TOKENS = 512, 4096


class Checkpoints:
    """The positions ahead at which the state of a turn is kept.

    A model whose state cannot be truncated resumes at a checkpoint or at the beginning. Checkpoints
    are placed where later turns will resume: after the system prompt, before the last user
    message, at the end of the last message, and at intervals of a long prompt. The end of a reply
    needs none, because the sequence itself ends there.
    """

    def __init__(
        self, prompt: Prompt, capabilities: Capabilities, *, exact: bool, held: int
    ) -> None:
        self._grain = capabilities.step_tokens if exact else 1  # canonical steps stay whole
        self._tokens = prompt.tokens
        self._places: set[int] = set()
        before = held
        for place in sorted({self._rounded(place) for place in _places(prompt, capabilities)}):
            # A checkpoint shortly after another one saves little and costs as much.
            if place - before >= capabilities.block_tokens or (place > held and not before):
                self._places.add(place)
                before = place

    def add(self, place: int) -> None:
        """Add a checkpoint where another conversation diverges from this one."""
        if (rounded := self._rounded(place)) > 0:
            self._places.add(rounded)

    def next_after(self, tokens: int) -> int | None:
        return min((place for place in self._places if place > tokens), default=None)

    def reach(self, tokens: int) -> bool:
        """Whether a checkpoint is due at this position. It is removed."""
        due = tokens in self._places
        self._places.discard(tokens)
        return due

    def _rounded(self, place: int) -> int:
        """Round down, so that a later turn computes at least one token and no part of an image."""
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
    """Interval at which a checkpoint takes as much memory as its tokens, within bounds."""
    layout = capabilities.kv_layout
    equal = math.ceil(layout.checkpoint_bytes / max(layout.token_bytes, 1))
    bounded = min(max(equal, MIN_INTERVAL_TOKENS), MAX_INTERVAL_TOKENS)
    return -(-bounded // capabilities.step_tokens) * capabilities.step_tokens


@dataclass(slots=True, eq=False)
class Restoration:
    """Progress of restoring the blocks of a plan into a sequence."""

    plan: Plan[Sequence]
    restored: int = 0  # number of blocks that are in the sequence
    fetches: list[Fetch] = field(default_factory=list)  # reads of the next blocks, in order
    tiers: set[str] = field(default_factory=set)  # where restored blocks came from
    waits_since_s: float | None = None  # start of the wait for a tier
    reads_since_s: float = 0.0  # start of the current series of reads
    read_bytes: int = 0  # read in that series
    problem: Reason | None = None  # why not everything was restored

    @property
    def rest(self) -> tuple[Block, ...]:
        return self.plan.blocks[self.restored :]

    @property
    def unclaimed(self) -> tuple[Block, ...]:
        """Blocks before the first read."""
        return tuple(takewhile(lambda block: self.window_of(block) is None, self.rest))

    @property
    def unread(self) -> tuple[Block, ...]:
        """Planned blocks that no read has requested yet."""
        if not self.fetches:
            return self.rest
        last = next(reversed(self.fetches[-1].blocks))
        behind = dropwhile(lambda block: block.key != last, self.rest)
        return tuple(behind)[1:]

    def window_of(self, block: Block) -> Fetch | None:
        return next((fetch for fetch in self.fetches if block.key in fetch.blocks), None)


@dataclass(slots=True, eq=False)
class Requantisation:
    """The sequence that holds the state of a turn, and the one that it is converted into."""

    source: Sequence
    into: Sequence | None = None  # None until there is room for it


@dataclass(frozen=True, slots=True)
class Offloaded:
    """How much of a sequence is in the store, and the chain key of its last block there."""

    tokens: int
    key: bytes
    before: Offloaded | None = None

    def after(self, block: Tokens) -> Offloaded:
        """The position after one more block."""
        tokens = self.tokens + len(block)
        return Offloaded(tokens, chain_key(self.key, block), Offloaded(self.tokens, self.key))

    def full_blocks(self, block_tokens: int) -> Offloaded:
        """The position before a tail block, which a longer block will replace."""
        tail = self.tokens % block_tokens
        return self.before if tail and self.before else self


class Turn:
    """A request from its arrival to its terminal event.

    `tokens` holds the prompt and everything that was sampled. Tokens that the sequence does not
    hold yet are pending. One pending token is a decode step, more are prefill. A turn that loses
    its sequence has all its tokens pending again.
    """

    def __init__(self, encoded: EncodedRequest, output: ReplyOutput, stopwatch: Stopwatch) -> None:
        self.encoded = encoded
        self.lookup = Lookup(write_back=WriteBack.NEVER)  # until its names are looked up
        self.output = output
        self.stopwatch = stopwatch
        self.id = encoded.request.turn
        self.request = encoded.request
        self.tenant = encoded.request.salt
        self.namespace = encoded.namespace
        self.precision = encoded.precision
        self.prompt_tokens = len(encoded.prompt.tokens)
        self.tokens = TokenBuffer(encoded.prompt.tokens)
        self.report: CacheReport | None = None  # set when it first starts
        # The owner of its state is `handle` while it runs, and `entry` after its end.
        self.handle: PrefixHandle | None = None
        self.entry: Entry | None = None
        self.problem: Reason | None = None  # why planned state was not reused
        # In the engine.
        self.sequence: Sequence | None = None
        self.sampler: Sampler | None = None
        self.restoration: Restoration | None = None  # in progress
        self.plans = 0  # made since it last lost its sequence
        self.kv_format = encoded.precision.initial  # of its state, or of the state it will have
        self.requantise_at: int | None = None  # position at which its state is requantised
        self.requantisation: Requantisation | None = None  # in progress
        self.offloaded = Offloaded(0, self.kv_format.namespace)
        self.checkpoints: Checkpoints | None = None  # where state cannot be truncated
        self.shown: tuple[Media, Matrix] | None = None  # the next image and its vectors
        self.waits_for_vectors = False  # until they are read from disk
        # In the queue.
        self.place = 0  # among the turns of its tenant, the lowest first
        self.waiting_since_s = 0.0  # on the scheduler's clock
        self.chunk_tokens = 0  # computed since it last came to the front of the prefill queue
        self.restarts = 0
        self.is_started = False
        self.is_over = False  # its last token was sampled
        # Its progress.
        self.prompt_eval_s = 0.0
        self.unreported_s = 0.0  # prefill time since the last progress report
        self.first_token_at_s: float | None = None

    @property
    def rank(self) -> int:
        """Its priority against the turns of other tenants. Only an admin key can raise it."""
        return max(self.request.priority, 0) if self.request.outranks else 0

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
        """Whether its next step computes one token of text."""
        has_media = self.tokens.media and self.next_picture
        return self.pending_tokens == 1 and not has_media and not self.is_over

    @property
    def is_prefilling(self) -> bool:
        """Whether its prompt is still being computed."""
        return self.pending_tokens > 1 or not self.generated_tokens

    @property
    def only_decodes(self) -> bool:
        """Whether its next tokens only extend the reply, without checkpoint or requantisation."""
        is_watched = self.request.exact or self.checkpoints or self.requantise_at is not None
        return self.generated_tokens > 0 and not is_watched

    @property
    def may_wait(self) -> bool:
        """Whether it may be preempted for another tenant. Its state is kept then."""
        is_moving = self.restoration or self.requantisation
        return self.request.reuse and not self.request.exact and not is_moving

    @property
    def must_requantise(self) -> bool:
        """Whether its next token is to be computed in other cells than it has now."""
        at = self.requantise_at
        return at is not None and self.held_tokens >= at and self.pending_tokens > 0

    def cells_in(self, kv_type: KvType) -> bool:
        """Whether it holds or is about to hold cells of this KV type."""
        into = self.requantisation.into if self.requantisation else None
        here = self.kv_format.kv_type == kv_type or (into is not None and into.kv_type == kv_type)
        return here and not self.request.exact

    def wanted_tokens(self, kv_type: KvType, headroom: int) -> int:
        """Cells that it still needs for its prompt and the start of its reply."""
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
        """The image that its next step computes."""
        span = self.tokens.media_from(self.held_tokens) if self.tokens.media else None
        return span if span and span.start <= self.held_tokens else None

    @property
    def wants_vectors(self) -> bool:
        """Whether prefill has reached an image whose vectors are missing."""
        span = self.next_picture
        return span is not None and (self.shown is None or self.shown[0] != span)

    def next_work(self, most: int, step_tokens: int, *, whole_pictures: bool = False) -> Work:
        """Return the work of the next step: at most `most` tokens, one canonical step if the turn
        is exact, and a whole image if images cannot be divided."""
        start = self.held_tokens
        stop = start + most
        if self.request.exact:
            # Sampled tokens were computed one by one. Computing them together changes bits.
            boundary = start - start % step_tokens + step_tokens
            stop = min(boundary, self.prompt_tokens) if start < self.prompt_tokens else start + 1
        elif self.checkpoints and (place := self.checkpoints.next_after(start)):
            stop = min(stop, place)
        if self.requantise_at is not None and start < self.requantise_at:
            stop = min(stop, self.requantise_at)
        stop = self._edge(start, stop, whole_pictures=whole_pictures)
        return self._work(start, min(stop, len(self.tokens)))

    def last_work(self) -> Work:
        """Return the work of a decode step."""
        assert self.sequence is not None
        return Work(self.sequence, [self.tokens.last], self.sampler)

    def _edge(self, start: int, stop: int, *, whole_pictures: bool) -> int:
        """End of a step that contains either text or one image."""
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
        """Append a sampled token. Its text follows with `accept`."""
        self.is_over = self.output.is_last(sampled.token, self.generated_tokens)
        if not self.output.ends_with(sampled.token):
            self.tokens.append(sampled.token)

    def accept(self, sampled: Sampled) -> list[Event]:
        """Return the text of a token that was appended before."""
        if self.first_token_at_s is None:
            self.first_token_at_s = time.monotonic()
            self.stopwatch.lap("compute")
        return [Delta(self.id, part) for part in self.output.accept(sampled)]

    def finish_prepared(self) -> None:
        """End a turn that only computes its prompt, when that is done."""
        if not self.pending_tokens:
            self.stopwatch.lap("compute")
            self.output.finish("stop")


# A turn waits for another one that is computing a shared prefix of at least this length.
MIN_SHARED_TOKENS = 32
# Number of its tenant's turns that a turn overtakes for each point of its priority.
OVERTAKEN_TURNS = 8


class TurnQueues:
    """The turns by what they do now. In each queue the turns of a tenant are ordered by place.

    A tenant that holds few places, has received little engine time, or restored few bytes, comes
    before one that has had more. Priority counts among the turns of one tenant only, unless it was
    sent with an admin key.
    """

    def __init__(self, share: EngineShare) -> None:
        self._share = share
        self._waiting: dict[bytes, list[Turn]] = {}  # by tenant
        self.restoring: list[Turn] = []  # or being requantised
        self.running: list[Turn] = []
        self.ended: list[Turn] = []  # which still hold their sequences
        self._open: Counter[bytes] = Counter()  # turns of each tenant that have not ended
        self._tickets: Counter[bytes] = Counter()  # the last one of each tenant that has turns
        self._moved_bytes: FairShare[Turn] = FairShare(tenant_of)

    def __len__(self) -> int:
        return self._open.total()

    def __iter__(self) -> Iterator[Turn]:
        waiting = chain.from_iterable(self._waiting.values())
        return iter([*waiting, *self.restoring, *self.running])

    @property
    def waiting(self) -> int:
        """Number of turns that wait to start."""
        return len(self) - self.started

    def submit(self, turn: Turn) -> None:
        """Add a turn. Its priority moves it ahead of a limited number of its tenant's turns, so no
        turn waits forever."""
        self._open[turn.tenant] += 1
        self._tickets[turn.tenant] += 1
        turn.place = self._tickets[turn.tenant] - OVERTAKEN_TURNS * turn.request.priority
        self.wait(turn)

    def wait(self, turn: Turn) -> None:
        """Put a turn that is in no queue at its place among the waiting turns of its tenant."""
        insert(self._waiting.setdefault(turn.tenant, []), turn)

    def wait_first(self, turn: Turn) -> None:
        """Put a turn that has already run before all waiting turns of its tenant."""
        self._waiting.setdefault(turn.tenant, []).insert(0, turn)

    def remove(self, turn: Turn) -> None:
        """Remove a turn from its queue, to put it into another one."""
        waiting = self._waiting.get(turn.tenant, [])
        for turns in (waiting, self.restoring, self.running):
            if turn in turns:
                turns.remove(turn)
        if not waiting:
            self._waiting.pop(turn.tenant, None)

    def begin(self, turn: Turn) -> None:
        """Take a waiting turn out, because it starts."""
        self.remove(turn)

    def end(self, turn: Turn) -> None:
        self.remove(turn)
        turn.sampler = None
        self.ended.append(turn)
        self._open[turn.tenant] -= 1
        if not self._open[turn.tenant]:
            del self._open[turn.tenant], self._tickets[turn.tenant]

    @property
    def started(self) -> int:
        """Turns that hold memory: running and restoring ones."""
        return len(self.running) + len(self.restoring)

    def take_started(self) -> list[Turn]:
        """Remove and return all turns that hold memory."""
        started = [*self.running, *self.restoring]
        self.running.clear()
        self.restoring.clear()
        return started

    def next_to_start(self, exact_sequences: int, has_room: Callable[[bytes], bool]) -> Turn | None:
        """The first turn that may start, of the tenant that holds the fewest places. Among equal
        tenants the one that has received the least engine time comes first.

        `exact_sequences` limits exact turns, and `has_room` tells which tenants may start one.
        """
        held = Counter(turn.tenant for turn in (*self.running, *self.restoring))

        def order(tenant: bytes) -> tuple[int, int, float]:
            rank = max(turn.rank for turn in self._waiting[tenant])
            return -rank, held[tenant], self._share.received_s(tenant)

        for tenant in sorted(self._waiting, key=order):
            if not has_room(tenant):
                continue
            for turn in self._waiting[tenant]:
                may_open = not turn.request.exact or self._exact_sequences < exact_sequences
                if may_open and not self._follows(turn):
                    return turn
        return None

    def next_to_restore(self) -> list[Turn]:
        """All restoring turns. The tenant for which the fewest bytes were moved comes first."""
        return self._moved_bytes.interleave(self.restoring)

    def next_to_requantise(self) -> list[Turn]:
        """All turns that requantise or are about to, in the same order."""
        started = [turn for turn in self.restoring if turn.requantisation]
        ready = [turn for turn in self.running if turn.must_requantise]
        return self._moved_bytes.interleave([*started, *ready])

    def count_moved(self, turn: Turn, moved_bytes: int) -> None:
        """Count state that was restored or requantised for a turn."""
        self._moved_bytes.charge(turn.tenant, moved_bytes)

    def charge(self, used_s: Mapping[bytes, float]) -> None:
        """Record the engine time that tenants have used."""
        self._share.charge(used_s, self._open)

    def to_yield(self, waiting: Turn, *, is_full: bool, quantum_s: float) -> Turn | None:
        """The turn that gives way to one that has waited for long, or None if its tenant already
        has its share.

        `is_full`: all places are taken, so places are counted. Otherwise memory is missing, and
        tokens in the engine are counted. Tenants with equal shares alternate every `quantum_s`.
        """
        held: Counter[bytes] = Counter()
        for turn in (*self.running, *self.restoring):
            held[turn.tenant] += 1 if is_full else turn.held_tokens
        movable = [
            turn
            for turn in self.running
            if turn.tenant != waiting.tenant and turn.rank <= waiting.rank and turn.may_wait
        ]
        if not movable:
            return None
        victim = max(movable, key=lambda turn: (-turn.rank, held[turn.tenant], turn.place))
        if waiting.rank > victim.rank:
            return victim
        needed = 1 if is_full else len(waiting.tokens)
        more = held[victim.tenant] - held[waiting.tenant] - needed
        received_s = self._share.received_s
        is_ahead = received_s(victim.tenant) > received_s(waiting.tenant) + quantum_s
        return victim if more > 0 or (more == 0 and is_ahead) else None

    def to_preempt(self, holding: list[Turn]) -> Turn:
        """The turn that gives up its cells: the last one of the tenant that holds the most."""
        held_tokens: Counter[bytes] = Counter()
        for turn in holding:
            held_tokens[turn.tenant] += turn.held_tokens
        [(tenant, _)] = held_tokens.most_common(1)
        return max((turn for turn in holding if turn.tenant == tenant), key=lambda turn: turn.place)

    @property
    def _exact_sequences(self) -> int:
        """Open exact sequences. The engine reserves one more for a requantisation, so the second
        sequence of the first requantising turn does not count."""
        exact = [turn for turn in (*self.running, *self.restoring) if turn.request.exact]
        requantising = sum(turn.requantisation is not None for turn in exact)
        return len(exact) + max(requantising - 1, 0)

    def _follows(self, turn: Turn) -> bool:
        """Whether another turn is computing or restoring a prefix that this turn needs. Then this
        turn waits, so that the prefix is computed once."""
        reading = (leader for leader in self.running if leader.is_prefilling)
        return any(_leads(leader, turn) for leader in (*reading, *self.restoring))


def _leads(leader: Turn, turn: Turn) -> bool:
    """Whether `leader` is about to have a prefix that `turn` needs."""
    ahead_of, behind = leader.request, turn.request
    together = ahead_of.reuse and behind.reuse and ahead_of.exact == behind.exact
    precision = turn.precision
    if not together or not (leader.precision == precision or leader.kv_format == precision.initial):
        return False
    common = min(leader.tokens.common_prefix(turn.tokens), len(turn.tokens) - 1)
    if leader.precision != precision and precision.start_tokens:
        common = min(common, precision.start_tokens)  # from there on it has state of its own
    is_on_its_way = leader.restoration or leader.requantisation
    held_tokens = 0 if is_on_its_way else leader.held_tokens  # which can be shared
    # An exact turn reuses state from the store, which has it once the leader's prompt is done.
    ahead = turn.request.exact or common > held_tokens
    if common < MIN_SHARED_TOKENS or not ahead:
        return False
    if leader.checkpoints and common > leader.held_tokens:
        leader.checkpoints.add(common)
    return True


def insert(turns: list[Turn], turn: Turn) -> None:
    """Insert a turn before the turns of its tenant that have a later place."""
    own = ((at, other) for at, other in enumerate(turns) if other.tenant == turn.tenant)
    turns.insert(next((at for at, other in own if other.place > turn.place), len(turns)), turn)


def tenant_of(turn: Turn) -> bytes:
    return turn.tenant
