from __future__ import annotations

import logging
from pathlib import Path

import pytest

from rekindle.kvcache.disk.policy_state import FILE, read_policy_state, write_policy_state
from rekindle.kvcache.eviction.hit_density import HitDensity

STATE = {"ram": HitDensity().dump(), "disk": HitDensity().dump()}


def test_the_state_that_was_written_last_is_read(tmp_path: Path) -> None:
    assert read_policy_state(tmp_path) == {}
    write_policy_state(tmp_path, {"ram": 1})
    write_policy_state(tmp_path, STATE)
    assert read_policy_state(tmp_path) == STATE
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_damaged_or_of_an_unknown_version_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_policy_state(tmp_path, STATE)
    whole = (tmp_path / FILE).read_bytes()
    damaged = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(0, 400, 7)]
    damaged += [whole[:at] for at in (0, 1, 20, 60, len(whole) - 1)]
    damaged += [whole + b" ", bytes(len(whole)), whole.replace(b"learnt 3", b"learnt 4")]
    for content in damaged:
        (tmp_path / FILE).write_bytes(content)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert read_policy_state(tmp_path) == {}
        assert "starts learning again" in caplog.text
