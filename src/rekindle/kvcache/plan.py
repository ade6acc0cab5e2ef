"""Decide what a request will reuse. Pure: it looks, and changes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from rekindle.kvcache.block import Block, chain
from rekindle.kvcache.tree import Match
from rekindle.tokens import Tokens

Handle = TypeVar("Handle")
MOST_COPIED = 8  # tokens that are copied for each one that is of use: a copy is that much faster


@dataclass(frozen=True, slots=True)
class Live(Generic[Handle]):
    """A sequence in the engine's own memory and the tokens it holds."""

    handle: Handle
    tokens: Tokens
    is_copied: bool = False  # all of it, when some of it is shared


@dataclass(frozen=True, slots=True)
class Plan(Generic[Handle]):
    """Share from a live sequence, then restore blocks, then compute from `reused_tokens` on."""

    share: Handle | None
    shared_tokens: int
    blocks: tuple[Block, ...]  # to restore after the shared part, in order
    reused_tokens: int  # the last block is cut back to this
    matched_tokens: int  # equal tokens found, whether or not they may be reused
    diverged: bool  # what was found goes on differently from the request
    is_cut: bool = False  # more could be reused, but is sooner computed

    @classmethod
    def nothing(cls) -> Plan[Handle]:
        return cls(None, 0, (), 0, 0, diverged=False)


def resolve(
    tokens: Tokens, stored: Match, live: Iterable[Live[Handle]], *, block_tokens: int
) -> Plan[Handle]:
    """The longest equal prefix; from live sequences as far as they go, for they cost nothing.

    `tokens` are those that may be reused: all but the last, which is always computed.
    """
    best: Live[Handle] | None = None
    shared = 0
    for candidate in live:
        common = candidate.tokens.common_prefix(tokens)
        if candidate.is_copied and common * MOST_COPIED < len(candidate.tokens):
            continue
        if common > shared:
            best, shared = candidate, common
    if stored.tokens <= shared:
        diverged = best is not None and shared < min(len(best.tokens), len(tokens))
        handle = best.handle if best else None
        return Plan(handle, shared, (), shared, shared, diverged)
    aligned = shared - shared % block_tokens  # blocks go in whole, so share up to one's start
    return Plan(
        best.handle if best and aligned else None,
        aligned,
        tuple(block for block in stored.blocks if block.start >= aligned),
        stored.tokens,
        stored.tokens,
        stored.diverged,
    )


def resolve_exact(whole: Tokens, stored: Match, *, step_tokens: int) -> Plan[Handle]:
    """Whole canonical steps only: what a cold run would compute bit for bit the same. The pictures
    of `whole` are a step each, which is not cut."""
    blocks: list[Block] = []
    for block in stored.blocks:
        if not block.exact or block.stop > stored.tokens:
            break
        blocks.append(block)
    while blocks and (
        blocks[-1].stop % step_tokens or whole.whole_media(blocks[-1].stop) != blocks[-1].stop
    ):
        blocks.pop()
    reused = blocks[-1].stop if blocks else 0
    return Plan(None, 0, tuple(blocks), reused, stored.tokens, stored.diverged)


def resolve_whole(
    tokens: Tokens, stored: Match, checkpoints: Iterable[Block], live: Iterable[Live[Handle]]
) -> Plan[Handle]:
    """Where state cannot be cut: the newest checkpoint, or a live sequence that is all prefix."""
    common = [(each, each.tokens.common_prefix(tokens)) for each in live]
    whole = [(each, count) for each, count in common if count == len(each.tokens)]
    best, shared = max(whole, key=lambda found: found[1], default=(None, 0))
    matched = max([stored.tokens, *(count for _, count in common)])
    block = next(iter(checkpoints), None)
    if best is not None and (block is None or shared >= block.stop):
        return Plan(best.handle, shared, (), shared, matched, stored.diverged)
    return _resumed(block, matched, stored)


def resolve_whole_exact(
    stored: Match, checkpoints: Iterable[Block], *, step_tokens: int
) -> Plan[Handle]:
    """The newest checkpoint at the end of a canonical step that rests on such steps alone."""
    exact = (block for block in checkpoints if all(each.exact for each in chain(block)))
    block = next((block for block in exact if block.stop % step_tokens == 0), None)
    return _resumed(block, stored.tokens, stored)


def _resumed(block: Block | None, matched: int, stored: Match) -> Plan[Handle]:
    blocks = _above(block)
    reused = block.stop if block else 0
    return Plan(None, 0, blocks, reused, matched, stored.diverged)


def _above(block: Block | None) -> tuple[Block, ...]:
    """The blocks from the first one to this."""
    return tuple(chain(block))[::-1]
