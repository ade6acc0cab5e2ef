"""What a turn could reuse: looks at live sequences and stored blocks, and changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import merge

from rekindle.engine.base import Capabilities, Sequence
from rekindle.kvcache.block import Block, PrefixHandle, chain
from rekindle.kvcache.plan import (
    Live,
    Plan,
    resolve,
    resolve_exact,
    resolve_whole,
    resolve_whole_exact,
)
from rekindle.kvcache.store import Store
from rekindle.kvcache.tree import Match
from rekindle.runtime.turn import Turn
from rekindle.tokens import Tokens


class Planner:
    """A tenant sees its own state and what the operator declared common to all."""

    def __init__(
        self, capabilities: Capabilities, store: Store, shared_namespace: bytes | None = None
    ) -> None:
        self.can_truncate = capabilities.can_truncate  # else turns resume at checkpoints alone
        self.shared_namespace = shared_namespace
        self._block_tokens = capabilities.block_tokens
        self._step_tokens = capabilities.step_tokens
        self._store = store

    def plan(self, turn: Turn, live: Iterable[Live[Sequence]]) -> Plan[Sequence]:
        """The longest prefix of the turn's tokens that can be reused."""
        if not turn.request.reuse:
            return Plan.nothing()
        # The last token is always computed, and a picture whole.
        usable = turn.tokens.first(turn.tokens.whole_media(len(turn.tokens) - 1))
        stored = self.match(turn.namespace, usable)
        if self.can_truncate:
            if turn.request.exact:
                return resolve_exact(usable, stored, step_tokens=self._step_tokens)
            return resolve(usable, stored, live, block_tokens=self._block_tokens)
        checkpoints = self._resumable(turn.namespace, usable)
        if turn.problem:  # a checkpoint is of use with all that it rests on
            readable = self._store.is_readable
            checkpoints = (each for each in checkpoints if all(map(readable, chain(each))))
        if turn.request.exact:
            return resolve_whole_exact(stored, checkpoints, step_tokens=self._step_tokens)
        return resolve_whole(usable, stored, checkpoints, live)

    def match(self, namespace: bytes, tokens: Tokens) -> Match:
        """Stored state that equals these tokens, whether or not a turn can resume from it: the
        tenant's, or what is common to all if that goes further."""
        own = self._store.match(namespace, tokens)
        if self.shared_namespace is None:
            return own
        common = self._store.match(self.shared_namespace, tokens)
        return common if common.tokens > own.tokens else own

    def reusable_tokens(self, namespace: bytes, tokens: Tokens) -> int:
        """How much of these tokens a turn would find in the store."""
        if self.can_truncate:
            return self.match(namespace, tokens).tokens
        newest = next(self._resumable(namespace, tokens), None)
        return newest.stop if newest else 0

    def resume_points(self, handle: PrefixHandle) -> Iterator[Block]:
        """Blocks after which a turn could go on with a conversation."""
        if self.can_truncate:
            return chain(handle.block)
        return self._resumable(handle.namespace, handle.tokens)

    def _resumable(self, namespace: bytes, tokens: Tokens) -> Iterator[Block]:
        """Blocks with a checkpoint, the newest first."""
        namespaces = {namespace, self.shared_namespace or namespace}
        found = (self._store.checkpoints(each, tokens) for each in namespaces)
        return merge(*found, key=lambda block: -block.stop)
