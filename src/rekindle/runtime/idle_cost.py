"""Whether a finished sequence stays in the engine's pool on a CPU, by what it costs there.

Every row that other turns compute passes over its cells, too; once it has left, the next turn of
its conversation restores it from RAM. `benchmarks/idle_state.py` measures both, decision 6 has the
figures.
"""

from __future__ import annotations

RESTORE_BYTES_PER_S = 5e9
PASS_BYTES_PER_S = 40e9  # of idle state, by a row


def stays_in_place(idle_bytes: int, rows: int) -> bool:
    """Whether so many rows, computed since it became idle or about to be, cost others no more than
    restoring it would. Whoever goes by this pays at most twice what a prophet would."""
    slowdown_s = rows * idle_bytes / PASS_BYTES_PER_S
    restore_s = idle_bytes / RESTORE_BYTES_PER_S
    return slowdown_s <= restore_s
