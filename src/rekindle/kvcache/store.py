"""Stores computed state by the tokens it was computed from: put, find, fetch, evict, write back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rekindle.kvcache.block import (
    Block,
    BlockKind,
    PrefixHandle,
    WriteBack,
    chain,
    chain_key,
    subtree,
)
from rekindle.kvcache.fetches import Fetches, OnStall
from rekindle.kvcache.placement import Placement, StoreCounts, TieredTree, WriteBackQueue
from rekindle.kvcache.tiers.base import (
    BlocksFound,
    Fetch,
    Fetched,
    Flushed,
    Tier,
    TierEvent,
    Write,
    WriteFailed,
    Written,
    serves,
)
from rekindle.kvcache.tree import Match, Tree
from rekindle.memory import Buffer
from rekindle.tokens import Tokens

__all__ = ["Store", "StoreCounts"]


class Store:
    """Holds blocks in tiers under byte budgets. Leaves are evicted first, so every stored block can
    be reached. Called from the engine's thread only.

    The first tier is the fastest and takes blocks immediately. The others are written behind. Reads
    from them take at most `fetch_bytes` of memory. A block that is written only when memory runs
    out must be at least `min_reuse_probability` likely to be used again.
    """

    def __init__(
        self,
        *,
        block_tokens: int,
        tiers: Sequence[Tier],
        fetch_bytes: int = 64 << 20,
        min_reuse_probability: float = 0.0,
        on_stall: OnStall = lambda tier, answers: None,
    ) -> None:
        self.block_tokens = block_tokens
        self._tree = Tree(block_tokens)
        self._tiered = TieredTree(self._tree, tiers)
        self._placement = Placement(self._tiered, min_reuse_probability)
        self.write_back = WriteBackQueue(self._tiered, self._placement)
        self.tiers = self._tiered.tiers
        self.fetches = Fetches(self.tiers, fetch_bytes, on_stall)
        self._by_name = {tier.name: tier for tier in self.tiers}
        self.conversations = Conversations(self._tiered)
        self.counts = self._tiered.counts

    def __len__(self) -> int:
        return len(self._tree)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._tree)

    def size_bytes(self, tenant: bytes | None) -> int:
        """State of a tenant, or of all tenants, with each block counted once."""
        return self._tree.size_bytes[tenant]

    def first_blocks(self, tenant: bytes | None) -> Iterator[Block]:
        """The first block of every chain of a tenant, or of all tenants."""
        return self._tree.first_blocks(tenant)

    def block(self, key: bytes) -> Block | None:
        """The block with this chain key."""
        return self._tree.get(key)

    def evictions(self, tenant: bytes | None) -> int:
        """Evicted blocks of a tenant, or of all tenants."""
        return self.counts.evicted_blocks if tenant is None else self.counts.evicted[tenant]

    # -- put -----------------------------------------------------------------------------------

    def wants(self, parent: bytes, tokens: Tokens, *, exact: bool, resumable: bool = False) -> bool:
        """Whether putting this block would add anything."""
        known = self._tree.get(chain_key(parent, tokens))
        if known is not None and known.holds(parent, tokens):
            return _is_better(known, exact=exact, resumable=resumable)
        return resumable or not _covers(self._tree, parent, tokens, exact=exact)

    def put(
        self,
        namespace: bytes,
        parent: bytes,
        tokens: Tokens,
        blob: Buffer,
        *,
        exact: bool,
        resumable: bool = False,
        write_back: WriteBack = WriteBack.NEVER,
        tenant: bytes | None = None,
    ) -> bool:
        """Store a block under its parent. Returns False if the parent is gone or there is no room.
        `tenant` owns the namespace if it is not the tenant's default one."""
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
        block = self._tree.add(namespace, above, tokens, kind, tenant=tenant)
        self._tiered.put(block, blob, [tier])
        self.write_back.request(block, write_back)
        return True

    def _replace(self, known: Block, blob: Buffer, kind: BlockKind) -> bool:
        tiers = self._placement.tiers_for_replacement(known, len(blob))
        if tiers is None:
            self.counts.refused_blocks += 1
            return False
        self._tree.set_kind(known, kind)
        self._tiered.put(known, blob, tiers)
        return True

    def set_write_back(self, key: bytes, write_back: WriteBack) -> None:
        """Raise the write-back of a stored block to at least this."""
        if block := self._tree.get(key):
            self.write_back.request(block, write_back)

    # -- find ----------------------------------------------------------------------------------

    def match(self, namespace: bytes, tokens: Tokens) -> Match:
        """The longest stored prefix. Changes nothing."""
        return self._tree.match(namespace, tokens)

    def checkpoints(self, namespace: bytes, tokens: Tokens) -> Iterator[Block]:
        """Blocks with a checkpoint on the path of these tokens, longest prefix first."""
        return self._tree.checkpoints(namespace, tokens)

    def knows(self, key: bytes) -> bool:
        return self._tree.get(key) is not None

    def get(self, block: Block) -> Buffer | None:
        """The block's state if it is in memory. Otherwise it has to be fetched first."""
        return self._tiered.get(block)

    def is_readable(self, block: Block) -> bool:
        """Whether a block is in memory or can be fetched from a tier that answers."""
        return self._tiered.knows(block) and self.fetches.is_readable(block)

    def use(self, blocks: Iterable[Block], write_back: WriteBack = WriteBack.NEVER) -> None:
        """Record a hit of these blocks, and raise their write-back to at least this."""
        for block in blocks:
            if self._tiered.knows(block):
                for tier in self.tiers:
                    tier.budget.use(block)
                self.write_back.request(block, write_back)

    def drop(self, block: Block) -> None:
        """Remove a bad block and every block that was computed on top of it."""
        self._tiered.drop(block)

    # -- tiers ---------------------------------------------------------------------------------

    def load(self) -> None:
        """Load the blocks that the tiers held when they were opened."""
        for tier in self.tiers:
            self._tiered.load(tier, tier.stored())
        for tier in self.tiers:
            self._placement.make_room(tier, 0)  # the budget may be smaller than before

    def join(self, tier: Tier) -> None:
        """Start writing to a tier whose blocks have all been loaded."""
        self._placement.make_room(tier, 0)
        self.write_back.rebuild()

    def retry(self) -> None:
        """Use failed tiers again, and write the blocks that they missed."""
        failed = [tier for tier in self.tiers if tier.is_open and tier.state != "ok"]
        for tier in failed:
            tier.retry()
        if failed:
            self.write_back.rebuild()

    # -- events -----------------------------------------------------------------------------

    def on_event(self, event: TierEvent) -> None:
        """Handle an event that a tier's thread reported."""
        match event:
            case Written():
                self._on_written(event)
            case WriteFailed():
                self._on_write_failed(event)
            case Fetched(fetch):
                self._on_fetched(fetch)
                self.fetches.complete(fetch)
            case Flushed(then, is_safe):
                then(is_safe)
            case BlocksFound(name, blocks):
                self._tiered.load(self._by_name[name], blocks)

    def _on_written(self, event: Written) -> None:
        tier = self._by_name[event.tier]
        for write in event.writes:  # including those that a later write has replaced
            copy = block.copies.get(tier.name) if (block := self._tree.get(write.key)) else None
            if copy is not None and copy.written is not None:
                copy.written = write.kind
        for write in tier.complete(event):
            if block := self._tree.get(write.key):
                block.copies[tier.name].written = write.kind
                self._tiered.cover(block)
        self.write_back.feed()

    def _on_write_failed(self, event: WriteFailed) -> None:
        """Remove the blocks from the tier. Their descendants cannot be reached there either."""
        tier = self._by_name[event.tier]
        for write in tier.complete(event):
            if block := self._tree.get(write.key):
                self._undo(tier, block, write, is_there=event.is_there)
        tier.fail(event)
        self._placement.make_room(tier, 0)

    def _undo(self, tier: Tier, block: Block, write: Write, *, is_there: bool) -> None:
        copy = block.copies.get(tier.name)
        if copy is None:  # it was removed with its parent
            return
        if copy.written is not None:
            self._fall_back(tier, block, write.kind if is_there else copy.written)
            return
        blob = write.record.blob
        if self.tiers[0].budget.fits(self.tiers[0].cost(block.tokens, len(blob))):
            self._placement.promote(block, blob)  # the first tier may have evicted it by now
        self._tiered.remove_from(tier, block)

    def _fall_back(self, tier: Tier, block: Block, kind: BlockKind) -> None:
        """Return to the kind that the tier has. The block becomes what all its copies can serve."""
        self._tree.set_kind(block, block.kind.weaker(kind))
        block.copies[tier.name].written = kind
        tier.resize(block, kind)
        if self.tiers[0].holds(block):
            self.tiers[0].resize(block, block.kind)

    def _on_fetched(self, fetch: Fetch) -> None:
        """Keep the blocks that were read, even if nobody waits for them any more."""
        tier = self._by_name[fetch.tier]
        for key in list(fetch.records):
            self._keep(tier, fetch, key)
        for key in list(fetch.bad):
            fetch.records.pop(key, None)
            block = fetch.blocks[key]
            if self._is_current(tier, block) and block.kind == fetch.kinds[key]:
                tier.counts.corrupt_blocks += 1
                self._tiered.remove_from(tier, block, quarantine=True)
            else:
                del fetch.bad[key]  # it was removed or replaced during the read

    def _keep(self, tier: Tier, fetch: Fetch, key: bytes) -> None:
        """Check a record against its block, and copy it to the first tier."""
        block, record = fetch.blocks[key], fetch.records[key]
        tier.counts.read_bytes += len(record.blob)
        if block.kind != fetch.kinds[key]:  # it was replaced during the read
            del fetch.records[key]
        elif not self._is_current(tier, block):
            return
        elif block.tokens != record.tokens or block.namespace != record.namespace:
            fetch.bad[key] = "it holds other tokens"
        elif not serves(record, block):
            fetch.bad[key] = "it is older than its index says"
        else:
            self._placement.promote(block, record.blob[: block.size_bytes])

    def _is_current(self, tier: Tier, block: Block) -> bool:
        """Whether the tier's stored copy is the block's current one."""
        return self._tiered.knows(block) and tier.holds(block) and tier.get(block) is None


def _is_better(known: Block, *, exact: bool, resumable: bool) -> bool:
    """Whether a block of this kind adds something to the known one and loses nothing."""
    adds = exact > known.exact or resumable > known.resumable
    return adds and exact >= known.exact and resumable >= known.resumable


def _covers(tree: Tree, parent: bytes, tokens: Tokens, *, exact: bool) -> bool:
    """Whether a longer block holds these tokens, and exactly if that is wanted."""
    return any(block.exact or not exact for block in tree.longer(parent, tokens))


class Conversations:
    """Tracks the block in which each conversation ends, and what deleting or pinning it means."""

    def __init__(self, tiered: TieredTree) -> None:
        self._tiered = tiered
        self._tree = tiered.tree
        self._released: list[PrefixHandle] | None = None  # while blocks are being loaded

    def begin_loading(self) -> None:
        """Free nothing until all blocks and their conversations are here. Before that it is not
        known which blocks are still needed."""
        self._released, self._tiered.is_loading = [], True

    def end_loading(self) -> None:
        """Free what was released in the meantime."""
        released, self._released = self._released or [], None
        self._tiered.is_loading = False
        for handle in released:
            self.attach(handle)
            self.release(handle)

    def attach(self, handle: PrefixHandle) -> None:
        """Track the last block of a conversation from now on."""
        if handle.tokens:  # without tokens it has no state
            self._tree.place(handle)
        if handle.tokens and handle.namespace != handle.tenant:
            handle.default = PrefixHandle(handle.tenant, handle.tokens)
            self._tree.place(handle.default)

    def move(self, handle: PrefixHandle, namespace: bytes) -> None:
        """Track a conversation's state in another namespace, and free its state in this one."""
        self.release(handle)
        handle.namespace = namespace
        self.attach(handle)

    def claim(self, handle: PrefixHandle) -> None:
        """Assign the namespace to its tenant before its blocks are loaded."""
        self._tree.root(handle.namespace, handle.tenant)

    def release(self, handle: PrefixHandle) -> int:
        """Stop tracking a conversation and remove the state that no other one uses. Returns the
        bytes freed."""
        if self._released is not None:
            self._tree.detach(handle)
            if handle.default:
                self._tree.detach(handle.default)
            later = PrefixHandle(handle.namespace, handle.tokens, tenant=handle.tenant)
            self._released.append(later)
            return 0
        freed_bytes = self.release(handle.default) if handle.default else 0
        block, top = handle.block, None
        self._tree.detach(handle)
        while block is not None and not block.is_root and not self._tree.is_reached(block):
            block, top = block.parent, block
        gone = self._remove(top) if top else []
        if block is not None:
            gone += self._remove_along(block, handle.tokens)
        return freed_bytes + sum(each.size_bytes for each in gone)

    def _remove_along(self, node: Block, tokens: Tokens) -> list[Block]:
        """Remove children on the path of a deleted conversation that no other one goes through."""
        gone = []
        for child in self._tree.along(node, tokens):
            if not self._tree.is_reached(child):
                gone += self._remove(child)
        return gone

    def reach(self, parent: bytes, tokens: Tokens) -> bool:
        """Whether a conversation continues through a block with these tokens under this parent."""
        return self._tree.would_be_reached(parent, tokens)

    def continued(self, handle: PrefixHandle) -> Iterator[PrefixHandle]:
        """The conversations that are a prefix of this one, itself included."""
        for block in chain(handle.block):
            yield from block.handles.ending_within(self._tree.next_tokens(block, handle.tokens))

    def unreached(self) -> Iterator[Block | None]:
        """Walk all blocks. Yields each leaf that no conversation uses, and None for every other
        block. The caller may change the store between two blocks."""
        for leaf in self._tree.leaves():
            yield leaf if leaf is not None and not self._tree.is_reached(leaf) else None

    def _remove(self, block: Block) -> list[Block]:
        gone = subtree(block)
        for each in gone:
            self._tiered.remove(each)
        return gone

    def size_bytes(self, tenant: bytes) -> int:
        """State of a tenant, with each block counted once."""
        return self._tree.size_bytes[tenant]

    @property
    def last_tier(self) -> Tier:
        """The tier that pins rely on."""
        return next(tier for tier in reversed(self._tiered.tiers) if tier.is_open)
