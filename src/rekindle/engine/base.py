"""Defines the interface between the runtime and an engine, which computes tokens.

An engine sees tokens and KV state, never messages, cache tiers or requests. One thread calls it.
Its tokenizer may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from rekindle.protocol.requests import IMAGE, Picture, SamplingParams
from rekindle.tokens import Tokenizer, Tokens

Blob = bytes | bytearray | memoryview  # the state of a block, as bytes


class StateWriter(Protocol):
    """Collects blocks for a state file."""

    def append(self, blob: Blob, tokens: int, *, resumable: bool = False) -> None:
        """Append a block. The last one has to be resumable if state cannot be truncated. Raises
        CorruptBlock."""

    def save(self, path: Path, tokens: Seq[int]) -> None:
        """Write the state of these tokens: all that was appended, or fewer if state can be
        truncated."""


class ReadState(Protocol):
    """The state in a file, with its tokens."""

    @property
    def tokens(self) -> list[int]: ...

    def export(self, start: int, stop: int, *, resumable: bool = False) -> bytes:
        """Export a block; `resumable` only at the end. Raises NoMemory."""


class StateFiles(Protocol):
    """Files in which other programs exchange state of the default KV type."""

    @property
    def suffix(self) -> str:
        """File name extension."""

    def writer(self) -> StateWriter: ...

    def read(self, path: Path) -> ReadState:
        """Open a file; raises BadRequest if it is not state of this model."""


KvType = str  # the type of KV cells in the words of the engine: "f16", "q8_0"
Matrix = np.ndarray[Any, np.dtype[np.float32]]
Row = np.ndarray[Any, np.dtype[np.float32]]  # a logit for each token of the vocabulary
OnProgress = Callable[[float], None]  # the loaded fraction of a model


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How to load a model. None lets the engine choose."""

    path: Path
    mmproj: Path | None = None  # projector, which encodes images
    adapter: Path | None = None  # LoRA adapter
    parallel: int = 16
    context_tokens: int | None = None
    kv_fraction: float = 0.3  # fraction of the free memory for the KV pool
    memory_bytes: int | None = None  # the free memory counts as this much at most
    park_fraction: float | None = None  # fraction for parked sequences
    host_bytes: int = 0  # RAM for blocks, which may be page-locked
    threads: int = 4
    gpu_layers: int | None = None
    gpus: tuple[int, ...] = ()  # their numbers; none: all of them
    gpu_shares: tuple[float, ...] = ()  # of the layers, for each GPU; none: by free memory
    kv_type: KvType = "f16"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """Sizes and fingerprint of state of one KV type."""

    bits: int  # of a value in a cell
    group_size: int | None = None  # values that share a scale; None: not quantised
    header_bytes: int = 0  # fixed part of a block
    token_bytes: int  # state that one token adds to a block
    checkpoint_bytes: int  # largest checkpoint; 0 if state can be truncated
    fingerprint: bytes  # states are interchangeable only between equal fingerprints

    def cells_bytes(self, tokens: int) -> int:
        """Size of a block without a checkpoint."""
        return self.header_bytes + tokens * self.token_bytes


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU."""

    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What an engine can do with its loaded model."""

    block_tokens: int  # tokens of a full block
    step_tokens: int  # canonical prefill step of exact sequences, a multiple of block_tokens
    context_tokens: int  # longest sequence
    batch_tokens: int  # largest number of rows in a step
    pool_tokens: int  # KV cells of the pool of the default type
    sequences: int  # shared sequences of one KV type that may be open
    exact_sequences: int  # exact sequences, of all types, that may compute
    can_truncate: bool  # state can be cut at any position, not only at checkpoints
    can_be_exact: bool = True  # exact sequences compute the same bits whenever they compute
    device: Literal["cpu", "gpu"]
    kv_type: KvType  # default
    kv: Mapping[KvType, KvLayout]  # all supported types
    modalities: frozenset[str] = frozenset({"text"})
    whole_pictures: bool = False  # all vectors of an image are computed in one step
    architecture: str = ""  # shown to users, like the fields below
    parameters: int = 0
    quantization: str = ""  # of the weights
    shares_cells: bool = True  # a shared prefix takes cells only once
    idle_is_free: bool = False  # idle sequences do not slow down steps
    async_launch: bool = False  # `launch` returns while the device computes
    gpus: tuple[Device, ...] = ()
    layers: int = 0
    gpu_layers: int = 0

    @property
    def sees(self) -> bool:
        """Whether prompts may contain images."""
        return IMAGE in self.modalities

    @property
    def kv_layout(self) -> KvLayout:
        """The layout of the default KV type."""
        return self.kv[self.kv_type]


@dataclass(slots=True, eq=False)
class Sequence:
    """A run of tokens in the engine's memory."""

    slot: int
    _: KW_ONLY
    exact: bool
    kv_type: KvType
    length: int = 0  # computed and restored tokens
    is_parked: bool = False  # its state is outside the pool
    #: From this token on cells are fragmented. Moving them is slower than computing them.
    scattered_from: int | None = None


class TokenMask(Protocol):
    """Constrains the next tokens of one reply."""

    @property
    def trouble(self) -> str | None:
        """Why the mask could not be applied up to the end of the reply."""

    def replay(self, tokens: Seq[int]) -> None:
        """Start again with a reply that has these tokens."""

    def mask(self, logits: Any) -> None:
        """Set the logits of forbidden tokens to minus infinity, in place."""

    def accept(self, token: int) -> None:
        """Advance by the chosen token."""


class Sampled(NamedTuple):
    """A chosen token, with log probabilities if the request asks for them."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sampler(Protocol):
    """The sampling state of one reply: seed, penalties, bias, mask."""

    def sample(self, row: Any, /) -> Sampled:
        """Choose a token from a row of logits, which is overwritten."""

    def replay(self, reply: Seq[int]) -> None:
        """Continue after this reply, and forget the tokens that were chosen since."""


class Work(NamedTuple):
    """Tokens to append to a sequence. With a sampler, the next token is chosen.

    The tokens are all text, or all of one image. Then `vectors` has a row for each of them.
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
        not touch the sequences of the step. Steps in different KV pools may be in flight together,
        because each `Pending` keeps what its own step needs.
        """

    def launch_next(self, pending: Pending, tokens: Seq[int]) -> Pending:
        """Start the next decode step of a collected step that had one token and a sampler for each
        shared sequence. Does the same as `launch`, with less work for each token."""

    def collect(self, pending: Pending) -> list[Sampled | None]:
        """Wait for a step and sample. Returns one result for each item of its work: None if the
        item has no sampler."""

    def picture_tokens(self, width: int, height: int, digest: bytes) -> Tokens:
        """Return the tokens of an image: one for each of its vectors, and the tokens that the model
        has around them. Callable from any thread. Raises Unsupported if the model takes no images.
        """

    def encode_picture(self, picture: Picture) -> list[Matrix]:
        """Return the vectors of each image span. Raises Unsupported like `picture_tokens`."""

    def close(self) -> None: ...


def run_step(engine: Engine, work: Seq[Work]) -> list[Sampled | None]:
    """Launch a step and wait for it."""
    return engine.collect(engine.launch(work))


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedderInfo:
    """Describes a model for embeddings or reranking."""

    context_tokens: int  # longest input
    batch_tokens: int  # good size of a call
    dimensions: int  # of a vector
    ranks: bool = False  # it scores pairs of texts instead of embedding
    normalises: bool = True  # vectors have length one


class Embedder(Protocol):
    """A model that embeds texts, or scores pairs of them. It keeps nothing between calls. Any call
    may raise EngineBroken."""

    @property
    def info(self) -> EmbedderInfo: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    def embed(self, inputs: Seq[Seq[int]]) -> Matrix:
        """Return a row for each input. Inputs may have any order and number."""

    def rank(self, pairs: Seq[Seq[int]]) -> list[float]:
        """Score from 0 to 1 how well each document answers its query."""

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Tokenize an input, with the tokens that go around it. Callable from any thread."""

    def pair(self, query: str, document: str) -> list[int]:
        """Tokenize a query and a document as one input. Callable from any thread."""

    def close(self) -> None: ...
