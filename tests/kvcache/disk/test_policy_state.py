from __future__ import annotations

import logging
from pathlib import Path

import pytest

from rekindle.kvcache.disk.policy_state import FILE, read_learnt, write_learnt
from rekindle.kvcache.eviction.duel import Duel

LEARNT = {"ram": Duel().dump(), "disk": Duel().dump()}


def test_what_was_written_last_is_read(tmp_path: Path) -> None:
    assert read_learnt(tmp_path) == {}
    write_learnt(tmp_path, {"ram": 1})
    write_learnt(tmp_path, LEARNT)
    assert read_learnt(tmp_path) == LEARNT
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


def test_whatever_byte_is_damaged_it_is_learnt_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_learnt(tmp_path, LEARNT)
    whole = (tmp_path / FILE).read_bytes()
    damaged = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(0, 400, 7)]
    damaged += [whole[:at] for at in (0, 1, 20, 60, len(whole) - 1)]
    damaged += [whole + b" ", bytes(len(whole)), whole.replace(b"learnt 2", b"learnt 1")]
    for content in damaged:
        (tmp_path / FILE).write_bytes(content)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert read_learnt(tmp_path) == {}
        assert "learnt again" in caplog.text


@pytest.mark.parametrize(
    "learnt",
    [None, [], {}, {"counts": 1, "favourite": "frequency"}, {**Duel().dump(), "favourite": "luck"}],
)
def test_what_no_tier_has_learnt_is_refused(learnt: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        Duel().load(learnt)
