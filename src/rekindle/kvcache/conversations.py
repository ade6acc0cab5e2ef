"""Conversations and the blocks they end in: what deleting one frees, and what pins take."""

from __future__ import annotations

from collections.abc import Iterable

from rekindle.kvcache.block import Block, PrefixHandle, below, chain_key
from rekindle.kvcache.tiered import TieredTree
from rekindle.kvcache.tiers.base import Tier
from rekindle.tokens import Tokens


class Conversations:
    """A conversation's end rests on the last block that holds state of it."""

    def __init__(self, tiered: TieredTree) -> None:
        self._tiered = tiered
        self._tree = tiered.tree

    def attach(self, handle: PrefixHandle) -> None:
        """Let a conversation's end rest on its last block, from now on and as blocks change."""
        if handle.tokens:  # else it has no state to rest on
            self._tree.place(handle)

    def move(self, handle: PrefixHandle, namespace: bytes) -> None:
        """Let a conversation's end rest on its state in another namespace."""
        self._tree.lift(handle)
        handle.namespace = namespace
        self._tree.place(handle)

    def claim(self, handle: PrefixHandle) -> None:
        """Let the blocks of its namespace count as its tenant's, though they are still being
        read."""
        self._tree.root(handle.namespace, handle.tenant)

    def detach(self, handle: PrefixHandle) -> None:
        """Forget a conversation's end; its state stays until room is needed."""
        self._tree.lift(handle)

    def release(self, handle: PrefixHandle) -> int:
        """Forget a conversation's end and all state that is no other's; the bytes freed."""
        block, top = handle.block, None
        self._tree.lift(handle)
        while block is not None and not block.is_root and not _is_wanted(block, top):
            block, top = block.parent, block
        gone = self._remove(top) if top else []
        if block is not None:
            gone += self._clear_along(block, handle.tokens)
        return sum(each.size_bytes for each in gone)

    def _clear_along(self, node: Block, tokens: Tokens) -> list[Block]:
        """Remove what lies under a block along a conversation that is gone, unless another goes
        through it."""
        gone = []
        for child in self._tree.along(node, tokens):
            longer = self._tree.longer(node.key, child.tokens)
            if not any(each.handles for other in (child, *longer) for each in below(other)):
                gone += self._remove(child)
        return gone

    def _remove(self, block: Block) -> list[Block]:
        """Forget a block and all below it; what that was."""
        gone = below(block)
        for each in gone:
            self._tiered.remove(each)
        return gone

    # -- pins ----------------------------------------------------------------------------------

    @property
    def _last_tier(self) -> Tier:
        return next(tier for tier in reversed(self._tiered.tiers) if tier.is_open)

    @property
    def pin_limit_bytes(self) -> int:
        """What pins may take: they rest on the last tier there is."""
        return self._last_tier.budget.limit_bytes

    def lasting_bytes(
        self, handles: Iterable[PrefixHandle], token_bytes: int, checkpoint_bytes: int = 0
    ) -> int:
        """What these conversations take of the last tier, once computed, each with a checkpoint of
        its end; what they share counts once."""
        cost, size = self._last_tier.cost, self._tree.block_tokens
        costs: dict[bytes, int] = {}
        for handle in handles:
            key = handle.namespace
            for start in range(0, len(handle.tokens), size):
                tokens = handle.tokens[start : start + size]
                key, state_bytes = chain_key(key, tokens), len(tokens) * token_bytes
                costs[key] = max(costs.get(key, 0), cost(tokens, state_bytes))
            if handle.tokens:
                costs[key] = cost(tokens, state_bytes + checkpoint_bytes)
        return sum(costs.values())


def _is_wanted(block: Block, known: Block | None) -> bool:
    """Whether a conversation ends in this block or below it; in its child `known` none does."""
    others = (child for child in block.children.values() if child is not known)
    return bool(block.handles) or any(each.handles for child in others for each in below(child))
