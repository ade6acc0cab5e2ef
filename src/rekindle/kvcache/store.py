"""The store: what has been computed, by the tokens it was computed from, in tiers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rekindle.kvcache.block import Block, BlockKind, PrefixHandle, WriteBack, below, chain_key
from rekindle.kvcache.fetches import Fetches, TierEvents
from rekindle.kvcache.placement import Placement, WriteBackQueue
from rekindle.kvcache.tiered import StoreCounts, TieredTree
from rekindle.kvcache.tiers.base import Blob, Tier, TierEvent
from rekindle.kvcache.tree import Match, Tree
from rekindle.tokens import Tokens

# ----------------------------------------------------------------------
# Conversations and the blocks they end in: what deleting one frees, and what pins take.


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


__all__ = ["Store", "StoreCounts"]


class Store:
    """Blocks under byte budgets; leaves go first, so a stored block is always reachable.

    The tiers come in order, the fastest first; the first holds what it is given at once, the others
    are written behind; what may be written late, if it is `least_chance` likely to be used again.
    What is read from those takes `fetch_bytes` of memory at most. Called by the engine's thread
    only.
    """

    def __init__(
        self,
        *,
        block_tokens: int,
        tiers: Sequence[Tier],
        fetch_bytes: int = 64 << 20,
        least_chance: float = 0.0,
    ) -> None:
        self._tree = Tree(block_tokens)
        self._tiered = TieredTree(self._tree, tiers)
        self._placement = Placement(self._tiered, least_chance)
        self.write_back = WriteBackQueue(self._tiered, self._placement)
        self.tiers = self._tiered.tiers
        self.fetches = Fetches(self.tiers, fetch_bytes)
        self._events = TierEvents(self._tiered, self._placement, self.write_back, self.fetches)
        self.conversations = Conversations(self._tiered)
        self.counts = self._tiered.counts

    def __len__(self) -> int:
        return len(self._tree)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._tree)

    def size_bytes(self, tenant: bytes | None) -> int:
        """What a tenant's state takes, or everybody's, wherever it lies; each block once."""
        return self._tree.size_bytes[tenant]

    def evictions(self, tenant: bytes | None) -> int:
        """Blocks a tenant lost to make room, or all of them together."""
        return self.counts.evicted_blocks if tenant is None else self.counts.evicted[tenant]

    # -- looking -------------------------------------------------------------------------------

    def match(self, namespace: bytes, tokens: Tokens) -> Match:
        """The longest stored prefix; changes nothing."""
        return self._tree.match(namespace, tokens)

    def checkpoints(self, namespace: bytes, tokens: Tokens) -> Iterator[Block]:
        """Blocks with a checkpoint from which these tokens go on, the longest prefix first."""
        return self._tree.checkpoints(namespace, tokens)

    def knows(self, key: bytes) -> bool:
        """Whether a block has this key."""
        return self._tree.get(key) is not None

    def get(self, block: Block) -> Blob | None:
        """The block's state if it is at hand; else it has to be fetched first."""
        return self._tiered.get(block)

    def is_readable(self, block: Block) -> bool:
        """Whether a block is at hand, or can be fetched from a tier that answers."""
        return self._tiered.knows(block) and self.fetches.is_readable(block)

    def use(self, blocks: Iterable[Block], write_back: WriteBack = WriteBack.NEVER) -> None:
        """Count a use of these blocks; one that wants them kept longer has them kept longer."""
        for block in blocks:
            if self._tiered.knows(block):
                for tier in self.tiers:
                    tier.budget.use(block)
                self.write_back.ask(block, write_back)

    def wants(self, parent: bytes, tokens: Tokens, *, exact: bool, resumable: bool = False) -> bool:
        """Whether putting this block would add anything."""
        known = self._tree.get(chain_key(parent, tokens))
        if known is not None and known.holds(parent, tokens):
            return _is_better(known, exact=exact, resumable=resumable)
        return resumable or not _covers(self._tree, parent, tokens, exact=exact)

    # -- putting -------------------------------------------------------------------------------

    def put(
        self,
        namespace: bytes,
        parent: bytes,
        tokens: Tokens,
        blob: Blob,
        *,
        exact: bool,
        resumable: bool = False,
        write_back: WriteBack = WriteBack.NEVER,
        tenant: bytes | None = None,
    ) -> bool:
        """Keep a block under its parent. False: the parent is gone, or there is no room for it.
        `tenant` is whose the namespace is, if it is not the tenant's usual one."""
        kind = BlockKind(len(blob), exact, resumable)
        if known := self._tree.get(chain_key(parent, tokens)):
            better = _is_better(known, exact=exact, resumable=resumable)
            return known.holds(parent, tokens) and (not better or self._replace(known, blob, kind))
        if not resumable and _covers(self._tree, parent, tokens, exact=exact):
            return True
        above = None if parent == namespace else self._tree.get(parent)
        if parent != namespace and (above is None or not self._tree.is_full(above)):
            return False
        tier = self._placement.tier_for(above, tokens, len(blob), write_back)
        if tier is None:
            self.counts.refused_blocks += 1
            return False
        block = self._tree.add(
            namespace, above, tokens, len(blob), exact=exact, resumable=resumable, tenant=tenant
        )
        self._tiered.put(block, blob, [tier])
        self.write_back.ask(block, write_back)
        return True

    def _replace(self, known: Block, blob: Blob, kind: BlockKind) -> bool:
        """A better block takes the place of one that is here."""
        tiers = self._placement.tiers_again(known, len(blob))
        if tiers is None:
            self.counts.refused_blocks += 1
            return False
        self._tree.set_kind(known, kind)
        self._tiered.put(known, blob, tiers)
        return True

    def set_write_back(self, key: bytes, write_back: WriteBack) -> None:
        """Have a block that is here already kept at least as long as this."""
        if block := self._tree.get(key):
            self.write_back.ask(block, write_back)

    def drop(self, block: Block) -> None:
        """Forget a block that turned out bad, and everything that was computed on top of it."""
        self._tiered.drop(block)

    # -- tiers ---------------------------------------------------------------------------------

    def load(self) -> None:
        """Take in what the tiers held when they were opened; what cannot be right is removed."""
        self._tiered.load()
        for tier in self.tiers:
            self._placement.make_room(tier, 0)  # the budget may have become smaller

    def join(self, tier: Tier) -> None:
        """All that a tier held is taken in, and it takes writes from now on."""
        self._placement.make_room(tier, 0)
        self.write_back.plan_again()

    def on_event(self, event: TierEvent) -> None:
        """Take in what a tier has done in the meantime."""
        self._events.on_event(event)

    def retry(self) -> None:
        """Try tiers again that had failed, and write what they missed."""
        failed = [tier for tier in self.tiers if tier.is_open and tier.state != "ok"]
        for tier in failed:
            tier.retry()
        if failed:
            self.write_back.plan_again()


def _is_better(known: Block, *, exact: bool, resumable: bool) -> bool:
    """Whether a block like this adds something to the known one, and takes nothing from it."""
    adds = exact > known.exact or resumable > known.resumable
    return adds and exact >= known.exact and resumable >= known.resumable


def _covers(tree: Tree, parent: bytes, tokens: Tokens, *, exact: bool) -> bool:
    """Whether a longer block holds these tokens too, and as exactly as wanted."""
    return any(block.exact or not exact for block in tree.longer(parent, tokens))
