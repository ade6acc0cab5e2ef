from __future__ import annotations

import random
import struct
from pathlib import Path

import gguf
import pytest

from rekindle.errors import ModelError
from rekindle.models import gguf as gguf_module
from rekindle.models.gguf import BLOCKS, check_gguf

from .tiny import write_gguf


def field(key: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value


def tensor(kind: int, offset: int, *shape: int) -> bytes:
    head = struct.pack("<Q", 1) + b"t" + struct.pack("<I", len(shape))
    return head + struct.pack(f"<{len(shape)}QIQ", *shape, kind, offset)


def gguf_file(path: Path, fields: list[bytes], tensors: list[bytes], *, data_bytes: int) -> Path:
    counts = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(fields))
    head = counts + b"".join(fields) + b"".join(tensors)
    path.write_bytes(head + bytes(-len(head) % 32) + bytes(data_bytes))
    return path


ONE_FIELD = [field("x", 4, bytes(4))]


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf")


def test_a_whole_file_passes(whole: Path) -> None:
    check_gguf(whole)


def test_a_real_model_passes(smollm2_path: Path) -> None:
    check_gguf(smollm2_path)


def test_a_large_vocabulary_passes(tmp_path: Path) -> None:
    check_gguf(write_gguf(tmp_path / "wide.gguf", vocabulary=60_000))


def test_every_truncation_is_refused(whole: Path, tmp_path: Path) -> None:
    content, cut = whole.read_bytes(), tmp_path / "cut.gguf"
    for length in range(0, len(content), 7):
        cut.write_bytes(content[:length])
        with pytest.raises(ModelError, match="fetch it again"):
            check_gguf(cut)


def test_one_byte_short_is_refused(whole: Path) -> None:
    whole.write_bytes(whole.read_bytes()[:-1])
    with pytest.raises(ModelError, match="truncated"):
        check_gguf(whole)


def test_damaged_files_pass_or_are_refused_and_never_crash(whole: Path, tmp_path: Path) -> None:
    content, damaged = whole.read_bytes(), tmp_path / "damaged.gguf"
    rng = random.Random(7)
    refused = 0
    for _ in range(600):
        copy = bytearray(content)
        for _ in range(rng.randint(1, 8)):
            copy[rng.randrange(800)] = rng.choice([0, 1, 9, 0x7F, 0xFF, rng.randrange(256)])
        damaged.write_bytes(copy[: rng.choice([len(copy), rng.randrange(len(copy))])])
        try:
            check_gguf(damaged)
        except ModelError:
            refused += 1
    assert refused > 300


@pytest.mark.parametrize(
    "content", [b"", b"GG", b"GGUF", b"<!doctype html><html>", b"version https://git-lfs" * 9]
)
def test_another_format_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match="not a usable GGUF"):
        check_gguf(path)


@pytest.mark.parametrize("version", [0, 1, 4, 0x03000000])
def test_an_unknown_version_is_refused(whole: Path, version: int) -> None:
    content = bytearray(whole.read_bytes())
    content[4:8] = struct.pack("<I", version)
    whole.write_bytes(content)
    with pytest.raises(ModelError, match="version"):
        check_gguf(whole)


@pytest.mark.parametrize("counts", [(2**63, 1), (1, 2**63), (1, 0)])
def test_absurd_counts_are_refused(whole: Path, counts: tuple[int, int]) -> None:
    content = bytearray(whole.read_bytes())
    content[8:24] = struct.pack("<QQ", *counts)
    whole.write_bytes(content)
    with pytest.raises(ModelError, match="claims"):
        check_gguf(whole)


def test_an_array_longer_than_the_file_is_refused_immediately(tmp_path: Path) -> None:
    for kind in (0, 8, 9):
        array = field("x", 9, struct.pack("<IQ", kind, 2**60))
        with pytest.raises(ModelError, match="not a usable GGUF"):
            check_gguf(gguf_file(tmp_path / "a.gguf", [array], [], data_bytes=64))


def test_many_long_arrays_are_refused_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_module, "MAX_ITEMS", 40_000)
    empty_strings = field("x", 9, struct.pack("<IQ", 8, 15_000) + bytes(120_000))
    with pytest.raises(ModelError, match="40000 values"):
        check_gguf(gguf_file(tmp_path / "a.gguf", [empty_strings] * 3, [], data_bytes=0))


def test_deeply_nested_arrays_are_refused(tmp_path: Path) -> None:
    nested = field("x", 9, struct.pack("<IQ", 9, 1) * 50)
    with pytest.raises(ModelError, match="unknown type"):
        check_gguf(gguf_file(tmp_path / "a.gguf", [nested], [], data_bytes=64))


def test_the_alignment_of_the_file_decides_where_tensors_start(tmp_path: Path) -> None:
    aligned = [field("general.alignment", 4, struct.pack("<I", 1024))]
    path = tmp_path / "a.gguf"
    check_gguf(gguf_file(path, aligned, [tensor(0, 1024, 8)], data_bytes=2048))
    with pytest.raises(ModelError, match="truncated"):
        check_gguf(gguf_file(path, aligned, [tensor(0, 1024, 8)], data_bytes=1100))


@pytest.mark.parametrize(("kind", "value"), [(4, 0), (4, 48), (4, 2**31), (5, 32)])
def test_an_invalid_alignment_is_refused(tmp_path: Path, kind: int, value: int) -> None:
    fields = [field("general.alignment", kind, struct.pack("<I", value))]
    with pytest.raises(ModelError, match="alignment"):
        check_gguf(gguf_file(tmp_path / "a.gguf", fields, [], data_bytes=64))


def test_a_file_of_a_split_may_have_no_tensors(tmp_path: Path) -> None:
    check_gguf(gguf_file(tmp_path / "a.gguf", ONE_FIELD, [], data_bytes=0))


def test_the_size_of_an_unknown_tensor_type_is_not_checked(tmp_path: Path) -> None:
    check_gguf(gguf_file(tmp_path / "a.gguf", ONE_FIELD, [tensor(9999, 0, 2**40)], data_bytes=0))


@pytest.mark.parametrize(
    "bad",
    [
        tensor(0, 7, 8),
        tensor(2, 0, 33),
        tensor(0, 0, 1, 1, 1, 1, 1),
        tensor(0, 0, 2**63, 2**63),
        tensor(0, 2**63, 8),
    ],
    ids=["unaligned", "half a block", "five dimensions", "overflowing", "far away"],
)
def test_an_impossible_tensor_is_refused(tmp_path: Path, bad: bytes) -> None:
    with pytest.raises(ModelError, match="not a usable GGUF"):
        check_gguf(gguf_file(tmp_path / "a.gguf", ONE_FIELD, [bad], data_bytes=4096))


def test_a_missing_file_and_a_folder_are_model_errors(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "gone"):
        with pytest.raises(ModelError, match="no model file"):
            check_gguf(path)


def test_every_type_of_the_reference_package_has_its_size() -> None:
    reference = {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    del reference[9]  # Q8_1: the package says 40 bytes, ggml itself 36; files never hold it
    assert {kind: BLOCKS[kind] for kind in reference} == reference
