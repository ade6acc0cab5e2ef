"""Describes the tree of stored prefixes for people: which parts conversations share, and where
they are stored.

Blocks are merged into branches: a branch ends where conversations part or end, or where the next
block is stored in another tier.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from rekindle.errors import NotFound
from rekindle.kvcache.block import Block
from rekindle.kvcache.store import Store
from rekindle.protocol.admin import Branch, BranchText, PrefixTree, ShowTree
from rekindle.runtime.model_process import PIECE_ENTRIES, Pieces
from rekindle.tokens import MEDIA_BIT, Tokenizer

# The text of a branch is cut after this many tokens.
MAX_TEXT_TOKENS = 4096
IMAGE_TEXT = b" [image] "


@dataclass(frozen=True, slots=True)
class TreeView:
    """Called by the engine's thread."""

    store: Store
    tokenizer: Tokenizer

    def show(self, op: ShowTree, tenant: bytes | None) -> Pieces[PrefixTree]:
        """List the branches of a tenant, or of all tenants. Those that most conversations use come
        first, level by level. Yields after a number of blocks, so that turns can go on."""
        branches: list[Branch] = []
        ahead: deque[tuple[Block, int | None]] = deque()
        ahead.extend((block, None) for block in _most_used(self.store.first_blocks(tenant)))
        visited = 0
        while ahead and len(branches) < op.limit:
            first, parent = ahead.popleft()
            if self.store.block(first.key) is not first:
                continue  # it was evicted in the meantime
            run = self._run(first)
            branches.append(self._branch(run, parent))
            place = len(branches) - 1
            ahead.extend((child, place) for child in _most_used(run[-1].children.values()))
            visited += len(run)
            if visited >= PIECE_ENTRIES:
                visited = 0
                yield
        return PrefixTree(branches, is_complete=not ahead)

    def text(self, key: str, own: bytes) -> BranchText:
        """Return the text of a branch. Not even an admin sees the text of other tenants."""
        is_key = re.fullmatch(r"[0-9a-f]{64}", key)
        block = self.store.block(bytes.fromhex(key)) if is_key else None
        if block is None or block.tenant != own:
            raise NotFound("No stored prefix has this key, or it belongs to another API key.")
        ids = [token for each in self._run(block) for token in each.tokens]
        return BranchText(self._decode(ids[:MAX_TEXT_TOKENS]), len(ids) <= MAX_TEXT_TOKENS)

    def _decode(self, ids: Iterable[int]) -> str:
        pieces: list[bytes] = []
        for token in ids:
            if token & MEDIA_BIT:
                if not pieces or pieces[-1] != IMAGE_TEXT:
                    pieces.append(IMAGE_TEXT)
            else:
                pieces.append(self.tokenizer.piece(token, special=True))
        return b"".join(pieces).decode(errors="replace")

    def _run(self, first: Block) -> list[Block]:
        """A block and those after it that belong to the same branch."""
        run = [first]
        while len(run[-1].children) == 1 and not run[-1].handles:
            [child] = run[-1].children.values()
            if child.users != first.users or self._tier(child) != self._tier(first):
                break
            run.append(child)
        return run

    def _branch(self, run: list[Block], parent: int | None) -> Branch:
        first = run[0]
        return Branch(
            key=first.key.hex(),
            parent=parent,
            start=first.start,
            tokens=run[-1].stop - first.start,
            size_bytes=sum(block.size_bytes for block in run),
            tier=self._tier(first),
            conversations=first.users,
        )

    def _tier(self, block: Block) -> str:
        return self.store.tiers.source(block).name


def _most_used(blocks: Iterable[Block]) -> list[Block]:
    return sorted(blocks, key=lambda block: -block.users)
