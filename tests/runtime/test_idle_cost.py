"""What decides whether a finished sequence keeps its place."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rekindle.runtime.idle_cost import PASS_BYTES_PER_S, RESTORE_BYTES_PER_S, stays_in_place

BREAK_EVEN_ROWS = int(PASS_BYTES_PER_S / RESTORE_BYTES_PER_S)
sizes = st.integers(1, 1 << 40)


@given(idle_bytes=sizes)
def test_while_nobody_computes_it_stays(idle_bytes: int) -> None:
    assert stays_in_place(idle_bytes, 0)


@given(idle_bytes=sizes, rows=st.integers(BREAK_EVEN_ROWS + 1, 1 << 20))
def test_a_prompt_of_somebody_else_sends_it_away(idle_bytes: int, rows: int) -> None:
    assert not stays_in_place(idle_bytes, rows)


@given(idle_bytes=sizes, rows=st.integers(0, 100))
def test_more_rows_never_bring_it_back(idle_bytes: int, rows: int) -> None:
    assert stays_in_place(idle_bytes, rows) >= stays_in_place(idle_bytes, rows + 1)


@given(idle_bytes=sizes, rows=st.lists(st.integers(1, 5), max_size=40))
def test_it_costs_at_most_twice_what_it_would_cost_to_know_the_future(
    idle_bytes: int, rows: list[int]
) -> None:
    """Rows come in steps; it leaves before one that would cost more than its return."""
    restore, row = 1 / RESTORE_BYTES_PER_S, 1 / PASS_BYTES_PER_S
    passed = paid = 0.0
    for step in rows:
        if not stays_in_place(idle_bytes, int(passed) + step):
            paid += restore
            break
        passed += step
        paid += step * row
    best = min(restore, sum(rows) * row)
    assert paid <= 2 * best + 1e-15
