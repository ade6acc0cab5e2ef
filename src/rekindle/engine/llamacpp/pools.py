"""The contexts that shared sequences have together: one for each KV type, over the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rekindle.engine.base import KvType
from rekindle.engine.cells import Cells
from rekindle.engine.llamacpp.context import Context, ContextSize, Shape
from rekindle.errors import ModelError, NoMemory, PoolFull


class Pool:
    """A context, its free slots, and who holds which of its cells."""

    def __init__(self, library: Any, model: int, shape: Shape) -> None:
        self.context = Context(library, model, shape)
        self.cells = Cells(shape.cells)
        self._slots = _all_slots(shape)

    @property
    def is_empty(self) -> bool:
        return len(self._slots) == self.context.shape.sequences

    def open(self) -> int:
        """A free slot; raises PoolFull."""
        if not self._slots:
            raise PoolFull("all sequences are open")
        return self._slots.pop()

    def close_slot(self, slot: int) -> None:
        self.context.remove(slot)
        self.release_cells(slot)
        self._slots.append(slot)

    def release_cells(self, slot: int) -> None:
        """A slot's cells are empty now."""
        self.cells.close(slot)
        if not self.cells.used and not self.context.shape.recurrent:
            self.context.memory.clear()  # a step passes over all cells up to the highest in use

    def rebuild(self) -> None:
        """Throw everything away and start empty."""
        self.context.rebuild()
        self.cells.clear()
        self._slots = _all_slots(self.context.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherPools:
    """The pools that types other than the usual one may have, and what they may take together."""

    sizes: Mapping[KvType, ContextSize]
    budget_bytes: int


class Pools:
    """The pool of the usual KV type is always there. One of another type is built when it is
    needed, if that much memory is free, and given back when nobody has used it for a while, or when
    another one is to take its place."""

    def __init__(
        self,
        library: Any,
        model: int,
        usual: Shape,
        others: OtherPools,
        free_bytes: Callable[[], int],
    ) -> None:
        self._library = library
        self._model = model
        self._others = others
        self._free_bytes = free_bytes
        self.usual = Pool(library, model, usual)
        self._built: dict[KvType, Pool] = {usual.kv_type: self.usual}
        self._unused: set[KvType] = set()  # empty since the last release

    def __getitem__(self, kv_type: KvType) -> Pool:
        return self._built[kv_type]

    def __iter__(self) -> Iterator[KvType]:
        """The types of the pools that take memory now."""
        return iter(self._built)

    def free_tokens(self, kv_type: KvType) -> int:
        pool = self._built.get(kv_type)
        return pool.cells.free if pool else self._others.sizes[kv_type].shape.cells

    def open(self, kv_type: KvType) -> int:
        """A free slot of a type's pool; raises PoolFull, or NoMemory."""
        if kv_type not in self._built:
            self._built[kv_type] = self._build(self._others.sizes[kv_type])
        self._unused.discard(kv_type)
        return self._built[kv_type].open()

    def _build(self, size: ContextSize) -> Pool:
        """Raises NoMemory; asked first, because Linux hands out more than it has and then kills."""
        if self._held_bytes + size.size_bytes > self._others.budget_bytes:
            self._close_empty()
        has_budget = self._held_bytes + size.size_bytes <= self._others.budget_bytes
        if not has_budget or self._free_bytes() < size.size_bytes:
            raise NoMemory.for_kv_type(size.size_bytes)
        try:
            return Pool(self._library, self._model, size.shape)
        except ModelError:
            raise NoMemory.for_kv_type(size.size_bytes) from None

    @property
    def _held_bytes(self) -> int:
        """What pools of other types take now."""
        sizes = self._others.sizes
        return sum(sizes[kv_type].size_bytes for kv_type in self._built if kv_type in sizes)

    def _close_empty(self) -> None:
        self._unused = self._empty
        self.release_idle()

    @property
    def _empty(self) -> set[KvType]:
        """Other types whose pool holds no sequence."""
        pools = self._built.items()
        return {name for name, pool in pools if pool.is_empty and pool is not self.usual}

    def release_idle(self) -> None:
        """Close those of other types that were empty at the last call and are empty now."""
        for kv_type in self._unused & self._empty:
            self._built.pop(kv_type).context.close()
        self._unused = self._empty

    def reset(self) -> None:
        """Forget every sequence; only the usual pool is left."""
        for pool in self._built.values():
            if pool is not self.usual:
                pool.context.close()
        self._built = {self.usual.context.shape.kv_type: self.usual}
        self._unused.clear()
        self.usual.rebuild()

    def close(self) -> None:
        for pool in self._built.values():
            pool.context.close()


def _all_slots(shape: Shape) -> list[int]:
    return list(reversed(range(shape.sequences)))


# ----------------------------------------------------------------------
# The contexts that exact sequences have to themselves.


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
