"""A fake engine with faults on demand, for a real runtime process.

Use it with `REKINDLE_ENGINE_MODULE=tests.support.faulty_engine`. The prompt decides what fails.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path

import pytest

from rekindle.engine.base import EngineOptions, OnProgress, Work
from rekindle.engine.registry import EngineKind
from rekindle.kvcache.disk.block_files import BlockReading
from rekindle.kvcache.tiers import disk
from rekindle.protocol.requests import ENGINE_MODULE
from rekindle.runtime.reuse import restorer
from tests.support.fake import FakeEngine, FakePending, NumberTokenizer

SUFFIX = ".faulty"
RAISE = "13"  # a step with this token raises
HANG = "14"  # a step with this token never returns
ENDLESS = "endless"  # a prompt with this word is never encoded
HUNG_READS = "REKINDLE_TEST_HUNG_READS"  # if this variable is set, reads of blocks never return
FETCH_TIMEOUT_S = 0.2  # read timeout in that case, instead of ten seconds

_ROOT = Path(__file__).parents[2]


class FaultyTokenizer(NumberTokenizer):
    longest_bytes = 1 << 20

    def encode(self, text: str, *, special: bool) -> list[int]:
        words = text.split()
        if ENDLESS in words:
            threading.Event().wait()
        return super().encode(" ".join(words), special=special)


class FaultyEngine(FakeEngine):
    def launch(self, work: Seq[Work]) -> FakePending:
        tokens = {token for item in work for token in item.tokens}
        if int(RAISE) in tokens:
            raise RuntimeError("a fault on demand")
        if int(HANG) in tokens:
            threading.Event().wait()
        return super().launch(work)


def load(options: EngineOptions, _on_progress: OnProgress) -> FaultyEngine:
    engine = FaultyEngine(context_tokens=options.context_tokens or 512)
    engine.tokenizer = FaultyTokenizer()
    if HUNG_READS in os.environ:
        BlockReading.take_part = _hang  # type: ignore[assignment, method-assign]
        restorer.FETCH_TIMEOUT_S, disk.LAST_READS_S = FETCH_TIMEOUT_S, 0.0
    return engine


def _hang(self: BlockReading, is_wanted: Callable[[], bool]) -> bool:
    threading.Event().wait()
    raise AssertionError("nobody sets the event")


def write_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a model file for this engine, and return the environment that makes a runtime use
    it."""
    monkeypatch.setenv(ENGINE_MODULE, __name__)
    monkeypatch.setenv("PYTHONPATH", f"{_ROOT}{os.pathsep}{_ROOT / 'src'}")
    path = folder / f"model{SUFFIX}"
    path.touch()
    return path


ENGINE = EngineKind("faulty", "faulty", lambda path: path.name.endswith(SUFFIX), f"{__name__}:load")
