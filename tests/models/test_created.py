"""Records of created models survive, one file each, whatever their names are."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.models.created import read_created, remove_created, write_created

NAMES = ("one", "team/two:small", "..", "a.b", "a%2Eb", "Grüße")


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    for name in NAMES:
        write_created(tmp_path, name, {"from": name, "parameters": {"temperature": 0.5}})
    found = read_created(tmp_path)
    assert set(found) == set(NAMES)
    assert all(found[name]["from"] == name for name in NAMES)
    assert {path.parent for path in tmp_path.rglob("*.json")} == {tmp_path / "created"}
    remove_created(tmp_path, "..")
    remove_created(tmp_path, "never there")
    assert set(read_created(tmp_path)) == {*NAMES} - {".."}


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"from": 1}', b"\xff"])
def test_a_damaged_record_is_skipped(tmp_path: Path, content: bytes) -> None:
    write_created(tmp_path, "good", {"from": "x"})
    (tmp_path / "created" / "bad.json").write_bytes(content)
    assert list(read_created(tmp_path)) == ["good"]
