"""The engine protocol: tokens and KV state in, tokens and KV state out.

An engine knows no text, no paths and no tiers. One thread calls it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

from rekindle.engine.sampling import Sampled
from rekindle.protocol.requests import SamplingParams

Blob = bytes | bytearray | memoryview  # the state of a block, as bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What an engine can do with its loaded model."""

    block_tokens: int  # tokens of a full block
    step_tokens: int  # canonical prefill step of exact sequences, a multiple of block_tokens
    context_tokens: int  # the longest sequence
    batch_tokens: int  # the most rows of one step
    pool_tokens: int  # KV cells that all shared sequences have together
    sequences: int  # how many shared sequences may be open at once
    exact_sequences: int  # how many exact ones
    can_cut: bool  # state can be cut and shared at any position, not at checkpoints alone
    vocabulary: int
    token_bytes: int  # state that one token adds to a block
    checkpoint_bytes: int  # what a checkpoint adds; 0 where state can be cut
    fingerprint: bytes  # states are interchangeable only between equal fingerprints


class Sequence:
    """One run of tokens in the engine's memory. `length` is what has been computed or restored."""

    __slots__ = ("exact", "length", "slot")

    def __init__(self, slot: int, *, exact: bool) -> None:
        self.slot = slot
        self.exact = exact
        self.length = 0


class Constraint(Protocol):
    """Which tokens may come next in one reply."""

    @property
    def trouble(self) -> str | None:
        """Why the reply could not be held to it to the end."""

    def replay(self, tokens: Seq[int]) -> None:
        """Begin again with a reply that has got this far."""

    def mask(self, logits: Any) -> None:
        """Set what may not come next to minus infinity, in place."""

    def accept(self, token: int) -> None:
        """Take note of the token that was chosen."""


class Sampler(Protocol):
    """The state behind one reply's choices: seed, penalties, bias."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens to append to a sequence; with a sampler, the token after them is chosen."""

    sequence: Sequence
    tokens: Seq[int]
    sampler: Sampler | None


class Engine(Protocol):
    """Calls that change nothing: `abilities`, `free_tokens`, `export`. All others do.

    Any call may raise EngineBroken: the native memory was undefined, has been rebuilt, and every
    sequence is gone. Callers drop their handles and start again from tokens.
    """

    @property
    def abilities(self) -> Abilities: ...

    @property
    def free_tokens(self) -> int:
        """Cells of the pool that no sequence holds."""

    def open(self, *, exact: bool) -> Sequence:
        """An empty sequence; raises PoolFull when none is left."""

    def share(self, source: Sequence, tokens: int, into: Sequence) -> None:
        """Give the empty `into` the first `tokens` of `source` without copying; all of them where
        state cannot be cut."""

    def restore(self, into: Sequence, blob: Blob, tokens: int, *, resumable: bool = False) -> None:
        """Append a block; raises PoolFull, or CorruptBlock when it cannot be one of ours. Where
        state cannot be cut, the sequence is of use only after a block with a checkpoint."""

    def export(
        self, sequence: Sequence, start: int, stop: int, *, resumable: bool = False
    ) -> bytes:
        """The state of positions [start, stop) as one block; `resumable` adds a checkpoint, which
        can be had of the sequence's end alone."""

    def sampler(
        self, sampling: SamplingParams, prompt: Seq[int], constraint: Constraint | None = None
    ) -> Sampler: ...

    def step(self, work: Seq[Work]) -> list[Sampled | None]:
        """Do all the work, or none of it and raise PoolFull; one result a piece of work."""

    def cut(self, sequence: Sequence, tokens: int) -> None:
        """Forget everything after the first `tokens`; where state cannot be cut, everything."""

    def reset(self) -> None:
        """Forget every sequence and start with an empty memory."""

    def close_sequence(self, sequence: Sequence) -> None: ...

    def close(self) -> None: ...
