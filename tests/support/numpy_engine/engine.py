"""The engine protocol over the NumPy transformer; a block is the KV rows of its tokens."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
from blake3 import blake3

from rekindle.engine.base import (
    Blob,
    Capabilities,
    EngineOptions,
    KvLayout,
    Matrix,
    OnProgress,
    Sampled,
    Sampler,
    Sequence,
    TokenMask,
    Work,
)
from rekindle.engine.cells import Cells
from rekindle.errors import CorruptBlock, ModelError, PoolFull
from rekindle.protocol.media import Picture
from rekindle.protocol.requests import SamplingParams
from rekindle.tokens import Tokens
from tests.support.numpy_engine.model import FORMAT, WIDTH, Array, ModelFile, TinyTransformer
from tests.support.numpy_engine.sampler import NumpySampler
from tests.support.numpy_engine.tokenizer import TEMPLATE, ByteTokenizer
from tests.support.pictures import PlainProjector

BLOCK_TOKENS = STEP_TOKENS = 64
BATCH_TOKENS = 128  # beside one row for each turn that decodes
KV_TYPE = "f32"


class NumpyEngine:
    def __init__(
        self, options: EngineOptions, on_progress: OnProgress = lambda _done: None
    ) -> None:
        if options.kv_type == "q8_0":
            raise ModelError(f"this engine has {KV_TYPE} KV cells; leave --fp8-kvcache out")
        file = ModelFile.read(options.path)
        self.tokenizer = ByteTokenizer()
        self.chat_template = TEMPLATE
        self._model = TinyTransformer(file, self.tokenizer.size)
        self._projector = PlainProjector(WIDTH)
        self.capabilities = self._describe(options)
        self._cells = Cells(self.capabilities.pool_tokens)
        self._rows: dict[tuple[bool, int], Array] = {}
        #: Called with the raw logits behind every choice; how tests compare runs bit by bit.
        self.observe: Callable[[Sequence, np.ndarray[Any, Any]], None] | None = None
        on_progress(1.0)

    def _describe(self, options: EngineOptions) -> Capabilities:
        context = options.context_tokens or self._model.context_tokens
        layout = KvLayout(
            token_bytes=self._empty().itemsize * int(np.prod(self._model.row_shape)),
            checkpoint_bytes=0,
            fingerprint=blake3(FORMAT.encode() + options.path.read_bytes()).digest(),
        )
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
            kv={KV_TYPE: layout},
            modalities=frozenset({"text", "image"}),
        )

    def _empty(self, tokens: int = 0) -> Array:
        return np.empty((tokens, *self._model.row_shape), np.float32)

    @property
    def free_tokens(self) -> int:
        return self._cells.free

    def freed_tokens(self, sequences: Seq[Sequence]) -> int:
        return self._cells.freed(sequence.slot for sequence in sequences)

    # -- sequences -----------------------------------------------------------------------------

    def open(self, *, exact: bool) -> Sequence:
        known = self.capabilities
        most = known.exact_sequences if exact else known.sequences
        slot = next((n for n in range(most) if (exact, n) not in self._rows), None)
        if slot is None:
            raise PoolFull("all sequences are open")
        self._rows[exact, slot] = self._empty()
        return Sequence(slot, exact=exact)

    def release_idle(self) -> None: ...

    def close_sequence(self, sequence: Sequence) -> None:
        del self._rows[sequence.exact, sequence.slot]
        if not sequence.exact:
            self._cells.close(sequence.slot)
        sequence.length = 0

    def share(self, source: Sequence, tokens: int, into: Sequence) -> None:
        if into.length or source.exact or into.exact:
            raise ValueError("only shared sequences share, and only into an empty one")
        self._rows[False, into.slot] = self._held(source)[:tokens].copy()
        self._cells.share(source.slot, tokens, into.slot)
        into.length = tokens

    def truncate(self, sequence: Sequence, tokens: int) -> None:
        if tokens < sequence.length:
            if not sequence.exact:
                self._cells.truncate(sequence.slot, tokens)
            sequence.length = tokens

    def export(
        self, sequence: Sequence, start: int, stop: int, *, resumable: bool = False
    ) -> bytes:
        assert not resumable, "state can be truncated, so there are no checkpoints"
        return self._held(sequence)[start:stop].tobytes()

    def restore(self, into: Sequence, blob: Blob, tokens: int, *, resumable: bool = False) -> None:
        if len(blob) != tokens * self.capabilities.kv_layout.token_bytes:
            raise CorruptBlock(f"a block of {tokens} tokens cannot have {len(blob)} bytes")
        if not into.exact and self._cells.free < tokens:
            raise PoolFull("no free cells for this block")
        restored = np.frombuffer(blob, np.float32).reshape(tokens, *self._model.row_shape)
        self._grow(into, tokens)[into.length - tokens :] = restored

    def _held(self, sequence: Sequence) -> Array:
        return self._rows[sequence.exact, sequence.slot][: sequence.length]

    def _grow(self, sequence: Sequence, tokens: int) -> Array:
        """The sequence's rows with so many more at the end, whose values are still to be set."""
        held, stop = self._held(sequence), sequence.length + tokens
        if stop > len(self._rows[sequence.exact, sequence.slot]):
            wider = self._empty(2 * stop)
            wider[: sequence.length] = held
            self._rows[sequence.exact, sequence.slot] = wider
        if not sequence.exact:
            self._cells.append(sequence.slot, tokens)
        sequence.length = stop
        return self._held(sequence)

    def reset(self) -> None:
        self._rows.clear()
        self._cells.clear()

    # -- computing -----------------------------------------------------------------------------

    def sampler(
        self, sampling: SamplingParams, prompt: Seq[int], token_mask: TokenMask | None = None
    ) -> Sampler:
        return NumpySampler(sampling, prompt, token_mask)

    def step(self, work: Seq[Work]) -> list[Sampled | None]:
        wanted = sum(len(item.tokens) for item in work if not item.sequence.exact)
        if wanted > self._cells.free:
            raise PoolFull("no free cells for this step")
        return [self._compute(item) for item in work]

    def _compute(self, item: Work) -> Sampled | None:
        if item.vectors is not None and item.vectors.shape != (len(item.tokens), WIDTH):
            raise ValueError("these are not the vectors of this picture")
        rows = self._grow(item.sequence, len(item.tokens))
        entering = self._model.embedded(item.tokens) if item.vectors is None else item.vectors
        hidden = self._model.forward(entering, rows)
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
        self.reset()
