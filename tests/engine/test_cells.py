from __future__ import annotations

from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rekindle.engine.cells import Cells
from tests.support.rounds import rounds

TOTAL = 1000
slots = st.integers(0, 4)
lengths = st.integers(0, 12)


class CellsMachine(RuleBasedStateMachine):
    """Compares the counts with a pool in which every cell knows its holders."""

    @initialize()
    def open(self) -> None:
        self.cells = Cells(TOTAL)
        self.names = count()
        self.held: dict[int, list[int]] = {slot: [] for slot in range(5)}

    @rule(slot=slots, tokens=lengths)
    def append(self, slot: int, tokens: int) -> None:
        self.cells.append(slot, tokens)
        self.held[slot] += [next(self.names) for _ in range(tokens)]

    @rule(source=slots, tokens=lengths, into=slots)
    def share(self, source: int, tokens: int, into: int) -> None:
        if self.held[into] or source == into:
            return  # the engine shares into empty sequences only
        self.cells.share(source, tokens, into)
        self.held[into] = self.held[source][:tokens]

    @rule(slot=slots, tokens=lengths)
    def truncate(self, slot: int, tokens: int) -> None:
        self.cells.truncate(slot, tokens)
        del self.held[slot][tokens:]

    @rule(slot=slots)
    def close(self, slot: int) -> None:
        self.cells.close(slot)
        self.held[slot] = []

    @rule()
    def close_all(self) -> None:
        for slot in self.held:
            self.close(slot)
        assert self.cells.used == 0

    @rule()
    def clear(self) -> None:
        self.cells.clear()
        self.held = {slot: [] for slot in self.held}

    @invariant()
    def a_cell_counts_once_however_many_hold_it(self) -> None:
        cells = {cell for held in self.held.values() for cell in held}
        assert self.cells.used == len(cells)
        assert self.cells.free == TOTAL - len(cells)

    @rule(slots=st.sets(st.integers(0, 5)))
    def what_closing_would_free_is_told_before(self, slots: set[int]) -> None:
        others = (held for slot, held in self.held.items() if slot not in slots)
        left = {cell for held in others for cell in held}
        cells = {cell for held in self.held.values() for cell in held}
        assert self.cells.freed(slots) == len(cells) - len(left)


TestCells = pytest.mark.long(CellsMachine.TestCase)
TestCells.settings = settings(max_examples=rounds(100, 1000), stateful_step_count=40, deadline=None)


def test_a_shared_prefix_counts_once() -> None:
    cells = Cells(TOTAL)
    cells.append(0, 100)
    for slot in range(1, 11):
        cells.share(0, 80, slot)
        cells.append(slot, 5)
    assert cells.used == 100 + 10 * 5


def test_a_prefix_survives_its_first_holder() -> None:
    cells = Cells(TOTAL)
    cells.append(0, 100)
    cells.share(0, 80, 1)
    cells.close(0)
    assert cells.used == 80
    cells.truncate(1, 30)
    assert cells.used == 30
    cells.close(1)
    assert cells.free == TOTAL


def test_appended_cells_belong_to_one_holder() -> None:
    cells = Cells(TOTAL)
    cells.append(0, 10)
    cells.share(0, 10, 1)
    cells.append(0, 5)
    cells.append(1, 7)
    cells.close(0)
    assert cells.used == 17
