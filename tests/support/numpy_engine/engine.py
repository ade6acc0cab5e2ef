"""Implements the engine protocol with the NumPy transformer.

A block holds the KV rows of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3

from rekindle.engine.base import (
    Blob,
    Capabilities,
    EngineOptions,
    KvLayout,
    KvType,
    Matrix,
    OnProgress,
    Pending,
    Sampled,
    Sampler,
    Sequence,
    TokenMask,
    Work,
)
from rekindle.engine.cells import Cells
from rekindle.engine.sampling.sampler import TokenSampler
from rekindle.errors import CorruptBlock, ModelError, PoolFull
from rekindle.memory import plain_memory
from rekindle.protocol.requests import Picture, SamplingParams
from rekindle.tokens import Tokens
from tests.support.numpy_engine.model import FORMAT, WIDTH, Array, ModelFile, TinyTransformer
from tests.support.numpy_engine.tokenizer import TEMPLATE, ByteTokenizer
from tests.support.pictures import PlainProjector

BLOCK_TOKENS = STEP_TOKENS = 64
BATCH_TOKENS = 128  # beside one row for each turn that decodes
KV_TYPE, SMALL_KV_TYPE = "f32", "i8"
KV_TYPE_BYTES: dict[KvType, int] = {KV_TYPE: 4, SMALL_KV_TYPE: 1}  # of a value
SCALE = np.float32(32)  # of 8-bit cells: what is kept is kept again without a change

Place = tuple[bool, KvType, int]  # of a sequence: whether it is exact, its KV type, its slot


def _kept(values: Array) -> Array:
    """Round values as the 8-bit KV type does."""
    return np.asarray(np.clip(np.round(values * SCALE), -127, 127) / SCALE, np.float32)


def _place(sequence: Sequence) -> Place:
    return sequence.exact, sequence.kv_type, sequence.slot


class NumpySequences:
    parking = None
    allocate = staticmethod(plain_memory)

    def __init__(self, capabilities: Capabilities, row_shape: tuple[int, ...]) -> None:
        self._capabilities = capabilities
        self._row_shape = row_shape
        self._pools = {kv_type: Cells(capabilities.pool_tokens) for kv_type in KV_TYPE_BYTES}
        self._rows: dict[Place, Array] = {}

    def _empty(self, tokens: int = 0) -> Array:
        return np.empty((tokens, *self._row_shape), np.float32)

    def free_tokens(self, kv_type: KvType | None = None) -> int:
        return self._pools[kv_type or KV_TYPE].free

    def freed_tokens(self, sequences: Seq[Sequence]) -> int:
        cells = self._pools[sequences[0].kv_type if sequences else KV_TYPE]
        return cells.freed(sequence.slot for sequence in sequences)

    def open(self, *, exact: bool, kv_type: KvType | None = None) -> Sequence:
        known, kv_type = self._capabilities, kv_type or KV_TYPE
        most = known.exact_sequences + 1 if exact else known.sequences
        alike = [place for place in self._rows if place[0] == exact]
        if len([place for place in alike if exact or place[1] == kv_type]) >= most:
            raise PoolFull("all sequences are open")
        slot = next(n for n in range(most) if (exact, kv_type, n) not in self._rows)
        self._rows[exact, kv_type, slot] = self._empty()
        return Sequence(slot, exact=exact, kv_type=kv_type)

    def release_idle(self) -> None: ...

    def close(self, sequence: Sequence) -> None:
        del self._rows[_place(sequence)]
        if not sequence.exact:
            self._pools[sequence.kv_type].close(sequence.slot)
        sequence.length = 0

    def share(self, source: Sequence, tokens: int, into: Sequence) -> None:
        if into.length or source.exact or into.exact or source.kv_type != into.kv_type:
            raise ValueError("only shared sequences of one KV type share, and into an empty one")
        self._rows[_place(into)] = self._held(source)[:tokens].copy()
        self._pools[into.kv_type].share(source.slot, tokens, into.slot)
        into.length = tokens

    def truncate(self, sequence: Sequence, tokens: int) -> None:
        if tokens < sequence.length:
            if not sequence.exact:
                self._pools[sequence.kv_type].truncate(sequence.slot, tokens)
            sequence.length = tokens

    def export(
        self, sequence: Sequence, start: int, stop: int, *, resumable: bool = False
    ) -> bytes:
        assert not resumable, "state can be truncated, so there are no checkpoints"
        return self._packed(self._held(sequence)[start:stop], sequence.kv_type)

    def _packed(self, rows: Array, kv_type: KvType) -> bytes:
        return (rows if kv_type == KV_TYPE else np.round(rows * SCALE).astype(np.int8)).tobytes()

    def _unpacked(self, blob: Blob, tokens: int, kv_type: KvType) -> Array:
        if len(blob) != tokens * self._capabilities.kv[kv_type].token_bytes:
            raise CorruptBlock(f"a block of {tokens} tokens cannot have {len(blob)} bytes")
        if kv_type == KV_TYPE:
            rows = np.frombuffer(blob, np.float32)
        else:
            rows = np.frombuffer(blob, np.int8).astype(np.float32) / SCALE
        return rows.reshape(tokens, *self._row_shape)

    def requantise(
        self, blob: Blob, tokens: int, source: KvType, target: KvType, *, resumable: bool = False
    ) -> bytes:
        if (source, target) != (KV_TYPE, SMALL_KV_TYPE):
            raise ValueError("no fewer bits")
        return self._packed(_kept(self._unpacked(blob, tokens, source)), target)

    def restore(self, into: Sequence, blob: Blob, tokens: int, *, resumable: bool = False) -> None:
        restored = self._unpacked(blob, tokens, into.kv_type)
        if not into.exact and self._pools[into.kv_type].free < tokens:
            raise PoolFull("no free cells for this block")
        self.grow(into, tokens)[into.length - tokens :] = restored

    def _held(self, sequence: Sequence) -> Array:
        return self._rows[_place(sequence)][: sequence.length]

    def grow(self, sequence: Sequence, tokens: int) -> Array:
        """The rows of the sequence with this many more at the end, not yet set."""
        held, stop = self._held(sequence), sequence.length + tokens
        if stop > len(self._rows[_place(sequence)]):
            wider = self._empty(2 * stop)
            wider[: sequence.length] = held
            self._rows[_place(sequence)] = wider
        if not sequence.exact:
            self._pools[sequence.kv_type].append(sequence.slot, tokens)
        sequence.length = stop
        return self._held(sequence)

    def reset(self) -> None:
        self._rows.clear()
        for cells in self._pools.values():
            cells.clear()


class NumpyPending(NamedTuple):
    work: Seq[Work]


class NumpyEngine:
    state_files = None

    def __init__(
        self, options: EngineOptions, on_progress: OnProgress = lambda _done: None
    ) -> None:
        if options.kv_type != "f16":
            raise ModelError(f"this engine has {KV_TYPE} KV cells; leave --fp8-kvcache out")
        file = ModelFile.read(options.path)
        self.tokenizer = ByteTokenizer()
        self.chat_template = TEMPLATE
        self._model = TinyTransformer(file, self.tokenizer.size)
        self._projector = PlainProjector(WIDTH)
        self.capabilities = self._describe(options)
        self.sequences = NumpySequences(self.capabilities, self._model.row_shape)
        #: Called with the raw logits behind every choice; how tests compare runs bit by bit.
        self.observe: Callable[[Sequence, np.ndarray[Any, Any]], None] | None = None
        on_progress(1.0)

    def _describe(self, options: EngineOptions) -> Capabilities:
        context = options.context_tokens or self._model.context_tokens
        weights = options.path.read_bytes()
        values = int(np.prod(self._model.row_shape))
        layouts = {
            kv_type: KvLayout(
                bits=8 * size_bytes,
                group_size=None if kv_type == KV_TYPE else values,
                token_bytes=size_bytes * values,
                checkpoint_bytes=0,
                fingerprint=blake3(f"{FORMAT} {kv_type}".encode() + weights).digest(),
            )
            for kv_type, size_bytes in KV_TYPE_BYTES.items()
        }
        return Capabilities(
            block_tokens=BLOCK_TOKENS,
            step_tokens=STEP_TOKENS,
            context_tokens=context,
            batch_tokens=BATCH_TOKENS + options.parallel,
            pool_tokens=2 * context,
            sequences=2 * options.parallel,
            exact_sequences=options.parallel,
            can_truncate=True,
            device="cpu",
            kv_type=KV_TYPE,
            kv=layouts,
            modalities=frozenset({"text", "image"}),
        )

    def sampler(
        self, sampling: SamplingParams, prompt: Seq[int], token_mask: TokenMask | None = None
    ) -> Sampler:
        return TokenSampler(sampling, prompt, token_mask)

    def launch(self, work: Seq[Work]) -> NumpyPending:
        shared = [item for item in work if not item.sequence.exact]
        for kv_type in KV_TYPE_BYTES:
            mine = [item for item in shared if item.sequence.kv_type == kv_type]
            if sum(len(item.tokens) for item in mine) > self.sequences.free_tokens(kv_type):
                raise PoolFull("no free cells for this step")
        return NumpyPending(work)

    def launch_next(self, pending: Pending, tokens: Seq[int]) -> NumpyPending:
        items = zip(pending.work, tokens, strict=True)
        return self.launch([item._replace(tokens=[token]) for item, token in items])

    def collect(self, pending: Pending) -> list[Sampled | None]:
        return [self._compute(item) for item in pending.work]

    def _compute(self, item: Work) -> Sampled | None:
        if item.vectors is not None and item.vectors.shape != (len(item.tokens), WIDTH):
            raise ValueError("these are not the vectors of this picture")
        rows = self.sequences.grow(item.sequence, len(item.tokens))
        entering = self._model.embedded(item.tokens) if item.vectors is None else item.vectors
        small = item.sequence.kv_type != KV_TYPE
        hidden = self._model.forward(entering, rows, *([_kept] if small else []))
        if item.sampler is None:
            return None
        logits = self._model.logits(hidden[-1])
        if self.observe is not None:
            self.observe(item.sequence, logits)
        return item.sampler.sample(logits)

    def picture_tokens(self, width: int, height: int, digest: bytes) -> Tokens:
        return self._projector.tokens(width, height, digest)

    def encode_picture(self, picture: Picture) -> list[Matrix]:
        return self._projector.encode(picture)

    def close(self) -> None:
        self.sequences.reset()
