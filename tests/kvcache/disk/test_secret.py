"""Tests the secret that authenticates blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.errors import ConfigError, CorruptBlock
from rekindle.kvcache.disk.check import check
from rekindle.kvcache.disk.folder import open_folder
from rekindle.kvcache.disk.secret import (
    SECRET_BYTES,
    parse_secret,
    read_secret,
    read_secret_file,
)
from tests.kvcache.records import chain, key_of, size_of

ONE, OTHER = b"1" * SECRET_BYTES, b"2" * SECRET_BYTES
[RECORD] = chain(1)
KEY, SIZE = key_of(RECORD), size_of(RECORD)


@given(st.binary(min_size=SECRET_BYTES, max_size=SECRET_BYTES))
def test_a_secret_is_bytes_or_hexadecimal_digits(secret: bytes) -> None:
    assert parse_secret(secret) == secret
    assert parse_secret(secret.hex().encode()) == secret
    assert parse_secret(secret.hex().upper().encode() + b"\n") == secret


@pytest.mark.parametrize(
    "raw",
    [b"", b"short", bytes(31), bytes(33), b"g" * 64, "é".encode() * 32, b"ab" * 33, b" " * 64],
)
def test_an_invalid_secret_is_refused_with_a_reason(raw: bytes) -> None:
    with pytest.raises(ConfigError, match="32 bytes or 64 hexadecimal digits"):
        parse_secret(raw)


def test_an_error_names_the_secret_file(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with pytest.raises(ConfigError, match=r"cannot read the cache secret .*key: No such file"):
        read_secret_file(path)
    path.write_bytes(b"short")
    with pytest.raises(ConfigError, match=r"cannot use the cache secret .*key: a secret is"):
        read_secret_file(path)
    path.write_bytes(ONE)
    assert read_secret_file(path) == ONE


def test_a_configured_secret_replaces_that_of_the_folder(tmp_path: Path) -> None:
    assert read_secret(tmp_path / "new", ONE) == ONE
    assert not (tmp_path / "new" / "secret").exists()
    own = read_secret(tmp_path)
    assert read_secret(tmp_path, ONE) == ONE
    assert read_secret(tmp_path) == own


def written_under(cache_dir: Path, secret: bytes | None) -> bytes:
    """A block's file as one machine writes it."""
    folder = open_folder(cache_dir, b"model", limit_bytes=1 << 20, secret=secret)
    folder.block_files.write([RECORD])
    folder.close()
    return (folder.path / "blocks" / KEY.hex()).read_bytes()


def test_machines_with_the_same_secret_verify_each_others_blocks(tmp_path: Path) -> None:
    raw = written_under(tmp_path / "one", ONE)
    there = open_folder(tmp_path / "two", b"model", limit_bytes=1 << 20, secret=ONE)
    (there.path / "blocks" / KEY.hex()).write_bytes(raw)
    assert there.block_files.read(KEY, SIZE) == RECORD
    there.close()


@pytest.mark.parametrize("secret", [OTHER, None])
def test_machines_with_different_secrets_do_not(tmp_path: Path, secret: bytes | None) -> None:
    raw = written_under(tmp_path / "one", ONE)
    there = open_folder(tmp_path / "two", b"model", limit_bytes=1 << 20, secret=secret)
    (there.path / "blocks" / KEY.hex()).write_bytes(raw)
    with pytest.raises(CorruptBlock, match="checksum"):
        there.block_files.read(KEY, SIZE)
    there.close()


def test_a_check_verifies_under_the_configured_secret(tmp_path: Path) -> None:
    written_under(tmp_path, ONE)
    [report] = check(tmp_path, repair=False, secret=ONE)
    assert (report.blocks, [each.kind for each in report.findings]) == (1, ["unknown_file"])
    [report] = check(tmp_path, repair=True, secret=OTHER)
    assert (report.is_sealed, report.blocks, report.findings) == (True, 0, ())


def test_another_secret_gets_another_folder(tmp_path: Path) -> None:
    """The other secret could not read the first folder, so that folder is neither opened nor
    changed."""
    own = open_folder(tmp_path, b"model", limit_bytes=1 << 26)
    configured = open_folder(tmp_path, b"model", limit_bytes=1 << 26, secret=ONE)
    assert own.path != configured.path
    own.close()
    configured.close()


def test_a_check_uses_the_secret_that_each_folder_is_sealed_with(tmp_path: Path) -> None:
    for secret in (None, ONE):
        folder = open_folder(tmp_path, b"model", limit_bytes=1 << 26, secret=secret)
        folder.block_files.write([RECORD])
        folder.close()
    for repair in (False, True):
        plain, sealed = check(tmp_path, repair=repair), check(tmp_path, repair=repair, secret=ONE)
        assert sorted((each.is_sealed, each.blocks) for each in plain) == [(False, 1), (True, 0)]
        assert sorted((each.is_sealed, each.blocks) for each in sealed) == [(False, 1), (False, 1)]
