"""The engine seam: all that the runtime knows of whatever computes tokens.

An engine sees tokens and KV state, never messages, cache tiers or requests. One thread calls it;
its tokenizer may be called from any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from rekindle.protocol.media import IMAGE, Picture
from rekindle.protocol.requests import SamplingParams
from rekindle.tokens import Tokenizer, Tokens

# ----------------------------------------------------------------------
# Files that other programs exchange state in, as the runtime knows them.

Blob = bytes | bytearray | memoryview  # the state of a block, as bytes


class StateWriter(Protocol):
    """A file in the making."""

    def append(self, blob: Blob, tokens: int, *, resumable: bool = False) -> None:
        """The next block; the last one is resumable where state cannot be truncated. Raises
        CorruptBlock."""

    def save(self, path: Path, tokens: Seq[int]) -> None:
        """Write the state of these tokens, which are all that was appended, or, where state can be
        truncated, the first of them."""


class ReadState(Protocol):
    """The state in a file, and the tokens it is of."""

    @property
    def tokens(self) -> list[int]: ...

    def export(self, start: int, stop: int, *, resumable: bool = False) -> bytes:
        """A block of it; `resumable` at its end alone. Raises NoMemory."""


class StateFiles(Protocol):
    """Files that other programs exchange state of the usual KV type in."""

    @property
    def suffix(self) -> str:
        """How their names end."""

    def writer(self) -> StateWriter: ...

    def read(self, path: Path) -> ReadState:
        """Raises BadRequest for what is not state of this model."""


KvType = str  # the type of KV cells, as the engine calls it: "f16", "q8_0"
Matrix = np.ndarray[Any, np.dtype[np.float32]]
Row = np.ndarray[Any, np.dtype[np.float32]]  # a logit for each token of the vocabulary
OnProgress = Callable[[float], None]  # the loaded fraction of a model


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How to load a model; None lets the engine choose."""

    path: Path
    mmproj: Path | None = None  # the model's projector, which encodes pictures
    adapter: Path | None = None  # what was trained on top of the model's weights (LoRA)
    parallel: int = 16
    context_tokens: int | None = None
    kv_fraction: float = 0.3  # of the free memory, for the KV pool
    park_fraction: float | None = None  # and for idle sequences outside it
    host_bytes: int = 0  # of RAM that blocks take, which may be page-locked
    threads: int = 4
    gpu_layers: int | None = None
    kv_type: KvType = "f16"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """State of one KV type: what it takes, and which other state it can be exchanged with."""

    bits: int  # of a value in a cell
    group_size: int | None = None  # values that share a scale; None: each stands for itself
    header_bytes: int = 0  # what a block has beside the state of its tokens
    token_bytes: int  # state that one token adds to a block
    checkpoint_bytes: int  # what a checkpoint adds at most; 0 where state can be truncated
    fingerprint: bytes  # states are interchangeable only between equal fingerprints

    def cells_bytes(self, tokens: int) -> int:
        """What a block takes without the checkpoint that may be behind it."""
        return self.header_bytes + tokens * self.token_bytes


@dataclass(frozen=True, slots=True)
class Device:
    """What computes, beside the CPU."""

    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What an engine can do with its loaded model."""

    block_tokens: int  # tokens of a full block
    step_tokens: int  # canonical prefill step of exact sequences, a multiple of block_tokens
    context_tokens: int  # the longest sequence
    batch_tokens: int  # the most rows of one step
    pool_tokens: int  # KV cells that all shared sequences of the usual type have together
    sequences: int  # how many shared sequences of one KV type may be open at once
    exact_sequences: int  # how many exact ones, of all types, that compute
    can_truncate: bool  # state can be cut and shared at any position, not at checkpoints alone
    device: Literal["cpu", "gpu"]
    kv_type: KvType  # the one that sequences have unless another is asked for
    kv: Mapping[KvType, KvLayout]  # every type that they may have
    modalities: frozenset[str] = frozenset({"text"})
    whole_pictures: bool = False  # all vectors of a picture are computed in one step
    architecture: str = ""  # of the model, for people
    parameters: int = 0
    quantization: str = ""  # of its weights, as its format calls it
    shares_cells: bool = True  # what sequences share takes cells once; else each has its own
    idle_is_free: bool = False  # sequences that nobody adds to slow no step down
    async_launch: bool = False  # `launch` returns while the device computes
    gpus: tuple[Device, ...] = ()  # for people, as are the layers that lie there
    layers: int = 0
    gpu_layers: int = 0

    @property
    def sees(self) -> bool:
        """Whether prompts may hold pictures."""
        return IMAGE in self.modalities

    @property
    def kv_layout(self) -> KvLayout:
        """The layout of the usual KV type."""
        return self.kv[self.kv_type]


class Sequence:
    """One run of tokens in the engine's memory. `length` is what has been computed or restored."""

    __slots__ = ("exact", "is_parked", "kv_type", "length", "scattered_from", "slot")

    def __init__(self, slot: int, *, exact: bool, kv_type: KvType) -> None:
        self.slot = slot
        self.exact = exact
        self.kv_type = kv_type
        self.length = 0
        self.is_parked = False  # its state lies outside the pool
        #: From this token on its cells lie apart: moving them takes longer than computing them.
        self.scattered_from: int | None = None


class TokenMask(Protocol):
    """Which tokens may come next in one reply."""

    @property
    def trouble(self) -> str | None:
        """Why the mask could not be applied up to the end of the reply."""

    def replay(self, tokens: Seq[int]) -> None:
        """Begin again with a reply that has got this far."""

    def mask(self, logits: Any) -> None:
        """Set what may not come next to minus infinity, in place."""

    def accept(self, token: int) -> None:
        """Advance by the token that was chosen."""


class Sampled(NamedTuple):
    """One chosen token, with log probabilities when they were asked for."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sampler(Protocol):
    """The state behind one reply's choices: seed, penalties, bias, mask."""

    def sample(self, row: Any, /) -> Sampled:
        """Choose from a row of logits in the form of its engine; the row is used up."""

    def replay(self, reply: Seq[int]) -> None:
        """Go on behind a reply that has got this far, whatever was chosen since."""


class Work(NamedTuple):
    """Tokens to append to a sequence; with a sampler, the token after them is chosen.

    They are all text, or all of one picture; then `vectors` has a row for each of them.
    """

    sequence: Sequence
    tokens: Seq[int]
    sampler: Sampler | None
    vectors: Matrix | None = None


class Parking(Protocol):
    """Device memory outside the KV pools. Parked sequences do not slow any step down, and are
    copied back into a pool at the speed of the device's memory."""

    tokens: int  # capacity

    def park(self, sequence: Sequence) -> bool:
        """Move a shared sequence of the default KV type out of its pool. Afterwards it can only be
        shared, which copies all of it, or closed. Returns False if the memory is full."""


class Sequences(Protocol):
    """The sequences in an engine's memory.

    Shared sequences of one KV type live in one pool of cells. The pool of a type other than the
    default one is built when it is first needed and freed when it is idle.
    """

    @property
    def parking(self) -> Parking | None:
        """None if every sequence stays in its pool."""

    def free_tokens(self, kv_type: KvType | None = None) -> int:
        """Free cells in the pool of a KV type, the default one if None."""

    def freed_tokens(self, sequences: Seq[Sequence]) -> int:
        """Number of cells that closing all of these sequences of one KV type would free."""

    def open(self, *, exact: bool, kv_type: KvType | None = None) -> Sequence:
        """Open an empty sequence. Raises PoolFull if all are open, and NoMemory if there is no
        memory for an exact sequence or for the pool of another KV type. One exact sequence more
        than may compute can be open, as the target of a requantisation."""

    def share(self, source: Sequence, tokens: int, into: Sequence) -> None:
        """Give the empty `into` the first `tokens` of `source`. Nothing is copied unless `source`
        is parked. If state cannot be truncated, only whole sequences can be shared, and an image
        is always shared whole. Raises PoolFull if a parked source does not fit."""

    def truncate(self, sequence: Sequence, tokens: int) -> None:
        """Drop everything after the first `tokens`. If state cannot be truncated, `tokens` has to
        be 0. A shared sequence cannot be cut inside an image."""

    def export(self, sequence: Sequence, start: int, stop: int, *, resumable: bool = False) -> Blob:
        """Return the state of positions [start, stop) as one block. `resumable` adds a checkpoint,
        which exists only at the end of the sequence."""

    def restore(self, into: Sequence, blob: Blob, tokens: int, *, resumable: bool = False) -> None:
        """Append a block. Raises PoolFull, or CorruptBlock for bytes that cannot be a block. If
        state cannot be truncated, the sequence is usable only after a block with a checkpoint."""

    def allocate(self, size_bytes: int, /) -> memoryview:
        """Allocate memory from which a block can be restored fastest. Callable from any thread."""

    def requantise(
        self, blob: Blob, tokens: int, source: KvType, target: KvType, *, resumable: bool = False
    ) -> bytes:
        """Convert a block to a KV type with fewer bits. The result depends only on the bytes, not
        on how the state was divided into blocks."""

    def release_idle(self) -> None:
        """Free memory that is reserved for future sequences and was unused since the last call."""

    def reset(self) -> None:
        """Drop every sequence and start with empty memory."""

    def close(self, sequence: Sequence) -> None: ...


class Pending(Protocol):
    """A launched step. Only the engine that launched it looks inside."""

    @property
    def work(self) -> Seq[Work]: ...


class Engine(Protocol):
    """A loaded model.

    Any call, here or on `sequences`, may raise EngineBroken: native memory became undefined and has
    been rebuilt, and every sequence is gone. The caller drops its handles and starts again from
    tokens.
    """

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def chat_template(self) -> str | None:
        """The model's own Jinja template."""

    @property
    def state_files(self) -> StateFiles | None:
        """None if no other program reads and writes this engine's state."""

    @property
    def sequences(self) -> Sequences: ...

    def sampler(
        self, sampling: SamplingParams, prompt: Seq[int], token_mask: TokenMask | None = None
    ) -> Sampler:
        """Build the sampler of one reply. `prompt` has the ids of the prompt's text."""

    def launch(self, work: Seq[Work]) -> Pending:
        """Start a step, or raise PoolFull and change nothing.

        With `async_launch` this returns while the device computes. Until `collect`, the caller must
        not touch the sequences of the step. Steps on different sequences may be in flight together.
        """

    def launch_next(self, pending: Pending, tokens: Seq[int]) -> Pending:
        """Start the next decode step of a collected step that had one token and a sampler for each
        shared sequence. Does the same as `launch`, with less work for each token."""

    def collect(self, pending: Pending) -> list[Sampled | None]:
        """Wait for a step and sample. Returns one result for each item of its work: None if the
        item has no sampler."""

    def picture_tokens(self, width: int, height: int, digest: bytes) -> Tokens:
        """Return the tokens of an image: one for each of its vectors, and those that the model has
        around them. Callable from any thread. Raises Unsupported if the model takes no images."""

    def encode_picture(self, picture: Picture) -> list[Matrix]:
        """Return the vectors of each image span of its tokens. Raises Unsupported if the model
        takes no images."""

    def close(self) -> None: ...


def run_step(engine: Engine, work: Seq[Work]) -> list[Sampled | None]:
    """Launch a step and wait for it."""
    return engine.collect(engine.launch(work))


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedderInfo:
    """What a model that makes vectors is like."""

    context_tokens: int  # the longest input
    batch_tokens: int  # that a call should have, for speed: the caller decides between two calls
    dimensions: int  # of a vector
    ranks: bool = False  # it scores pairs of texts, and makes no vectors


class Embedder(Protocol):
    """A model loaded to make vectors of texts, or to score pairs of them. It has no sequences and
    keeps nothing between two calls, of which any may raise EngineBroken."""

    @property
    def info(self) -> EmbedderInfo: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    def embed(self, inputs: Seq[Seq[int]]) -> Matrix:
        """A row of length one for each input; any number of inputs, in any order of lengths."""

    def rank(self, pairs: Seq[Seq[int]]) -> list[float]:
        """For each pair, from 0 to 1, how well its document answers its query."""

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """The tokens of an input, with those that the model wants around it; any thread."""

    def pair(self, query: str, document: str) -> list[int]:
        """A query and a document as the tokens of one input; any thread."""

    def close(self) -> None: ...
