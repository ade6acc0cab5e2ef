"""Parked sequences that a turn has gone on from elsewhere, until they are closed."""

from __future__ import annotations

from rekindle.engine.base import Engine, Sequence


class Superseded:
    """Freeing a device's memory takes milliseconds, for which no first token need wait: they are
    closed in an idle moment, or when somebody wants their place."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def add(self, sequence: Sequence) -> None:
        self._sequences.append(sequence)

    def close(self) -> bool:
        """Close all of them; False: there were none."""
        sequences, self._sequences = self._sequences, []
        for sequence in sequences:
            self._engine.close_sequence(sequence)
        return bool(sequences)

    def clear(self) -> None:
        """The engine has lost them."""
        self._sequences.clear()
