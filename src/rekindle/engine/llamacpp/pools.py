"""Owns the llama.cpp contexts of sequences: a pool for each KV type, and one context per exact
sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from rekindle.engine.base import KvType
from rekindle.engine.cells import Cells
from rekindle.engine.llamacpp.context import Context, Shape
from rekindle.errors import ModelError, NoMemory, PoolFull

Built = TypeVar("Built")


class Pool:
    """A context shared by many sequences, with its free slots and cell accounting."""

    def __init__(self, library: Any, model: int, shape: Shape) -> None:
        self.context = Context(library, model, shape)
        self.cells = Cells(shape.cells)
        self._slots = list(reversed(range(shape.sequences)))

    @property
    def is_empty(self) -> bool:
        return len(self._slots) == self.context.shape.sequences

    def open(self) -> int:
        if not self._slots:
            raise PoolFull("all sequences are open")
        return self._slots.pop()

    def close_slot(self, slot: int) -> None:
        self.context.remove(slot)
        self.release_cells(slot)
        self._slots.append(slot)

    def release_cells(self, slot: int) -> None:
        """Account for the cells that a slot no longer holds."""
        self.cells.close(slot)
        if not self.cells.used and not self.context.shape.recurrent:
            self.context.memory.clear()  # a step visits all cells up to the highest one used

    def rebuild(self) -> None:
        self.context.rebuild()
        self.cells.clear()
        self._slots = list(reversed(range(self.context.shape.sequences)))


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherPools:
    """Shapes and common memory budget of the pools of non-default KV types."""

    shapes: Mapping[KvType, Shape]
    budget_bytes: int


class Pools:
    """The pools of all KV types.

    The pool of the default type always exists. Other pools are built on demand, if memory is free.
    They are closed after they were empty for a while, or when another pool needs their memory.
    """

    def __init__(
        self,
        library: Any,
        model: int,
        default: Shape,
        others: OtherPools,
        free_bytes: Callable[[], int],
    ) -> None:
        self._library = library
        self._model = model
        self._others = others
        self._free_bytes = free_bytes
        self.default = Pool(library, model, default)
        self._built: dict[KvType, Pool] = {default.kv_type: self.default}
        self._unused: set[KvType] = set()  # empty since the last release

    def __getitem__(self, kv_type: KvType) -> Pool:
        return self._built[kv_type]

    def __iter__(self) -> Iterator[KvType]:
        return iter(self._built)

    def free_tokens(self, kv_type: KvType) -> int:
        pool = self._built.get(kv_type)
        return pool.cells.free if pool else self._others.shapes[kv_type].cells

    def open(self, kv_type: KvType) -> int:
        """Return a free slot of a type's pool; raises PoolFull or NoMemory."""
        if kv_type not in self._built:
            self._built[kv_type] = self._build_pool(self._others.shapes[kv_type])
        self._unused.discard(kv_type)
        return self._built[kv_type].open()

    def _build_pool(self, shape: Shape) -> Pool:
        if self._held_bytes + shape.size_bytes > self._others.budget_bytes:
            self._unused = self._empty
            self.release_idle()
        left_bytes = self._others.budget_bytes - self._held_bytes
        free_bytes = min(left_bytes, self._free_bytes())
        build = partial(Pool, self._library, self._model)
        return _build(build, shape, free_bytes, NoMemory.for_kv_type)

    @property
    def _held_bytes(self) -> int:
        pools = self._built.values()
        return sum(pool.context.shape.size_bytes for pool in pools if pool is not self.default)

    @property
    def _empty(self) -> set[KvType]:
        pools = self._built.items()
        return {name for name, pool in pools if pool.is_empty and pool is not self.default}

    def release_idle(self) -> None:
        """Close pools of non-default types that were empty at the last call and still are."""
        for kv_type in self._unused & self._empty:
            self._built.pop(kv_type).context.close()
        self._unused = self._empty

    def reset(self) -> None:
        """Forget every sequence, and close all pools but an empty one of the default type."""
        for pool in self._built.values():
            if pool is not self.default:
                pool.context.close()
        self._built = {self.default.context.shape.kv_type: self.default}
        self._unused.clear()
        self.default.rebuild()

    def close(self) -> None:
        for pool in self._built.values():
            pool.context.close()


def _build(
    build: Callable[[Shape], Built],
    shape: Shape,
    free_bytes: int,
    error: Callable[[int], NoMemory],
) -> Built:
    """Build a pool or context; raises what `error` makes.

    Asks for free memory first, because Linux overcommits and then kills the process.
    """
    if free_bytes < shape.size_bytes:
        raise error(shape.size_bytes)
    try:
        return build(shape)
    except ModelError:
        raise error(shape.size_bytes) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactBudget:
    """Number of contexts for exact sequences, and the shape of one for each KV type."""

    shapes: Mapping[KvType, Shape]
    contexts: int


class ExactContexts:
    """A context for each exact sequence, reused after it is closed.

    A context takes the memory of a full context length. It is built on demand, if memory is free.
    It is closed after a while without use, or when a context of another KV type needs its memory.
    One more than the budget may be open, so that a sequence can take over the state of another one.
    """

    def __init__(
        self, library: Any, model: int, budget: ExactBudget, free_bytes: Callable[[], int]
    ) -> None:
        self._library = library
        self._model = model
        self._budget = budget
        self._free_bytes = free_bytes
        self._open: dict[int, Context] = {}  # by the sequence's slot
        self._idle: list[Context] = []  # most recently used last
        self._unused = 0  # number of idle contexts not used since the last release

    @property
    def count(self) -> int:
        return len(self._open) + len(self._idle)

    def __getitem__(self, slot: int) -> Context:
        return self._open[slot]

    def open(self, kv_type: KvType) -> int:
        """Return the slot of an empty context; raises PoolFull or NoMemory."""
        if len(self._open) > self._budget.contexts:
            raise PoolFull("all exact sequences are open")
        idle = next((each for each in reversed(self._idle) if each.shape.kv_type == kv_type), None)
        if idle is not None:
            self._idle.remove(idle)
        elif self._idle and self.count >= self._budget.contexts:
            self._idle.pop(0).close()
        self._unused = min(self._unused, len(self._idle))
        if idle is None:
            build = partial(Context, self._library, self._model)
            shape = self._budget.shapes[kv_type]
            idle = _build(build, shape, self._free_bytes(), NoMemory.for_exact_context)
        idle.clear()
        slot = next(n for n in range(len(self._open) + 1) if n not in self._open)
        self._open[slot] = idle
        return slot

    def close(self, slot: int) -> None:
        self._idle.append(self._open.pop(slot))
        if self.count > self._budget.contexts:
            self._idle.pop(0).close()
            self._unused = min(self._unused, len(self._idle))

    def release_idle(self) -> None:
        """Close contexts that were idle all the time since the last call."""
        for context in self._idle[: self._unused]:
            context.close()
        del self._idle[: self._unused]
        self._unused = len(self._idle)

    def close_all(self) -> None:
        for context in (*self._open.values(), *self._idle):
            context.close()
        self._open.clear()
        self._idle.clear()
        self._unused = 0
