"""The contexts that exact sequences have to themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rekindle.engine.base import KvType
from rekindle.engine.llamacpp.context import Context, ContextSize
from rekindle.errors import ModelError, NoMemory, PoolFull


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactBudget:
    """How many contexts exact sequences may have, and what each is and takes, by KV type."""

    sizes: Mapping[KvType, ContextSize]
    contexts: int


class ExactContexts:
    """The contexts of exact sequences: one each, used again after it is closed.

    Each has the memory of a full context: it is built when it is needed, if that much is free, and
    given back when nobody has wanted it for a while, or when one of another KV type is to take its
    place. One more than there may be otherwise is for a sequence that takes over what another one
    holds.
    """

    def __init__(
        self, library: Any, model: int, budget: ExactBudget, free_bytes: Callable[[], int]
    ) -> None:
        self._library = library
        self._model = model
        self._budget = budget
        self._free_bytes = free_bytes
        self._open: dict[int, Context] = {}  # by the sequence's slot
        self._idle: list[Context] = []  # the most recently used last
        self._unused = 0  # of those, how many were never wanted since the last release

    @property
    def count(self) -> int:
        """Contexts that take memory now."""
        return len(self._open) + len(self._idle)

    def __getitem__(self, slot: int) -> Context:
        return self._open[slot]

    def open(self, kv_type: KvType) -> int:
        """The slot of an empty context; raises PoolFull when all are open."""
        if len(self._open) > self._budget.contexts:
            raise PoolFull("all exact sequences are open")
        idle = next((each for each in reversed(self._idle) if each.shape.kv_type == kv_type), None)
        if idle is not None:
            self._idle.remove(idle)
        elif self._idle and self.count >= self._budget.contexts:
            self._idle.pop(0).close()
        self._unused = min(self._unused, len(self._idle))
        context = idle or self._build(self._budget.sizes[kv_type])
        context.clear()
        slot = next(n for n in range(len(self._open) + 1) if n not in self._open)
        self._open[slot] = context
        return slot

    def _build(self, size: ContextSize) -> Context:
        """Raises NoMemory; asked first, because Linux hands out more than it has and then kills."""
        if self._free_bytes() < size.size_bytes:
            raise NoMemory.for_exact_context(size.size_bytes)
        try:
            return Context(self._library, self._model, size.shape)
        except ModelError:
            raise NoMemory.for_exact_context(size.size_bytes) from None

    def close(self, slot: int) -> None:
        self._idle.append(self._open.pop(slot))
        if self.count > self._budget.contexts:
            self._idle.pop(0).close()
            self._unused = min(self._unused, len(self._idle))

    def release_idle(self) -> None:
        """Close those that were idle all the time since the last call."""
        for context in self._idle[: self._unused]:
            context.close()
        del self._idle[: self._unused]
        self._unused = len(self._idle)

    def close_all(self) -> None:
        """Give their memory back."""
        for context in (*self._open.values(), *self._idle):
            context.close()
        self._open.clear()
        self._idle.clear()
        self._unused = 0
