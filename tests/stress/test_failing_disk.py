"""A disk whose calls fail costs only reuse.

Requests are answered, there is one warning, and nothing is reported as stored that may be lost.
"""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from rekindle.protocol.admin import EntryInfo, ShowEntry
from rekindle.protocol.requests import Names
from rekindle.runtime.storage.storage import MIN_QUEUE_BYTES
from tests.stress.storage_harness import StorageHarness, load
from tests.stress.trouble import Trouble
from tests.support.fake import FakeEngine


@pytest.mark.parametrize(
    ("error", "state"),
    [(errno.ENOSPC, "full"), (errno.EDQUOT, "full"), (errno.EROFS, "failing"),
     (errno.EIO, "failing"), (errno.EACCES, "failing")],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["open", "writev", "fsync", "replace"])
def test_any_failing_call_causes_one_warning_and_recovers(
    tmp_path: Path, kind: str, error: int, state: str
) -> None:
    trouble = Trouble((kind,))
    harness = StorageHarness(FakeEngine(), load(tmp_path / "kv"), trouble.calls())
    trouble.error = error
    for seed in range(5):
        harness.converse(seed)
        harness.flush()
    assert harness.disk_state == state
    assert harness.stored_blocks == 0
    assert len(harness.warnings) == 1
    trouble.error = None
    harness.tick()
    harness.flush()
    assert harness.disk_state == "ok"
    assert harness.stored_blocks
    assert [note.level for note in harness.log_lines] == ["warning", "info"]
    harness.close()


def test_after_a_failed_fsync_nothing_is_acknowledged_and_the_handle_is_not_retried(
    tmp_path: Path,
) -> None:
    """The kernel may have dropped the pages, so a second fsync of the same handle would wrongly
    succeed."""
    trouble = Trouble(("fsync",), error=errno.EIO)
    harness = StorageHarness(FakeEngine(), load(tmp_path / "kv"), trouble.calls())
    reply = harness.ask(range(100, 140), names=Names(return_cache_key=True))
    harness.flush()
    assert harness.stored_blocks == 0
    key = reply.finished.cache.new_cache_key
    assert key is not None
    info = harness.administer(ShowEntry(key))
    assert isinstance(info, EntryInfo)
    assert info.stored_tokens == 0
    trouble.error = None
    harness.tick()
    harness.flush()
    assert harness.stored_blocks
    assert most_fsyncs_of_a_file(trouble.log) == 1
    harness.close()
    again = StorageHarness(FakeEngine(), load(tmp_path / "kv"))
    assert again.ask([*range(100, 140), 7]).finished.cache.tier == "disk"
    again.close()


def most_fsyncs_of_a_file(log: list[tuple[str, object]]) -> int:
    """The highest number of fsync calls on the handle of one file."""
    tries: dict[object, int] = {}
    most = 0
    for kind, handle in log:
        if kind == "open":
            tries[handle] = 0
        elif kind.startswith("fsync") and handle in tries:
            tries[handle] += 1
            most = max(most, tries[handle])
    return most


def test_a_vanished_folder_causes_one_warning(tmp_path: Path) -> None:
    harness = StorageHarness(FakeEngine(), load(tmp_path / "kv"))
    first = harness.converse(1)
    harness.flush()
    shutil.rmtree(tmp_path / "kv")
    for seed in range(2, 6):
        harness.tick()
        harness.converse(seed)
        harness.flush()
    assert harness.disk_state == "failing"
    assert len(harness.warnings) == 1
    assert harness.ask([*first.turn.tokens, 3]).reused
    harness.close()


def test_the_state_in_a_vanished_folder_is_computed_again(tmp_path: Path) -> None:
    harness = StorageHarness(FakeEngine(), load(tmp_path / "kv"))
    harness.converse(1)
    harness.close()
    again = StorageHarness(FakeEngine(), load(tmp_path / "kv"))
    shutil.rmtree(tmp_path / "kv")
    again.converse(1)
    again.close()


def test_a_disk_counts_as_healthy_only_after_a_write(tmp_path: Path) -> None:
    """A successful read or a minute of waiting proves nothing."""
    trouble = Trouble(("writev",))
    harness = StorageHarness(
        FakeEngine(), load(tmp_path / "kv", ram_cache=MIN_QUEUE_BYTES + 12_000), trouble.calls()
    )
    harness.ask(range(100, 120))
    harness.flush()
    trouble.error = errno.EIO
    harness.converse(1)
    harness.flush()
    assert harness.disk_state == "failing"
    trouble.gate.clear()  # the next write fails only after a while
    harness.tick()
    assert harness.ask([*range(100, 120), 7]).finished.cache.tier == "disk"
    trouble.gate.set()
    harness.flush()
    assert [note.level for note in harness.log_lines] == ["warning"]
    harness.close()


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_blocks_waiting_to_be_written_are_lost_without_further_damage(
    tmp_path: Path, error: int
) -> None:
    """The blocks had left RAM for the disk, and later blocks were stored below them.

    Then the disk failed.
    """
    trouble = Trouble(("open",))
    harness = StorageHarness(
        FakeEngine(), load(tmp_path / "kv", ram_cache=MIN_QUEUE_BYTES + 24_000), trouble.calls()
    )
    trouble.gate.clear()
    talks = [[seed, *range(100, 130)] for seed in range(4)]
    for _ in range(3):
        talks = [[*tokens, *harness.ask(tokens).tokens, 7] for tokens in talks]
    trouble.error = error
    trouble.gate.set()
    harness.flush()
    for seed in range(4):
        harness.converse(seed)
        harness.flush()
    assert harness.used_bytes_hold()
    harness.close()


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENOMEM])
def test_running_out_of_file_handles_loses_no_block(tmp_path: Path, error: int) -> None:
    """Running out of file handles does not mean that files are damaged, so none is quarantined."""
    harness = StorageHarness(FakeEngine(), load(tmp_path / "kv"))
    reply = harness.converse(1, turns=3)
    harness.close()
    trouble = Trouble(("open",))
    again = StorageHarness(FakeEngine(), load(tmp_path / "kv"), trouble.calls())
    trouble.error = error
    assert again.ask(reply.turn.tokens.ids).reused == 0
    trouble.error = None
    again.flush()
    assert again.tier.counts.corrupt_blocks == 0
    assert not list((again.tier.folder.path / "aside").iterdir())
    again.close()
