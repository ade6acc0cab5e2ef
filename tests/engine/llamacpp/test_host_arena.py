"""Locked slabs are handed out in pieces. Here the slabs are ordinary memory."""

from __future__ import annotations

import ctypes
import random
from typing import Any

import numpy as np
import pytest

from rekindle.engine.llamacpp import bindings, host_arena
from rekindle.engine.llamacpp.host_arena import GRAIN_BYTES, HostArena, lock_memory

SLAB_BYTES = 64 * GRAIN_BYTES


@pytest.fixture
def library() -> Any:
    return bindings.load_library()


def buffer_type(library: Any) -> int:
    bindings.declare(library, {"ggml_backend_cpu_buffer_type": (ctypes.c_void_p, [])})
    found: int = library.ggml_backend_cpu_buffer_type()
    return found


@pytest.fixture
def arena(library: Any, monkeypatch: pytest.MonkeyPatch) -> HostArena:
    monkeypatch.setattr(host_arena, "SLAB_BYTES", SLAB_BYTES)
    arena = HostArena(library, buffer_type(library), 2 * SLAB_BYTES + 5)
    arena.wait_until_locked()
    return arena


def is_locked(arena: HostArena, memory: memoryview) -> bool:
    address = np.frombuffer(memory, np.uint8).ctypes.data
    return any(0 <= address - slab.address < SLAB_BYTES for slab in arena._slabs)


def test_slabs_are_locked_up_to_the_limit(arena: HostArena) -> None:
    kept = [arena.allocate(SLAB_BYTES) for _ in range(3)]
    assert [is_locked(arena, memory) for memory in kept] == [True, True, False]
    assert [len(memory) for memory in kept] == [SLAB_BYTES] * 3


def test_memory_returns_when_nothing_refers_to_it(arena: HostArena) -> None:
    for _ in range(10):
        one, two = arena.allocate(SLAB_BYTES), arena.allocate(SLAB_BYTES)
        assert is_locked(arena, one)
        assert is_locked(arena, two)
        part = two[10:20]
        del one, two
        again = [arena.allocate(SLAB_BYTES) for _ in range(2)]
        assert [is_locked(arena, memory) for memory in again] == [True, False]
        del part, again


def test_freed_neighbours_are_merged(arena: HostArena) -> None:
    pieces = [arena.allocate(SLAB_BYTES // 4) for _ in range(8)]
    assert all(is_locked(arena, piece) for piece in pieces)
    order = list(range(8))
    random.Random(1).shuffle(order)
    for number in order:
        pieces[number] = memoryview(b"")
    assert is_locked(arena, arena.allocate(SLAB_BYTES))


def test_allocations_never_overlap(arena: HostArena) -> None:
    chance = random.Random(2)
    held: dict[int, memoryview] = {}
    for number in range(400):
        if held and chance.random() < 0.5:
            mark, memory = held.popitem() if chance.random() < 0.5 else (next(iter(held)), None)
            memory = memory if memory is not None else held.pop(mark)
            assert bytes(memory) == bytes([mark % 251]) * len(memory)
        memory = arena.allocate(chance.randint(1, SLAB_BYTES // 3))
        memory[:] = bytes([number % 251]) * len(memory)
        held[number] = memory
    for mark, memory in held.items():
        assert bytes(memory) == bytes([mark % 251]) * len(memory)


class Refusing:
    """A library that locks one slab and then returns ordinary memory, as CUDA does."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.locked = 0
        self.freed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def ggml_backend_buffer_get_type(self, buffer: int) -> int:
        self.locked += 1
        return int(self._library.ggml_backend_buffer_get_type(buffer)) if self.locked == 1 else 0

    def ggml_backend_buffer_free(self, buffer: int) -> None:
        self.freed += 1
        self._library.ggml_backend_buffer_free(buffer)


def test_a_system_limit_gives_a_warning_with_a_remedy(
    library: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_arena, "SLAB_BYTES", SLAB_BYTES)
    refusing = Refusing(library)
    arena = HostArena(refusing, buffer_type(library), 4 * SLAB_BYTES)
    arena.wait_until_locked()
    assert refusing.freed == 1
    assert is_locked(arena, arena.allocate(SLAB_BYTES))
    assert "ulimit -l" in caplog.text


def test_nothing_is_locked_without_a_gpu(library: Any) -> None:
    assert lock_memory(library, 1 << 20) is None
