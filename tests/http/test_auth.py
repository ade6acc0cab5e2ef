"""API keys are stored as digests, and a key file may change while the server runs."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from rekindle.errors import ConfigError, Unauthorized
from rekindle.http.auth import Keys
from rekindle.http.key_file import RELOAD_INTERVAL_S, KeyFile, KnownKey, key_digest, key_line


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


def test_keys_are_stored_as_digests(path: Path) -> None:
    keys = Keys(["alpha"], admin=["beta"], file=KeyFile(path))
    assert "alpha" not in repr(vars(keys))
    assert all(opens(keys, key) for key in ("alpha", "beta", "bobs"))
    assert not opens(keys, "gamma")


class NeverWalked(dict[bytes, KnownKey]):
    """Keys that can be looked up but not iterated over."""

    def __iter__(self) -> Iterator[bytes]:
        raise AssertionError("the lookup iterated over all keys")

    items = keys = values = __iter__  # type: ignore[assignment]


def test_a_lookup_does_not_iterate_over_all_keys(tmp_path: Path) -> None:
    lines = [key_line(f"k{number}", f"key{number}", admin=False) for number in range(5000)]
    file = KeyFile(write(tmp_path / "many", *lines))
    keys = Keys([f"flag{number}" for number in range(5000)], file=file)
    keys._given, file._keys = NeverWalked(keys._given), NeverWalked(file._keys)
    assert opens(keys, "key4999")
    assert opens(keys, "flag4999")
    assert not opens(keys, "key5000")


def test_a_key_is_accepted_in_either_of_two_headers() -> None:
    keys = Keys(["alpha", "beta"], admin=["root"])
    assert keys.caller(None, "alpha") == keys.caller("Bearer alpha")
    assert keys.caller(None, "root").admin
    assert keys.caller("Basic nonsense", "alpha") == keys.caller("Bearer wrong", "alpha")
    assert keys.caller("Bearer beta", "alpha") == keys.caller("Bearer beta")
    for header in ("wrong", "Bearer alpha", "alph"):
        with pytest.raises(Unauthorized, match="key is wrong"):
            keys.caller(None, header)
    with pytest.raises(Unauthorized, match=r"needs an API key.*x-api-key"):
        keys.caller(None, "")


def test_a_key_has_the_same_salt_in_the_settings_and_in_the_file(path: Path) -> None:
    """A tenant keeps its cache when its key moves into the file."""
    given, filed = Keys(["bobs"]), Keys(file=KeyFile(path))
    assert given.caller("Bearer bobs").salt == filed.caller("Bearer bobs").salt
    assert given.caller("Bearer bobs").salt == key_digest("bobs")


def test_a_key_listed_as_both_user_and_admin_is_admin() -> None:
    keys = Keys(["same", "other"], admin=["same"])
    assert keys.caller("Bearer same").admin
    assert not keys.caller("Bearer other").admin


def test_a_key_with_one_admin_line_among_several_is_admin(tmp_path: Path) -> None:
    lines = [key_line(name, "same", admin=name == "b") for name in "abc"]
    keys = Keys(file=KeyFile(write(tmp_path / "twice", *lines)))
    assert keys.caller("Bearer same").admin


def test_an_empty_key_file_does_not_open_the_server(tmp_path: Path) -> None:
    """It may have been emptied to revoke all keys."""
    keys = Keys(file=KeyFile(write(tmp_path / "keys", "# nobody")))
    assert not keys.is_open
    with pytest.raises(Unauthorized):
        keys.caller(None)


def test_a_key_file_may_have_comments_blank_lines_and_roles(tmp_path: Path) -> None:
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
def test_an_invalid_line_is_reported_by_number_and_not_quoted(tmp_path: Path, line: str) -> None:
    write(tmp_path / "keys", "# first", line)
    with pytest.raises(ConfigError, match=r"line 2 of .*keys") as refused:
        KeyFile(tmp_path / "keys")
    assert "canary" not in str(refused.value)


def test_a_missing_or_unreadable_file_fails_at_startup(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the keys"):
        KeyFile(tmp_path / "keys")
    (tmp_path / "latin").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="not text"):
        KeyFile(tmp_path / "latin")


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, True), (0o604, True)])
def test_a_file_that_other_users_can_read_is_warned_about(
    path: Path, caplog: pytest.LogCaptureFixture, mode: int, warned: bool
) -> None:
    path.chmod(mode)
    KeyFile(path)
    assert bool(caplog.records) == warned


def test_a_changed_file_takes_effect_within_a_second(path: Path, clock: Clock) -> None:
    keys = Keys(file=KeyFile(path, clock))
    write(path, key_line("eve", "eves-key", admin=False), key_line("x", "y", admin=False))
    assert (opens(keys, "bobs"), opens(keys, "eves-key")) == (True, False)
    clock.now += RELOAD_INTERVAL_S
    assert (opens(keys, "bobs"), opens(keys, "eves-key")) == (False, True)


def test_a_replacement_of_the_same_size_and_time_is_noticed(
    path: Path, tmp_path: Path, clock: Clock
) -> None:
    keys = Keys(file=KeyFile(path, clock))
    other = write(tmp_path / "new", key_line("eve", "eves", admin=False))
    stamp = path.stat()
    os.utime(other, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert other.stat().st_size == stamp.st_size
    other.replace(path)
    clock.now += RELOAD_INTERVAL_S
    assert (opens(keys, "bobs"), opens(keys, "eves")) == (False, True)


def test_the_file_is_checked_at_most_once_a_second(path: Path, clock: Clock) -> None:
    file = KeyFile(path, clock)
    with patch.object(Path, "stat", autospec=True, side_effect=Path.stat) as looked:
        for _ in range(100):
            file.keys()
        assert looked.call_count == 0
        clock.now += RELOAD_INTERVAL_S
        for _ in range(100):
            file.keys()
        assert looked.call_count == 1


@pytest.mark.parametrize("gone", [False, True])
def test_an_invalid_change_is_logged_once_and_the_old_keys_stay(
    path: Path, clock: Clock, caplog: pytest.LogCaptureFixture, gone: bool
) -> None:
    keys = Keys(file=KeyFile(path, clock))
    good = path.read_text()
    if gone:
        path.unlink()
    else:
        write(path, key_line("eve", "eves", admin=False), "nonsense here too")
    for _ in range(3):
        clock.now += RELOAD_INTERVAL_S
        assert (opens(keys, "bobs"), opens(keys, "eves")) == (True, False)
    [complaint] = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert ("line 2" in complaint.getMessage()) != gone
    write(path, good, key_line("eve", "eves", admin=False))
    clock.now += RELOAD_INTERVAL_S
    assert (opens(keys, "bobs"), opens(keys, "eves")) == (True, True)
