"""An engine without a model that keeps the contract.

Its state is a chain of hashes, so a wrong token, order or position in restored state changes every
later choice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from rekindle.engine.base import (
    Blob,
    Capabilities,
    KvLayout,
    KvType,
    Matrix,
    Pending,
    Sampled,
    Sampler,
    Sequence,
    StateFiles,
    TokenMask,
    Work,
)
from rekindle.engine.cells import Cells
from rekindle.errors import CorruptBlock, EngineBroken, NoMemory, PoolFull, Unsupported
from rekindle.memory import plain_memory
from rekindle.protocol.requests import Picture, SamplingParams
from rekindle.tokens import MEDIA_BIT, Tokenizer, Tokens, pack
from tests.support.pictures import PlainProjector

CELL_BYTES = 16
CELLS_BYTES: dict[KvType, int] = {"fake": CELL_BYTES, "fake8": 8, "fake4": 4}
BITS: dict[KvType, int] = {"fake": 16, "fake8": 8, "fake4": 4}
CHECKPOINT_BYTES = 40
VOCABULARY_SIZE = 1000
VECTOR_WIDTH = 4
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


class NumberTokenizer:
    """Writes a token as its number, for tests that need no text."""

    size = VOCABULARY_SIZE
    bos: int | None = None
    eos: int | None = None
    add_bos = False
    end_tokens: frozenset[int] = frozenset()
    control_texts: dict[str, int] = {}  # noqa: RUF012 - a protocol's plain attribute
    longest_bytes = len("999 ")
    fim = None

    def text(self, token: int | None) -> str:
        return "" if token is None else str(token)

    def encode(self, text: str, *, special: bool) -> list[int]:
        return [int(word) for word in text.split()]

    def piece(self, token: int, *, special: bool) -> bytes:
        return f"{token} ".encode()


class AsciiTokenizer(NumberTokenizer):
    """A text is its bytes.

    Other tokens can only be sampled: each has a text, but no text is encoded to it. Replies
    therefore come back as other tokens.
    """

    longest_bytes = len("<999>")

    def encode(self, text: str, *, special: bool) -> list[int]:
        return list(text.encode())

    def piece(self, token: int, *, special: bool) -> bytes:
        return bytes([token]) if token < 128 else f"<{token}>".encode()


@dataclass
class FakeSampler:
    sampling: SamplingParams
    token_mask: TokenMask | None = None

    def sample(self, state: bytes, /) -> Sampled:
        return Sampled(self.choose(state))

    def replay(self, reply: Seq[int]) -> None:
        if self.token_mask is not None:
            self.token_mask.replay(reply)

    def choose(self, state: bytes) -> int:
        """Choose a token that depends on the whole state, among the allowed ones."""
        seed = int.from_bytes(state[:4], "big")
        if self.token_mask is None:
            return seed % (VOCABULARY_SIZE - 10) + 10
        scores = np.random.default_rng(seed).standard_normal(VOCABULARY_SIZE).astype(np.float32)
        self.token_mask.mask(scores)
        token = int(scores.argmax())
        self.token_mask.accept(token)
        return token


Place = tuple[bool, KvType, int]  # of a sequence: whether it is exact, its KV type, its slot


def _place(sequence: Sequence) -> Place:
    return sequence.exact, sequence.kv_type, sequence.slot


def _cells(blob: Blob, size: int) -> list[bytes]:
    return [bytes(blob[at : at + size]) for at in range(0, len(blob), size)]


class FakeParking:
    """Counts parked tokens. The state itself does not move."""

    def __init__(self, sequences: FakeSequences, tokens: int) -> None:
        self.tokens = tokens
        self.used_tokens = 0
        self._sequences = sequences

    def park(self, sequence: Sequence) -> bool:
        assert not sequence.is_parked
        assert sequence.scattered_from is None
        assert sequence.length
        if self.used_tokens + sequence.length > self.tokens:
            return False
        self._sequences.cells(sequence).close(sequence.slot)
        self.used_tokens += sequence.length
        sequence.is_parked = True
        return True

    def leave(self, sequence: Sequence) -> None:
        self.used_tokens -= sequence.length
        sequence.is_parked = False


@dataclass
class FakeCounts:
    computed_tokens: int = 0
    restored_tokens: int = 0
    exported_tokens: int = 0
    scattered_exports: int = 0
    transcoded_tokens: int = 0
    steps: int = 0
    resets: int = 0
    releases: int = 0


class FakeSequences:
    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self.parking = FakeParking(self, engine.park_tokens) if engine.park_tokens else None
        self.empty()

    def empty(self) -> None:
        self._pools = {kv_type: Cells(self._engine.pool_tokens) for kv_type in CELLS_BYTES}
        self._states: dict[Place, list[bytes]] = {}
        self.going: dict[Place, bytes | None] = {}  # where state cannot be truncated: that of the
        # last token; None after a block without a checkpoint

    def free_tokens(self, kv_type: KvType | None = None) -> int:
        return self._pools[kv_type or self._engine.kv_type].free

    def freed_tokens(self, sequences: Seq[Sequence]) -> int:
        kv_types = {sequence.kv_type for sequence in sequences}
        assert len(kv_types) <= 1
        cells = self._pools[kv_types.pop() if kv_types else self._engine.kv_type]
        return cells.freed(sequence.slot for sequence in sequences)

    @property
    def open_sequences(self) -> int:
        return len(self._states)

    def open(self, *, exact: bool, kv_type: KvType | None = None) -> Sequence:
        assert not self._engine.in_flight
        kv_type = kv_type or self._engine.kv_type
        alike = (place for place in self._states if place[0] == exact)
        taken = [place for place in alike if exact or place[1] == kv_type]
        if len(taken) >= (
            self._engine.exact_sequences + 1 if exact else self._engine.max_sequences
        ):
            raise PoolFull("all sequences are open")
        if (
            exact
            and self._engine.exact_contexts is not None
            and len(taken) >= self._engine.exact_contexts
        ):
            raise NoMemory.for_exact_context(needed_bytes=1 << 30)
        if kv_type in self._engine.no_memory_for:
            raise NoMemory.for_kv_type(needed_bytes=1 << 30)
        slot = next(n for n in range(len(taken) + 1) if (exact, kv_type, n) not in self._states)
        self._states[exact, kv_type, slot] = []
        self.going[exact, kv_type, slot] = b"start"
        return Sequence(slot, exact=exact, kv_type=kv_type)

    def cells(self, sequence: Sequence) -> Cells:
        return self._pools[sequence.kv_type]

    def state(self, sequence: Sequence) -> list[bytes]:
        return self._states[_place(sequence)]

    def share(self, source: Sequence, tokens: int, into: Sequence) -> None:
        assert not self._engine.in_flight
        if into.length or source.exact or into.exact or source.kv_type != into.kv_type:
            raise ValueError("only shared sequences of one KV type share, and into an empty one")
        if tokens != source.length and not self._engine.can_truncate:
            raise ValueError("this state is shared whole or not at all")
        if source.is_parked and self.free_tokens() < source.length:
            raise PoolFull("no free cells for what is parked")
        self.state(into)[:] = self.state(source)[:tokens]
        self.going[_place(into)] = self.going[_place(source)]
        if self._engine.shares_cells and not source.is_parked:
            self._pools[into.kv_type].share(source.slot, tokens, into.slot)
        else:
            self._pools[into.kv_type].append(into.slot, tokens)
        into.length = tokens
        scattered = source.scattered_from is not None and source.scattered_from < tokens
        into.scattered_from = source.scattered_from if scattered else None

    def restore(self, into: Sequence, blob: Blob, tokens: int, *, resumable: bool = False) -> None:
        assert not self._engine.in_flight
        layout = self._engine.layout(into.kv_type)
        size = tokens * layout.token_bytes
        if len(blob) != size + resumable * layout.checkpoint_bytes:
            raise CorruptBlock("wrong length")
        blob, checkpoint = blob[:size], bytes(blob[size:])
        if self._engine.break_restores:
            self._engine.break_restores -= 1
            self.reset()
            raise EngineBroken("restore failed half-way")
        if resumable and int.from_bytes(checkpoint[-4:], "big") != into.length + tokens:
            self.reset()
            raise EngineBroken("a checkpoint is of another position")
        self.grow(into, tokens)
        self.state(into).extend(_cells(blob, layout.token_bytes))
        self.going[_place(into)] = checkpoint or None
        into.length += tokens
        self._engine.counts.restored_tokens += tokens

    def grow(self, sequence: Sequence, tokens: int) -> None:
        if not sequence.exact:
            if self._pools[sequence.kv_type].free < tokens:
                raise PoolFull("no free cells")
            self._pools[sequence.kv_type].append(sequence.slot, tokens)

    def allocate(self, size_bytes: int, /) -> memoryview:
        return plain_memory(size_bytes)

    def export(
        self, sequence: Sequence, start: int, stop: int, *, resumable: bool = False
    ) -> bytes:
        assert not self._engine.in_flight
        assert not sequence.is_parked
        self._engine.counts.scattered_exports += sequence.scattered_from is not None
        self._engine.counts.exported_tokens += stop - start
        cells = b"".join(self.state(sequence)[start:stop])
        if not resumable:
            return cells
        assert stop == sequence.length
        checkpoint = self.going[_place(sequence)]
        assert checkpoint is not None
        assert len(checkpoint) == CHECKPOINT_BYTES
        return cells + checkpoint

    def requantise(
        self, blob: Blob, tokens: int, source: KvType, target: KvType, *, resumable: bool = False
    ) -> bytes:
        if BITS[target] >= BITS[source]:
            raise ValueError("no fewer bits")
        size, kept = CELLS_BYTES[source], CELLS_BYTES[target]
        self._engine.counts.transcoded_tokens += tokens
        cells = b"".join(cell[:kept] for cell in _cells(blob[: tokens * size], size))
        return cells + bytes(blob[tokens * size :])

    def before(self, sequence: Sequence) -> bytes:
        """The state that the next token depends on. An empty sequence has a fixed start."""
        state = self.state(sequence)
        if not state:
            return b"start"
        going = b"" if self._engine.can_truncate else self.going[_place(sequence)]
        assert going is not None, "it was restored without a checkpoint"
        return state[-1] + going

    def truncate(self, sequence: Sequence, tokens: int) -> None:
        assert not self._engine.in_flight
        if tokens < sequence.length:
            assert self._engine.can_truncate or not tokens, "this state cannot be truncated"
            del self.state(sequence)[tokens:]
            if not sequence.exact:
                self._pools[sequence.kv_type].truncate(sequence.slot, tokens)
            sequence.length = tokens
            if sequence.scattered_from is not None and sequence.scattered_from >= tokens:
                sequence.scattered_from = None

    def reset(self) -> None:
        assert not self._engine.in_flight
        self._engine.counts.resets += 1
        self.empty()
        if self.parking:
            self.parking.used_tokens = 0

    def release_idle(self) -> None:
        self._engine.counts.releases += 1

    def close(self, sequence: Sequence) -> None:
        assert not self._engine.in_flight
        if sequence.is_parked and self.parking:
            self.parking.leave(sequence)
        del self._states[_place(sequence)]
        if not sequence.exact:
            self._pools[sequence.kv_type].close(sequence.slot)
        sequence.length = 0
        sequence.scattered_from = None


class FakePending(NamedTuple):
    work: Seq[Work]


@dataclass
class FakeEngine:
    """`break_steps` holds the numbers of steps that end in EngineBroken.

    `exact_contexts` is the number of exact sequences that fit into memory, and `no_memory_for`
    holds the KV types whose pool does not fit. A cell of a smaller KV type is the beginning of a
    cell of a larger type, and later state depends on which of them it was.
    """

    block_tokens: int = 8
    context_tokens: int = 512
    pool_tokens: int = 1024
    max_sequences: int = 12
    exact_sequences: int = 4
    batch_tokens: int = 128
    can_truncate: bool = True
    device: Literal["cpu", "gpu"] = "cpu"
    fingerprint: bytes = b"fake"
    chat_template: str | None = TEMPLATE
    break_steps: set[int] = field(default_factory=set)
    break_restores: int = 0
    exact_contexts: int | None = None
    sees: bool = False
    whole_pictures: bool = False
    shares_cells: bool = True
    kv_type: KvType = "fake"
    no_memory_for: set[KvType] = field(default_factory=set)
    state_files: StateFiles | None = None
    park_tokens: int = 0
    async_launch: bool = False
    can_be_exact: bool = True
    scatters: bool = False  # rows of steps with several sequences are not contiguous

    def __post_init__(self) -> None:
        self.in_flight = False
        self.counts = FakeCounts()
        self.projector = PlainProjector(VECTOR_WIDTH)
        self._spans: set[bytes] = set()  # the ids of all pictures
        self.tokenizer: Tokenizer = NumberTokenizer()
        self.sequences = FakeSequences(self)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            block_tokens=self.block_tokens,
            step_tokens=self.block_tokens * 2,
            context_tokens=self.context_tokens,
            can_be_exact=self.can_be_exact,
            batch_tokens=self.batch_tokens,
            pool_tokens=self.pool_tokens,
            sequences=self.max_sequences,
            exact_sequences=self.exact_sequences,
            can_truncate=self.can_truncate,
            device=self.device,
            kv_type=self.kv_type,
            kv={kv_type: self.layout(kv_type) for kv_type in CELLS_BYTES},
            modalities=frozenset({"text", "image"} if self.sees else {"text"}),
            whole_pictures=self.whole_pictures,
            shares_cells=self.shares_cells,
            async_launch=self.async_launch,
        )

    def layout(self, kv_type: KvType) -> KvLayout:
        return KvLayout(
            bits=BITS[kv_type],
            group_size=None if kv_type == "fake" else 1,
            token_bytes=CELLS_BYTES[kv_type],
            checkpoint_bytes=0 if self.can_truncate else CHECKPOINT_BYTES,
            fingerprint=self.fingerprint + kv_type.removeprefix("fake").encode(),
        )

    def sampler(
        self, sampling: SamplingParams, prompt: Seq[int], token_mask: TokenMask | None = None
    ) -> Sampler:
        return FakeSampler(sampling, token_mask)

    def launch(self, work: Seq[Work]) -> FakePending:
        """Nothing is computed before `collect`, so a test notices when a sequence is used in
        between."""
        assert not self.in_flight
        self.counts.steps += 1
        if self.counts.steps in self.break_steps:
            self.sequences.reset()
            raise EngineBroken("step failed")
        for kv_type in CELLS_BYTES:
            shared = [item for item in work if not item.sequence.exact]
            mine = [item for item in shared if item.sequence.kv_type == kv_type]
            rows = sum(len(item.tokens) for item in mine)
            if rows > self.sequences.free_tokens(kv_type):
                raise PoolFull("no free cells")
            assert rows <= self.batch_tokens
        self.in_flight = True
        return FakePending(work)

    def launch_next(self, pending: Pending, tokens: Seq[int]) -> Pending:
        items = zip(pending.work, tokens, strict=True)
        return self.launch([item._replace(tokens=[token]) for item, token in items])

    def collect(self, pending: Pending) -> list[Sampled | None]:
        assert self.in_flight
        self.in_flight = False
        work = pending.work
        for item in work if self.scatters and len(work) > 1 else ():
            sequence = item.sequence
            if len(item.tokens) == 1 and sequence.scattered_from is None and not sequence.exact:
                sequence.scattered_from = sequence.length
        return [self._compute(item) for item in work]

    def _compute(self, item: Work) -> Sampled | None:
        self.sequences.grow(item.sequence, len(item.tokens))
        state = self.sequences.state(item.sequence)
        for row in self._rows(item):
            before = self.sequences.before(item.sequence) + row
            cell = hashlib.blake2b(before, digest_size=CELL_BYTES).digest()
            state.append(cell[: CELLS_BYTES[item.sequence.kv_type]])
            going = hashlib.blake2b(b"going" + before, digest_size=CHECKPOINT_BYTES - 4).digest()
            position = len(state).to_bytes(4, "big")
            self.sequences.going[_place(item.sequence)] = going + position
        item.sequence.length += len(item.tokens)
        self.counts.computed_tokens += len(item.tokens)
        if item.sampler is None:
            return None
        return item.sampler.sample(state[-1])

    def _rows(self, item: Work) -> list[bytes]:
        """What each token adds to the state: its id, or the vector of a picture."""
        if item.vectors is None:
            assert all(token < MEDIA_BIT for token in item.tokens)
            return [token.to_bytes(4, "big") for token in item.tokens]
        if item.vectors.shape != (len(item.tokens), VECTOR_WIDTH):
            raise ValueError("these are not the vectors of this picture")
        assert not self.whole_pictures or pack(item.tokens) in self._spans
        return [row.tobytes() for row in item.vectors]

    def picture_tokens(self, width: int, height: int, digest: bytes) -> Tokens:
        if not self.sees:
            raise Unsupported("this engine sees no pictures")
        tokens = self.projector.tokens(width, height, digest)
        self._spans |= {span.ids() for span in tokens.media}
        return tokens

    def encode_picture(self, picture: Picture) -> list[Matrix]:
        if not self.sees:
            raise Unsupported("this engine sees no pictures")
        return self.projector.encode(picture)

    @property
    def open_sequences(self) -> int:
        return self.sequences.open_sequences

    def close(self) -> None:
        self.sequences.empty()
