"""Keys: kept as digests, found by them, and changeable while the server runs."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from rekindle.config import load_config
from rekindle.errors import ConfigError, Unauthorized
from rekindle.http.auth import CHECK_EVERY_S, KeyFile, Keys, key_digest, key_line


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "keys", key_line("bob", "bobs", admin=False))


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    path.chmod(0o600)
    return path


def opens(keys: Keys, key: str) -> bool:
    try:
        keys.caller(f"Bearer {key}")
    except Unauthorized:
        return False
    return True


def test_keys_are_kept_as_digests(path: Path) -> None:
    keys = Keys(["alpha"], admin=["beta"], file=KeyFile(path))
    assert "alpha" not in repr(vars(keys))
    assert all(opens(keys, key) for key in ("alpha", "beta", "bobs"))
    assert not opens(keys, "gamma")


class NeverWalked(dict[bytes, bool]):
    """Known keys that can be looked up and not gone through."""

    def __iter__(self) -> Iterator[bytes]:
        raise AssertionError("every key was looked at")

    items = keys = values = __iter__  # type: ignore[assignment]


def test_ten_thousand_keys_take_no_longer_than_one(tmp_path: Path) -> None:
    lines = [key_line(f"k{number}", f"key{number}", admin=False) for number in range(5000)]
    file = KeyFile(write(tmp_path / "many", *lines))
    keys = Keys([f"flag{number}" for number in range(5000)], file=file)
    keys._given, file._keys = NeverWalked(keys._given), NeverWalked(file._keys)
    assert opens(keys, "key4999")
    assert opens(keys, "flag4999")
    assert not opens(keys, "key5000")


def test_a_key_may_come_in_either_of_two_headers() -> None:
    keys = Keys(["alpha", "beta"], admin=["root"])
    assert keys.caller(None, "alpha") == keys.caller("Bearer alpha")
    assert keys.caller(None, "root").admin
    assert keys.caller("Basic nonsense", "alpha") == keys.caller("Bearer wrong", "alpha")
    assert keys.caller("Bearer beta", "alpha") == keys.caller("Bearer beta")
    for header in ("wrong", "", "Bearer alpha", "alph"):
        with pytest.raises(Unauthorized, match="x-api-key"):
            keys.caller(None, header)


def test_a_caller_is_known_by_its_key_wherever_the_key_is_written(path: Path) -> None:
    """The salt is the key's own: state stays reachable when a key moves into the file."""
    given, filed = Keys(["bobs"]), Keys(file=KeyFile(path))
    assert given.caller("Bearer bobs") == filed.caller("Bearer bobs")
    assert given.caller("Bearer bobs").salt == key_digest("bobs")


def test_a_key_that_is_also_an_admins_is_an_admins() -> None:
    keys = Keys(["same", "other"], admin=["same"])
    assert keys.caller("Bearer same").admin
    assert not keys.caller("Bearer other").admin


def test_of_two_lines_for_one_key_the_admins_counts(tmp_path: Path) -> None:
    lines = [key_line(name, "same", admin=name == "b") for name in "abc"]
    keys = Keys(file=KeyFile(write(tmp_path / "twice", *lines)))
    assert keys.caller("Bearer same").admin


def test_every_kind_of_key_in_the_settings_is_accepted(path: Path) -> None:
    keys = Keys.of(load_config({"api_key": "a", "admin_key": "b", "api_keys_file": path}, {}))
    assert [opens(keys, key) for key in ("a", "b", "bobs", "c")] == [True, True, True, False]
    assert Keys.of(load_config({}, {})).is_open


def test_a_file_without_keys_opens_nothing(tmp_path: Path) -> None:
    """It may have been emptied to lock somebody out."""
    keys = Keys(file=KeyFile(write(tmp_path / "keys", "# nobody")))
    assert not keys.is_open
    with pytest.raises(Unauthorized):
        keys.caller(None)


def test_comments_blank_lines_and_roles_are_read(tmp_path: Path) -> None:
    lines = (
        "# the staff",
        "",
        f"  {key_line('bob', 'bobs', admin=False)}   # until May",
        key_line("root", "roots", admin=True),
    )
    keys = Keys(file=KeyFile(write(tmp_path / "keys", *lines)))
    assert not keys.caller("Bearer bobs").admin
    assert keys.caller("Bearer roots").admin


@pytest.mark.parametrize(
    "line",
    [
        "bob",
        "bob bobs-canary",
        "bob blake3:abc",
        "bob sha256:" + "0" * 64,
        "bob blake3:" + "0" * 64 + " boss",
        "bob blake3:" + "0" * 64 + " admin admin",
        "blake3:" + "0" * 64,
    ],
)
def test_a_bad_line_is_named_and_not_repeated(tmp_path: Path, line: str) -> None:
    write(tmp_path / "keys", "# first", line)
    with pytest.raises(ConfigError, match=r"line 2 of .*keys") as refused:
        KeyFile(tmp_path / "keys")
    assert "canary" not in str(refused.value)


def test_a_missing_file_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the keys"):
        KeyFile(tmp_path / "keys")
    (tmp_path / "latin").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="not text"):
        KeyFile(tmp_path / "latin")


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, True), (0o604, True)])
def test_a_file_that_others_may_read_is_warned_about(
    path: Path, caplog: pytest.LogCaptureFixture, mode: int, warned: bool
) -> None:
    path.chmod(mode)
    KeyFile(path)
    assert bool(caplog.records) == warned


def test_a_changed_file_takes_effect_within_a_second(path: Path, clock: Clock) -> None:
    keys = Keys(file=KeyFile(path, clock))
    write(path, key_line("eve", "eves-key", admin=False), key_line("x", "y", admin=False))
    assert (opens(keys, "bobs"), opens(keys, "eves-key")) == (True, False)
    clock.now += CHECK_EVERY_S
    assert (opens(keys, "bobs"), opens(keys, "eves-key")) == (False, True)


def test_a_file_replaced_by_one_of_the_same_size_and_time_is_seen(
    path: Path, tmp_path: Path, clock: Clock
) -> None:
    keys = Keys(file=KeyFile(path, clock))
    other = write(tmp_path / "new", key_line("eve", "eves", admin=False))
    stamp = path.stat()
    os.utime(other, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert other.stat().st_size == stamp.st_size
    other.replace(path)
    clock.now += CHECK_EVERY_S
    assert (opens(keys, "bobs"), opens(keys, "eves")) == (False, True)


def test_the_file_is_looked_at_once_a_second_and_read_when_it_changed(
    path: Path, clock: Clock
) -> None:
    file = KeyFile(path, clock)
    with patch.object(Path, "stat", autospec=True, side_effect=Path.stat) as looked:
        for _ in range(100):
            file.keys()
        assert looked.call_count == 0
        clock.now += CHECK_EVERY_S
        for _ in range(100):
            file.keys()
        assert looked.call_count == 1


@pytest.mark.parametrize("gone", [False, True])
def test_a_file_that_turned_bad_keeps_the_keys_and_complains_once(
    path: Path, clock: Clock, caplog: pytest.LogCaptureFixture, gone: bool
) -> None:
    keys = Keys(file=KeyFile(path, clock))
    good = path.read_text()
    if gone:
        path.unlink()
    else:
        write(path, key_line("eve", "eves", admin=False), "nonsense here too")
    for _ in range(3):
        clock.now += CHECK_EVERY_S
        assert (opens(keys, "bobs"), opens(keys, "eves")) == (True, False)
    [complaint] = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert ("line 2" in complaint.getMessage()) != gone
    write(path, good, key_line("eve", "eves", admin=False))
    clock.now += CHECK_EVERY_S
    assert (opens(keys, "bobs"), opens(keys, "eves")) == (True, True)
