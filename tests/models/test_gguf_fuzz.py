"""The header reader accepts or refuses any input, with work proportional to the file."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rekindle.errors import ModelError
from rekindle.models.gguf import BUFFER_BYTES, FIXED_BYTES, HeaderReader, check_gguf
from tests.support.rounds import rounds

from .tiny import write_gguf

MOST_BYTES = 4 * BUFFER_BYTES  # the buffer, a long name, and odds and ends
EXAMPLES = settings(
    max_examples=rounds(short=150, long=1_500),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

u32s = st.one_of(st.integers(0, 13), st.sampled_from([2**31, 2**32 - 1]), st.integers(0, 2**32 - 1))
u64s = st.one_of(st.integers(0, 9), st.sampled_from([2**32, 2**60, 2**63, 2**64 - 1]))


def text(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


names = st.binary(max_size=12).map(text)
wrong_names = st.tuples(u64s, st.binary(max_size=12)).map(
    lambda it: struct.pack("<Q", it[0]) + it[1]
)
keys = st.just(text(b"general.alignment")) | names | wrong_names
kinds = st.integers(0, 12) | u32s


def value(kind: int) -> st.SearchStrategy[bytes]:
    """Make a value of a kind, sometimes an invalid one."""
    if kind == 8:
        return names | wrong_names
    if kind == 9:
        return st.tuples(u32s, u64s, st.binary(max_size=40)).map(
            lambda it: struct.pack("<IQ", it[0], it[1]) + it[2]
        )
    size = FIXED_BYTES.get(kind, 1)
    return st.binary(min_size=size, max_size=size)


fields = st.tuples(names | keys, kinds).flatmap(
    lambda it: value(it[1]).map(lambda data: it[0] + struct.pack("<I", it[1]) + data)
)
tensors = st.tuples(names, st.lists(u64s, max_size=6), u32s, u64s).map(
    lambda it: (
        it[0]
        + struct.pack(f"<I{len(it[1])}Q", len(it[1]), *it[1])
        + struct.pack("<IQ", it[2], it[3])
    )
)
counts = st.sampled_from([None] * 9 + [0, 7, 2**16, 2**63])  # None: as many as there are
headers = st.tuples(
    st.just(b"GGUF"),
    st.sampled_from([2, 3]),
    counts,
    counts,
    st.lists(fields, min_size=1, max_size=6),
    st.lists(tensors, max_size=6),
    st.binary(max_size=200),
).map(
    lambda it: b"".join(
        (
            it[0],
            struct.pack("<I", it[1]),
            struct.pack("<Q", len(it[5]) if it[2] is None else it[2]),
            struct.pack("<Q", len(it[4]) if it[3] is None else it[3]),
            *it[4],
            *it[5],
            it[6],
        )
    )
)


def check(path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept or refuse with bounded memory, and no more steps than bytes."""
    path.write_bytes(content)
    steps, advice = 0, "fetch it again"

    def require(reader: HeaderReader, size_bytes: int) -> None:
        nonlocal steps
        steps += 1
        original(reader, size_bytes)

    original: Any = HeaderReader.require
    tracemalloc.start()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(HeaderReader, "require", require)
            check_gguf(path)
    except ModelError as error:
        advice = str(error)
    finally:
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert "fetch it again" in advice
    assert peak_bytes < MOST_BYTES
    assert steps <= len(content) + 1


@pytest.mark.long
@EXAMPLES
@given(content=headers)
def test_any_header_is_accepted_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    check(tmp_path / "any.gguf", content, monkeypatch)


@pytest.mark.long
@EXAMPLES
@given(changes=st.lists(st.tuples(st.integers(0, 1 << 14), st.integers(0, 255)), max_size=8))
def test_a_whole_model_with_any_bytes_changed_is_accepted_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: list[tuple[int, int]]
) -> None:
    path = tmp_path / "tiny.gguf"
    whole = tmp_path / "whole.gguf"
    if not whole.exists():
        write_gguf(whole)
    content = bytearray(whole.read_bytes())
    for at, byte in changes:
        content[at % len(content)] = byte
    check(path, bytes(content), monkeypatch)


@pytest.mark.long
@EXAMPLES
@given(content=st.binary(max_size=400))
def test_bytes_after_the_magic_are_accepted_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    check(tmp_path / "any.gguf", b"GGUF\3\0\0\0" + content, monkeypatch)
