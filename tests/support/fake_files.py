"""Reads and writes files with the state of a fake engine."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from pathlib import Path

from rekindle.engine.base import Blob
from rekindle.errors import BadRequest, CorruptBlock
from tests.support.fake import CELL_BYTES, CHECKPOINT_BYTES


class FakeStateFiles:
    """A file has cells, the last checkpoint and the tokens, as JSON."""

    suffix = ".json"

    def writer(self) -> FakeStateWriter:
        return FakeStateWriter()

    def read(self, path: Path) -> FakeReadState:
        try:
            return FakeReadState(**json.loads(path.read_bytes()))
        except (ValueError, TypeError):
            raise BadRequest("this is no file of a fake engine", param="file") from None


class FakeStateWriter:
    def __init__(self) -> None:
        self._cells = b""
        self._checkpoint = b""

    def append(self, blob: Blob, tokens: int, *, resumable: bool = False) -> None:
        size = tokens * CELL_BYTES
        if len(blob) != size + resumable * CHECKPOINT_BYTES:
            raise CorruptBlock("wrong length")
        self._cells += blob[:size]
        self._checkpoint = bytes(blob[size:])

    def save(self, path: Path, tokens: Seq[int]) -> None:
        cells = self._cells[: len(tokens) * CELL_BYTES].hex()
        known = {"tokens": list(tokens), "cells": cells, "checkpoint": self._checkpoint.hex()}
        path.write_text(json.dumps(known))


class FakeReadState:
    def __init__(self, tokens: list[int], cells: str, checkpoint: str) -> None:
        self.tokens = tokens
        self._cells = bytes.fromhex(cells)
        self._checkpoint = bytes.fromhex(checkpoint)

    def export(self, start: int, stop: int, *, resumable: bool = False) -> bytes:
        cells = self._cells[start * CELL_BYTES : stop * CELL_BYTES]
        return cells + self._checkpoint if resumable else cells
