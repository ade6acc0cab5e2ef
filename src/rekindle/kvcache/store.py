"""The store: what has been computed, by the tokens it was computed from, in tiers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from rekindle.kvcache.block import Block, BlockKind, PrefixHandle, WriteBack, chain
from rekindle.kvcache.key import chain_key
from rekindle.kvcache.loading import load_tiers
from rekindle.kvcache.placement import Placement
from rekindle.kvcache.tier_events import TierEvents
from rekindle.kvcache.tiered import StoreCounts, TieredTree
from rekindle.kvcache.tiers.base import Blob, Fetch, Tier, TierEvent
from rekindle.kvcache.tree import Index, Match
from rekindle.tokens import Tokens

__all__ = ["Store", "StoreCounts"]


class Store:
    """Blocks under byte budgets; leaves go first, so a stored block is always reachable.

    The tiers come in order, the fastest first; the first holds what it is given at once, the others
    are written behind. Called by the engine's thread only.
    """

    def __init__(self, *, block_tokens: int, tiers: Sequence[Tier]) -> None:
        self._index = Index(block_tokens)
        self._tree = TieredTree(self._index, tiers)
        self._placement = Placement(self._tree)
        self._events = TierEvents(self._tree, self._placement)
        self.tiers = self._tree.tiers
        self.counts = self._tree.counts

    def __len__(self) -> int:
        return len(self._index)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._index)

    def tier(self, name: str) -> Tier | None:
        return next((tier for tier in self.tiers if tier.name == name), None)

    def held_bytes(self, namespace: bytes | None) -> dict[str, int]:
        """What a tenant holds of each tier, or all of them together."""
        if namespace is None:
            return {tier.name: tier.used_bytes for tier in self.tiers}
        return {tier.name: tier.held_bytes(namespace) for tier in self.tiers}

    def evictions(self, namespace: bytes | None) -> int:
        """Blocks a tenant lost to make room, or all of them together."""
        return self.counts.evicted_blocks if namespace is None else self.counts.evicted[namespace]

    # -- looking -------------------------------------------------------------------------------

    def match(self, namespace: bytes, tokens: Tokens) -> Match:
        """The longest stored prefix; changes nothing."""
        return self._index.match(namespace, tokens)

    def checkpoints(self, namespace: bytes, tokens: Tokens) -> Iterator[Block]:
        """Blocks with a checkpoint from which these tokens go on, the longest prefix first."""
        return self._index.checkpoints(namespace, tokens)

    def knows(self, key: bytes) -> bool:
        """Whether a block has this key."""
        return self._index.get(key) is not None

    def get(self, block: Block) -> Blob | None:
        """The block's state if it is at hand; else it has to be fetched first."""
        return self._tree.get(block)

    def slowest_tier(self, blocks: Iterable[Block]) -> str | None:
        """Where the one that takes longest to have is; what is at hand counts as in the first."""
        return self.slower(*(self._tier_of(block) for block in blocks))

    def _tier_of(self, block: Block) -> str:
        if self.get(block) is not None:
            return self.tiers[0].name
        return next(tier.name for tier in self.tiers if tier.holds(block))

    def slower(self, *names: str) -> str | None:
        """The slowest of these tiers; None: none was named."""
        return next((tier.name for tier in reversed(self.tiers) if tier.name in names), None)

    def use(self, blocks: Iterable[Block], write_back: WriteBack = WriteBack.NEVER) -> None:
        """Count a use of these blocks; one that wants them kept longer has them kept longer."""
        for block in blocks:
            if self._tree.knows(block):
                for tier in self.tiers:
                    tier.use(block)
                self._placement.set_write_back(block, write_back)

    def wants(self, parent: bytes, tokens: Tokens, *, exact: bool, resumable: bool = False) -> bool:
        """Whether putting this block would add anything."""
        known = self._index.get(chain_key(parent, tokens))
        if known is not None and known.holds(parent, tokens):
            return _is_better(known, exact=exact, resumable=resumable)
        return resumable or not self._covers(parent, tokens, exact=exact)

    def _covers(self, parent: bytes, tokens: Tokens, *, exact: bool) -> bool:
        """Whether a longer block holds these tokens too, and as exactly as wanted."""
        return any(block.exact or not exact for block in self._index.longer(parent, tokens))

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
    ) -> bool:
        """Keep a block under its parent. False: the parent is gone, or there is no room for it."""
        kind = BlockKind(len(blob), exact, resumable)
        if known := self._index.get(chain_key(parent, tokens)):
            better = _is_better(known, exact=exact, resumable=resumable)
            return known.holds(parent, tokens) and (not better or self._replace(known, blob, kind))
        if not resumable and self._covers(parent, tokens, exact=exact):
            return True
        above = None if parent == namespace else self._index.get(parent)
        if parent != namespace and (above is None or not self._index.is_full(above)):
            return False
        tier = self._placement.tier_for(above, tokens, len(blob), write_back)
        if tier is None:
            self.counts.refused_blocks += 1
            return False
        block = self._index.add(
            namespace, above, tokens, len(blob), exact=exact, resumable=resumable
        )
        self._take_in(block, blob, [tier])
        self._placement.set_write_back(block, write_back)
        return True

    def _replace(self, known: Block, blob: Blob, kind: BlockKind) -> bool:
        """A better block takes the place of one that is here."""
        tiers = self._placement.tiers_again(known, len(blob))
        if tiers is None:
            self.counts.refused_blocks += 1
            return False
        known.kind = kind
        self._take_in(known, blob, tiers)
        return True

    def _take_in(self, block: Block, blob: Blob, tiers: Iterable[Tier]) -> None:
        for tier in tiers:
            tier.put(block, blob)
        self.counts.stored_blocks += 1
        self.counts.stored_bytes += len(blob)
        self._tree.cover(block)

    def set_write_back(self, key: bytes, write_back: WriteBack) -> None:
        """Have a block that is here already kept at least as long as this."""
        if block := self._index.get(key):
            self._placement.set_write_back(block, write_back)

    @property
    def is_congested(self) -> bool:
        """Whether a tier has as much waiting to be written as it may."""
        return not all(tier.has_queue_room for tier in self.tiers)

    # -- conversations -------------------------------------------------------------------------

    def attach(self, handle: PrefixHandle) -> None:
        """Let a conversation's end rest on the last block that holds state of it."""
        self._index.place(handle)

    def detach(self, handle: PrefixHandle) -> None:
        """Forget a conversation's end; its state stays until room is needed."""
        self._index.lift(handle)

    def release(self, handle: PrefixHandle) -> int:
        """Forget a conversation's end and all state that is no other's; the bytes freed."""
        return self._tree.release(handle)

    def lasting_bytes(
        self, handles: Iterable[PrefixHandle], token_bytes: int, checkpoint_bytes: int = 0
    ) -> int:
        """What these conversations take of the last tier, once computed, each with a checkpoint of
        its end; what they share counts once."""
        cost = self.tiers[-1].cost
        costs: dict[bytes, int] = {}
        for handle in handles:
            key, blocks = handle.namespace, self._index.split(handle.tokens)
            for tokens in blocks:
                key = chain_key(key, tokens)
                state_bytes = len(tokens) * token_bytes
                costs[key] = max(costs.get(key, 0), cost(tokens, state_bytes))
            if blocks:
                costs[key] = cost(blocks[-1], state_bytes + checkpoint_bytes)
        return sum(costs.values())

    @property
    def pin_limit_bytes(self) -> int:
        """What pins may take: they rest on the last tier there is."""
        return self.tiers[-1].limit_bytes

    def drop(self, block: Block) -> None:
        """Forget a block that turned out bad, and everything that was computed on top of it."""
        self._tree.drop(block)

    # -- tiers ---------------------------------------------------------------------------------

    def load(self) -> None:
        """Take in what the tiers held when they were opened; what cannot be right is removed."""
        load_tiers(self._tree)
        for tier in self.tiers:
            self._placement.make_room(tier, 0)  # the budget may have become smaller

    def write_chain(self, block: Block) -> None:
        """Have a conversation written whole, its tail too."""
        for each in chain(block):
            each.write_back = max(each.write_back, WriteBack.LATE)
        self._placement.write_down(block)

    def write_everything(self) -> None:
        """Have all written that may be."""
        self._placement.write_everything()

    def fetch(self, blocks: Sequence[Block]) -> Fetch | None:
        """Start reading those that are not at hand; None when all are."""
        missing = [block for block in blocks if block.copies and self.get(block) is None]
        if not missing:
            return None
        shares: dict[str, list[Block]] = defaultdict(list)
        for block in missing:
            shares[self._tier_of(block)].append(block)
        fetch = Fetch.of(shares)
        for tier in self.tiers:
            if share := shares.get(tier.name):
                tier.read(share, fetch)
        return fetch

    def on_event(self, event: TierEvent) -> None:
        """Take in what a tier has done in the meantime."""
        self._events.on_event(event)

    def flush(self, then: Callable[[], None]) -> None:
        """Call back on this thread when all that was written before is done or has failed."""
        waiting = len(self.tiers)

        def flushed() -> None:
            nonlocal waiting
            waiting -= 1
            if not waiting:
                then()

        for tier in self.tiers:
            tier.flush(flushed)

    def retry(self) -> None:
        """Try tiers again that had failed, and write what they missed."""
        failed = [tier for tier in self.tiers if tier.state != "ok"]
        for tier in failed:
            tier.retry()
        if failed:
            self._placement.plan_again()


def _is_better(known: Block, *, exact: bool, resumable: bool) -> bool:
    """Whether a block like this adds something to the known one, and takes nothing from it."""
    adds = exact > known.exact or resumable > known.resumable
    return adds and exact >= known.exact and resumable >= known.resumable
