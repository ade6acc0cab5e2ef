"""What a turn could reuse: looks at live sequences and stored blocks, and changes nothing."""

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
from rekindle.runtime.encode.precision import KvSpace
from rekindle.runtime.schedule.turn import Turn
from rekindle.tokens import Tokens

LiveIn = Callable[[KvSpace], Iterable[Live[Sequence]]]


@dataclass(frozen=True, slots=True)
class Route:
    """What a turn reuses, the cells that it begins in, and where it goes on in others."""

    plan: Plan[Sequence]
    space: KvSpace
    cross_at: int | None = None


class Planner:
    """A tenant sees its own state and what the operator declared common to all."""

    def __init__(
        self, capabilities: Capabilities, store: Store, shared_namespace: bytes | None = None
    ) -> None:
        self.can_truncate = capabilities.can_truncate  # else turns resume at checkpoints alone
        self.shared_namespace = shared_namespace
        self._block_tokens = capabilities.block_tokens
        self._step_tokens = capabilities.step_tokens
        self._whole_pictures = capabilities.whole_pictures
        self._store = store

    def route(self, turn: Turn, live: LiveIn) -> Route:
        """The longest prefix of the turn's tokens that can be reused: in the cells it asks for, or
        in the usual ones, which hold more and from which it then crosses.

        What lies before the start of quantisation is never computed from quantised state. An exact
        turn crosses where a cold one does, others as late as there is usual state.
        """
        precision, usable = turn.precision, len(turn.tokens) - 1
        usual, quantised, start = precision.usual, precision.quantised, precision.start_tokens
        if quantised is None or not precision.crosses(len(turn.tokens)):
            plan = self.plan(turn, usual, live(usual), usable)
            return Route(plan, usual, None if quantised is None else start)
        own = self.plan(turn, quantised, live(quantised), usable)
        goes_on = own.reused_tokens >= start
        if goes_on and (turn.request.exact or not precision.may_transcode):
            return Route(own, quantised)
        most = start if turn.request.exact else usable
        other = self.plan(turn, usual, live(usual), most)
        if goes_on and other.reused_tokens < own.reused_tokens + self._block_tokens:
            return Route(own, quantised)
        return Route(other, usual, max(other.reused_tokens, start))

    def plan(
        self, turn: Turn, space: KvSpace, live: Iterable[Live[Sequence]], most: int
    ) -> Plan[Sequence]:
        """The longest prefix of the turn's first `most` tokens that can be reused in some cells;
        the last token is always computed."""
        if not turn.request.reuse:
            return Plan.nothing()
        usable = turn.tokens.first(turn.tokens.whole_media(most))  # a picture is computed whole
        is_usual = space == turn.precision.usual
        stored = self.match(space.namespace, usable, is_usual=is_usual)
        if self.can_truncate:
            if turn.request.exact:
                whole = usable if self._whole_pictures else Tokens()
                return resolve_exact(whole, stored, step_tokens=self._step_tokens)
            return resolve(usable, stored, live, block_tokens=self._block_tokens)
        checkpoints = self._resumable(space.namespace, usable, is_usual=is_usual)
        if turn.problem:  # a checkpoint is of use with all that it rests on
            readable = self._store.is_readable
            checkpoints = (each for each in checkpoints if all(map(readable, chain(each))))
        if turn.request.exact:
            return resolve_whole_exact(stored, checkpoints, step_tokens=self._step_tokens)
        return resolve_whole(usable, stored, checkpoints, live)

    def match(self, namespace: bytes, tokens: Tokens, *, is_usual: bool = True) -> Match:
        """Stored state that equals these tokens, whether or not a turn can resume from it: the
        tenant's, or what is common to all, which has the usual cells, if that goes further."""
        own = self._store.match(namespace, tokens)
        if self.shared_namespace is None or not is_usual:
            return own
        common = self._store.match(self.shared_namespace, tokens)
        return common if common.tokens > own.tokens else own

    def reusable_tokens(self, namespace: bytes, tokens: Tokens, *, is_usual: bool = True) -> int:
        """How much of these tokens a turn would find in the store."""
        if self.can_truncate:
            return self.match(namespace, tokens, is_usual=is_usual).tokens
        newest = next(self._resumable(namespace, tokens, is_usual=is_usual), None)
        return newest.stop if newest else 0

    def resume_points(self, handle: PrefixHandle) -> Iterator[Block]:
        """Blocks after which a turn could go on with a conversation."""
        if self.can_truncate:
            return chain(handle.block)
        is_usual = handle.namespace == handle.tenant
        return self._resumable(handle.namespace, handle.tokens, is_usual=is_usual)

    def _resumable(self, namespace: bytes, tokens: Tokens, *, is_usual: bool) -> Iterator[Block]:
        """Blocks with a checkpoint, the newest first."""
        namespaces = {namespace, (self.shared_namespace if is_usual else None) or namespace}
        found = (self._store.checkpoints(each, tokens) for each in namespaces)
        return merge(*found, key=lambda block: -block.stop)
