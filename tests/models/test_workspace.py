from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from threading import Event, Thread

import pytest

from rekindle.errors import ModelError
from rekindle.models.workspace import publish, require_room, workspace

from .tiny import RecordedProgress


def test_a_finished_pull_leaves_no_folder(models_dir: Path, progress: RecordedProgress) -> None:
    with workspace(models_dir / "a.gguf", models_dir, progress) as folder:
        (folder / "part").touch()
    assert not folder.exists()


def interrupted_pull(final: Path, models_dir: Path, progress: RecordedProgress) -> Path:
    """Return the folder that an interrupted pull leaves, with half of a file."""
    with suppress(KeyboardInterrupt), workspace(final, models_dir, progress) as folder:
        (folder / "part").write_text("half")
        raise KeyboardInterrupt
    return folder


def test_a_failed_pull_can_be_resumed(models_dir: Path, progress: RecordedProgress) -> None:
    interrupted_pull(models_dir / "a", models_dir, progress)
    with workspace(models_dir / "a", models_dir, progress) as folder:
        assert (folder / "part").read_text() == "half"


def test_another_pull_removes_the_folder_of_a_failed_one(
    models_dir: Path, progress: RecordedProgress
) -> None:
    left = interrupted_pull(models_dir / "a", models_dir, progress)
    with workspace(models_dir / "b", models_dir, progress):
        assert not left.exists()


def test_the_folder_of_a_running_pull_is_kept(models_dir: Path, progress: RecordedProgress) -> None:
    with workspace(models_dir / "a", models_dir, progress) as one:
        (one / "part").touch()
        with workspace(models_dir / "b", models_dir, progress):
            assert (one / "part").exists()


def test_a_second_pull_of_one_file_waits_for_the_first(
    models_dir: Path, progress: RecordedProgress
) -> None:
    entered = Event()

    def second() -> None:
        with workspace(models_dir / "a", models_dir, progress):
            entered.set()

    thread = Thread(target=second)
    with workspace(models_dir / "a", models_dir, progress):
        thread.start()
        assert not entered.wait(0.3)
    thread.join(10)
    assert entered.is_set()
    assert "Waiting" in progress.tasks[0][0]


def test_files_of_the_same_name_have_separate_workspaces(
    models_dir: Path, progress: RecordedProgress
) -> None:
    with (
        workspace(models_dir / "x" / "a", models_dir, progress) as one,
        workspace(models_dir / "y" / "a", models_dir, progress) as two,
    ):
        assert one != two


def test_publishing_replaces_the_old_file(tmp_path: Path) -> None:
    part, final = tmp_path / "part", tmp_path / "deep" / "final"
    for content in ("old", "new"):
        part.write_text(content)
        publish(part, final)
    assert final.read_text() == "new"
    assert not part.exists()


def test_a_full_disk_is_reported_before_the_download(tmp_path: Path) -> None:
    require_room(tmp_path, 1)
    with pytest.raises(ModelError, match=r"free\. Free some space"):
        require_room(tmp_path, 1 << 60)
