"""Counts the KV cells of a pool whose sequences share prefixes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class _Run:
    """Consecutive cells with the same holders."""

    tokens: int
    holders: int = 1


class Cells:
    """Counts the cells in use. A cell that several sequences share counts once."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self.peak = 0  # largest use since the pool was empty
        self._runs: dict[int, list[_Run]] = {}

    @property
    def free(self) -> int:
        return self.total - self.used

    @property
    def holders(self) -> list[int]:
        return [slot for slot, runs in self._runs.items() if runs]

    def freed(self, slots: Iterable[int]) -> int:
        """Return the number of cells that closing these sequences would free."""
        held = Counter(run for slot in slots for run in self._runs.get(slot, ()))
        return sum(run.tokens for run, holders in held.items() if holders == run.holders)

    def append(self, slot: int, tokens: int) -> None:
        runs = self._runs.setdefault(slot, [])
        if runs and runs[-1].holders == 1:  # not shared, so it can grow
            runs[-1].tokens += tokens
        elif tokens:
            runs.append(_Run(tokens))
        self.used += tokens
        self.peak = max(self.peak, self.used)

    def share(self, source: int, tokens: int, into: int) -> None:
        shared = self._split(source, tokens)
        for run in shared:
            run.holders += 1
        self._runs[into] = list(shared)

    def truncate(self, slot: int, tokens: int) -> None:
        kept = self._split(slot, tokens)
        for run in self._runs.get(slot, [])[len(kept) :]:
            self._drop(run)
        self._runs[slot] = kept

    def close(self, slot: int) -> None:
        for run in self._runs.pop(slot, []):
            self._drop(run)

    def clear(self) -> None:
        self._runs.clear()
        self.used = self.peak = 0

    def _drop(self, run: _Run) -> None:
        run.holders -= 1
        if not run.holders:
            self.used -= run.tokens  # the only line that subtracts
            self.peak = self.peak if self.used else 0

    def _split(self, slot: int, tokens: int) -> list[_Run]:
        """Return the runs of the first `tokens` of a sequence. Splits a run if necessary."""
        first: list[_Run] = []
        for run in list(self._runs.get(slot, [])):
            if tokens <= 0:
                break
            if run.tokens > tokens:
                self._halve(run, tokens)
            first.append(run)
            tokens -= run.tokens
        return first

    def _halve(self, run: _Run, tokens: int) -> None:
        rest = _Run(run.tokens - tokens, run.holders)
        run.tokens = tokens
        for runs in self._runs.values():
            if run in runs:
                runs.insert(runs.index(run) + 1, rest)
