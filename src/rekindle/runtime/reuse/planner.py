"""Finds the longest prefix that a turn can reuse, in live sequences and in stored blocks.

Nothing here changes any state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
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
from rekindle.runtime.encode.request import KvFormat
from rekindle.runtime.schedule.turn import Turn
from rekindle.tokens import Tokens

LiveIn = Callable[[KvFormat], Iterable[Live[Sequence]]]


@dataclass(frozen=True, slots=True)
class Route:
    """What a turn reuses, the KV format it starts with, and where it is requantised."""

    plan: Plan[Sequence]
    kv_format: KvFormat
    requantise_at: int | None = None  # None: never


class Planner:
    """A tenant sees its own state and the state that the operator shares with all tenants."""

    def __init__(
        self, capabilities: Capabilities, store: Store, shared_namespace: bytes | None = None
    ) -> None:
        self.can_truncate = capabilities.can_truncate  # False: turns resume at checkpoints only
        self.shared_namespace = shared_namespace
        self._block_tokens = capabilities.block_tokens
        self._step_tokens = capabilities.step_tokens
        self._whole_pictures = capabilities.whole_pictures
        self._store = store

    def route(self, turn: Turn, live: LiveIn) -> Route:
        """Reuse the longest prefix: state of the target KV type, or state of the default type that
        is requantised afterwards.

        Tokens before the start of quantisation are never computed from quantised state. An exact
        turn requantises where a cold one would. Other turns requantise after the last token for
        which state of the default type exists.
        """
        precision, usable = turn.precision, len(turn.tokens) - 1
        default, target, start = precision.default, precision.target, precision.start_tokens
        if target is None or precision.format_at(len(turn.tokens)) == default:
            plan = self.plan(turn, default, live(default), usable)
            return Route(plan, default, None if target is None else start)
        quantised = self.plan(turn, target, live(target), usable)
        has_quantised = quantised.reused_tokens >= start
        if has_quantised and (turn.request.exact or not precision.can_requantise):
            return Route(quantised, target)
        limit = start if turn.request.exact else usable
        full = self.plan(turn, default, live(default), limit)
        if has_quantised and full.reused_tokens < quantised.reused_tokens + self._block_tokens:
            return Route(quantised, target)
        return Route(full, default, max(full.reused_tokens, start))

    def plan(
        self, turn: Turn, kv_format: KvFormat, live: Iterable[Live[Sequence]], limit: int
    ) -> Plan[Sequence]:
        """The longest reusable prefix of the turn's first `limit` tokens, in one KV format.

        `limit` excludes the last token of the prompt, which is always computed for its logits.
        """
        if not turn.request.reuse:
            return Plan.nothing()
        usable = turn.tokens.first(turn.tokens.whole_media(limit))  # never cut an image
        is_default = kv_format == turn.precision.default
        stored = self.match(kv_format.namespace, usable, is_default=is_default)
        if self.can_truncate:
            if turn.request.exact:
                whole = usable if self._whole_pictures else Tokens()
                return resolve_exact(whole, stored, step_tokens=self._step_tokens)
            return resolve(usable, stored, live, block_tokens=self._block_tokens)
        checkpoints = self._resumable(kv_format.namespace, usable, is_default=is_default)
        if turn.problem:  # a tier failed, so skip checkpoints with an unreadable block below them
            readable = self._store.is_readable
            checkpoints = (each for each in checkpoints if all(map(readable, chain(each))))
        if turn.request.exact:
            return resolve_whole_exact(stored, checkpoints, step_tokens=self._step_tokens)
        return resolve_whole(usable, stored, checkpoints, live)

    def match(self, namespace: bytes, tokens: Tokens, *, is_default: bool = True) -> Match:
        """The longest stored match, whether or not a turn can resume from its end.

        Shared state has the default KV type. It is used if it matches more than the tenant's own.
        """
        own = self._store.match(namespace, tokens)
        if self.shared_namespace is None or not is_default:
            return own
        shared = self._store.match(self.shared_namespace, tokens)
        return shared if shared.tokens > own.tokens else own

    def reusable_tokens(self, namespace: bytes, tokens: Tokens, *, is_default: bool = True) -> int:
        """Number of tokens that a turn could reuse from the store."""
        if self.can_truncate:
            return self.match(namespace, tokens, is_default=is_default).tokens
        newest = next(self._resumable(namespace, tokens, is_default=is_default), None)
        return newest.stop if newest else 0

    def resume_points(self, handle: PrefixHandle) -> Iterator[Block]:
        """The blocks of a conversation after which a turn could resume."""
        if self.can_truncate:
            return chain(handle.block)
        is_default = handle.namespace == handle.tenant
        return self._resumable(handle.namespace, handle.tokens, is_default=is_default)

    def _resumable(self, namespace: bytes, tokens: Tokens, *, is_default: bool) -> Iterator[Block]:
        """Blocks with a checkpoint, newest first."""
        namespaces = {namespace, (self.shared_namespace if is_default else None) or namespace}
        found = (self._store.checkpoints(each, tokens) for each in namespaces)
        return merge(*found, key=lambda block: -block.stop)
