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


def nothing_meanwhile() -> None:
    """What an engine does while its device computes, unless it is told otherwise."""


#: Whether replies have another step at once, with what the last one brought, which then is taken.
GoOn = Callable[["list[Sampled | None]"], bool]


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
    computes_beside: bool = False  # a step's work goes on by itself once it is begun
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
    """Memory of the engine's device outside the pools: what lies there slows no step down, and is
    back in a pool as fast as the device copies."""

    tokens: int  # that it has room for

    def park(self, sequence: Sequence) -> bool:
        """Take a shared sequence of the usual KV type out of its pool. From then on it can be
        shared, which copies all of it, and closed. False: there is no memory for it."""


class Engine(Protocol):
    """A loaded model. `free_tokens`, `freed_tokens`, `allocate`, `export`, `transcode` and the
    attributes change nothing; other calls do.

    Sequences of one KV type share a pool of cells; the pool of a type other than the usual one is
    made when it is first needed and given back when it is idle.

    Any call may raise EngineBroken: the native memory was undefined, has been rebuilt, and every
    sequence is gone. Callers drop their handles and start again from tokens.
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
        """None where no other program reads and writes this engine's state."""

    #: Where steps go on by themselves: called in each as soon as its work is begun, for what can be
    #: done until it ends. No sequence of the step may be touched then.
    meanwhile: Callable[[], None]

    @property
    def parking(self) -> Parking | None:
        """None where all sequences stay in their pools."""

    def free_tokens(self, kv_type: KvType | None = None) -> int:
        """Cells of a type's pool that no sequence holds, or will when it is made; None: of the
        usual type."""

    def freed_tokens(self, sequences: Seq[Sequence]) -> int:
        """Cells that closing all these sequences, which are of one KV type, would free."""

    def open(self, *, exact: bool, kv_type: KvType | None = None) -> Sequence:
        """An empty sequence of the usual KV type or another; raises PoolFull when none is left,
        NoMemory when an exact one, or the pool of another type, cannot have the memory it needs.
        One exact sequence more than compute may be open, to be given what another one holds."""

    def share(self, source: Sequence, tokens: int, into: Sequence) -> None:
        """Give the empty `into` the first `tokens` of `source`, without copying unless that is
        parked; all of them where state cannot be truncated, and whole pictures. Raises PoolFull
        where a parked one does not fit, of which all is copied first."""

    def restore(self, into: Sequence, blob: Blob, tokens: int, *, resumable: bool = False) -> None:
        """Append a block of the sequence's KV type; raises PoolFull, or CorruptBlock when it cannot
        be one of ours. Where state cannot be truncated, the sequence is of use only after a block
        with a checkpoint."""

    def allocate(self, size_bytes: int, /) -> memoryview:
        """Memory for a block that is to be restored, from where that is fastest. Any thread."""

    def export(self, sequence: Sequence, start: int, stop: int, *, resumable: bool = False) -> Blob:
        """The state of positions [start, stop) as one block; `resumable` adds a checkpoint, which
        exists for the sequence's end alone."""

    def transcode(
        self, blob: Blob, tokens: int, source: KvType, target: KvType, *, resumable: bool = False
    ) -> bytes:
        """A block of one KV type as a block of another with fewer bits; a function of its bytes
        alone, whatever block they are divided into."""

    def sampler(
        self, sampling: SamplingParams, prompt: Seq[int], token_mask: TokenMask | None = None
    ) -> Sampler:
        """`prompt` are the ids of its text, without those of pictures."""

    def step(self, work: Seq[Work], go_on: GoOn | None = None) -> list[Sampled | None]:
        """Do all the work, or none of it and raise PoolFull; one result for each piece. With
        `go_on`, which is for single tokens of shared sequences with a sampler each, an engine may
        ask it after a step, and compute the tokens that it brought; the last step's results are
        returned, and what the others brought is part of the sequences. PoolFull then is of the step
        under way alone."""

    def truncate(self, sequence: Sequence, tokens: int) -> None:
        """Forget everything after the first `tokens`; only `tokens` 0 where state cannot be cut. A
        sequence that is not exact is not cut inside a picture."""

    def picture_tokens(self, width: int, height: int, digest: bytes) -> Tokens:
        """What a picture takes: its vectors' tokens, and those that the model has around them. Any
        thread; raises Unsupported without the modality "image"."""

    def encode_picture(self, picture: Picture) -> list[Matrix]:
        """The vectors of each picture span of its tokens, with whatever else the engine wants to
        know of each row when it is computed; raises Unsupported likewise."""

    def reset(self) -> None:
        """Forget every sequence and start with an empty memory."""

    def release_idle(self) -> None:
        """Give back what is kept for sequences to come and was not used since the last call."""

    def close_sequence(self, sequence: Sequence) -> None: ...

    def close(self) -> None: ...


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
