"""The tree as it was before a restart, from what the tiers still hold."""

from __future__ import annotations

from rekindle.kvcache.block import Block, WriteBack
from rekindle.kvcache.key import chain_key
from rekindle.kvcache.tiered import TieredTree
from rekindle.kvcache.tiers.base import StoredBlock, Tier


def load_tiers(tree: TieredTree) -> None:
    """Take in what each tier lists, parents first; what cannot be right is removed from it."""
    for tier in tree.tiers:
        for found in tier.stored():
            above = None if found.parent == found.namespace else tree.index.get(found.parent)
            if _is_sound(tree, tier, found, above):
                _take_in(tree, tier, found, above)
            else:
                tier.discard(found.key)


def _is_sound(tree: TieredTree, tier: Tier, found: StoredBlock, above: Block | None) -> bool:
    known = tree.index.get(found.key)
    fits_in = (
        above is not None
        and tier.holds(above)
        and tree.index.is_full(above)
        and above.namespace == found.namespace
    )
    return (
        (found.parent == found.namespace or fits_in)
        and (known is None or not tier.holds(known))
        and tree.index.could_hold(found.tokens)
        and found.kind.size_bytes >= 0
        and chain_key(found.parent, found.tokens) == found.key
    )


def _take_in(tree: TieredTree, tier: Tier, found: StoredBlock, above: Block | None) -> None:
    block = tree.index.get(found.key)
    if block is None:
        size_bytes, exact, resumable = found.kind
        block = tree.index.add(
            found.namespace, above, found.tokens, size_bytes, exact=exact, resumable=resumable
        )
        block.write_back = WriteBack.SOON
    block.kind = block.kind.weaker(found.kind)
    tier.adopt(block, found.kind)
    tree.cover(block)
