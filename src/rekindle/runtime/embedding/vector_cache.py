"""Rows that were computed before, under a byte budget, each tenant's apart."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from rekindle.engine.base import Matrix

OVERHEAD_BYTES = 300  # of an entry, beside its key and its row


class VectorCache:
    """The least recently used row goes first."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._rows: OrderedDict[tuple[bytes, bytes], Matrix] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, salt: bytes, keys: Iterable[bytes]) -> dict[bytes, Matrix]:
        """Those of a tenant's rows that are there, by their keys; they count as used."""
        found = {}
        for key in keys:
            row = self._rows.get((salt, key))
            if row is not None:
                self._rows.move_to_end((salt, key))
                found[key] = row
        return found

    def put(self, salt: bytes, key: bytes, row: Matrix) -> None:
        self._forget((salt, key))
        self._rows[salt, key] = row
        self.used_bytes += _size_bytes(key, row)
        while self.used_bytes > self.limit_bytes:
            self._forget(next(iter(self._rows)))

    def _forget(self, name: tuple[bytes, bytes]) -> None:
        row = self._rows.pop(name, None)
        if row is not None:
            self.used_bytes -= _size_bytes(name[1], row)


def _size_bytes(key: bytes, row: Matrix) -> int:
    return len(key) + row.nbytes + OVERHEAD_BYTES
