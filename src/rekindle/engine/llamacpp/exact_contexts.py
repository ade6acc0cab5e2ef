"""Contexts of exact sequences: one each, used again after it is closed."""

from __future__ import annotations

from rekindle.engine.llamacpp.context import Context, Shape
from rekindle.engine.llamacpp.model import LlamaModel
from rekindle.errors import PoolFull


class ExactContexts:
    """Built when first needed, because each has the memory of a full context."""

    def __init__(self, model: LlamaModel, shape: Shape, most: int) -> None:
        self._model = model
        self._shape = shape
        self._most = most
        self._open: dict[int, Context] = {}  # by the sequence's slot
        self._idle: list[Context] = []

    def __getitem__(self, slot: int) -> Context:
        return self._open[slot]

    def open(self) -> int:
        """The slot of an empty context; raises PoolFull when all are open."""
        if len(self._open) >= self._most:
            raise PoolFull("all exact sequences are open")
        context = self._idle.pop() if self._idle else self._build()
        context.clear()
        slot = next(n for n in range(self._most) if n not in self._open)
        self._open[slot] = context
        return slot

    def _build(self) -> Context:
        return Context(self._model.library, self._model.native, self._shape)

    def close(self, slot: int) -> None:
        self._idle.append(self._open.pop(slot))

    def close_all(self) -> None:
        """Give their memory back."""
        for context in (*self._open.values(), *self._idle):
            context.close()
        self._open.clear()
        self._idle.clear()
