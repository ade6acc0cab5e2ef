"""Decides which state a request reuses. It only looks and changes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from rekindle.kvcache.block import Block, chain
from rekindle.kvcache.tree import Match
from rekindle.tokens import Tokens

Handle = TypeVar("Handle")


@dataclass(frozen=True, slots=True)
class Live(Generic[Handle]):
    """A sequence in the engine's own memory and the tokens it holds."""

    handle: Handle
    tokens: Tokens
    is_copied: bool = False  # sharing a part of it copies all of it


@dataclass(frozen=True, slots=True)
class Plan(Generic[Handle]):
    """Share from a live sequence, then restore blocks, then compute from `reused_tokens` on."""

    share: Handle | None
    shared_tokens: int
    blocks: tuple[Block, ...]  # to restore after the shared part, in order
    reused_tokens: int  # the last block is cut back to this
    matched_tokens: int  # equal tokens that were found, whether or not they can be reused
    diverged: bool  # the stored conversation continues with other tokens
    is_cut: bool = False  # more could be reused, but computing it is faster

    @classmethod
    def nothing(cls) -> Plan[Handle]:
        return cls(None, 0, (), 0, 0, diverged=False)


def resolve(
    tokens: Tokens, stored: Match, live: Iterable[Live[Handle]], *, block_tokens: int
) -> Plan[Handle]:
    """Reuse the longest equal prefix, preferably from a live sequence, which costs nothing.

    `tokens` are all tokens of the request but the last, which is always computed.
    """
    best: Live[Handle] | None = None
    shared = 0
    for candidate in live:
        common = candidate.tokens.common_prefix(tokens)
        if candidate.is_copied and common * 8 < len(candidate.tokens):
            continue  # copying 8 tokens takes about as long as computing one
        if common > shared:
            best, shared = candidate, common
    if stored.tokens <= shared:
        diverged = best is not None and shared < min(len(best.tokens), len(tokens))
        handle = best.handle if best else None
        return Plan(handle, shared, (), shared, shared, diverged)
    aligned = (
        shared - shared % block_tokens
    )  # blocks are restored whole, so share up to the start of one
    return Plan(
        best.handle if best and aligned else None,
        aligned,
        tuple(block for block in stored.blocks if block.start >= aligned),
        stored.tokens,
        stored.tokens,
        stored.diverged,
    )


def resolve_exact(whole: Tokens, stored: Match, *, step_tokens: int) -> Plan[Handle]:
    """Reuse whole canonical steps only, which a cold run computes bit for bit the same. Each image
    of `whole` is one step and is not cut."""
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
    """For state that cannot be cut: reuse the newest checkpoint, or a live sequence that is a
    prefix of the request."""
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
    """Reuse the newest checkpoint at the end of a canonical step whose chain is exact."""
    exact = (block for block in checkpoints if all(each.exact for each in chain(block)))
    block = next((block for block in exact if block.stop % step_tokens == 0), None)
    return _resumed(block, stored.tokens, stored)


def _resumed(block: Block | None, matched: int, stored: Match) -> Plan[Handle]:
    reused = block.stop if block else 0
    return Plan(None, 0, tuple(chain(block))[::-1], reused, matched, stored.diverged)
