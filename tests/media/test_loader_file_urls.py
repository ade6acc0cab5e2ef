"""Files are read from the allowed folders only."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rekindle.errors import BadMedia, MediaRefused
from rekindle.media.loader import read_file_url

MAX_BYTES = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    allowed = tmp_path / "allowed"
    (allowed / "sub").mkdir(parents=True)
    (allowed / "a b.png").write_bytes(b"a picture")
    (allowed / "sub" / "c.png").write_bytes(b"another")
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "allowed-not").mkdir()
    (tmp_path / "allowed-not" / "d.png").write_bytes(b"secret")
    return allowed


def read(url: str, *folders: Path) -> bytes:
    return read_file_url(url, folders, MAX_BYTES)


def test_files_in_an_allowed_folder_are_read(folder: Path) -> None:
    assert read(f"file://{folder}/a%20b.png", folder) == b"a picture"
    assert read(f"file://localhost{folder}/sub/c.png", folder) == b"another"
    assert read(f"FILE://{folder}/sub/../a b.png", folder) == b"a picture"
    assert read(f"file://{folder}/sub/c.png", folder.parent / "none", folder) == b"another"


def test_without_an_allowed_folder_no_file_is_read(folder: Path) -> None:
    with pytest.raises(MediaRefused, match="--media-folder"):
        read(f"file://{folder}/sub/c.png")


@pytest.mark.parametrize(
    "path",
    [
        "../secret", "%2e%2e/secret", "sub/../../secret", "../allowed-not/d.png", "none.png", "",
        "sub", "a b.png/x", "a%00b.png", "link", "linked-folder/secret", "pipe", "%ff",
    ],
)  # fmt: skip
def test_other_paths_are_rejected_without_a_reason(path: str, folder: Path) -> None:
    (folder / "link").symlink_to(folder.parent / "secret")
    (folder / "linked-folder").symlink_to(folder.parent)
    os.mkfifo(folder / "pipe")
    with pytest.raises(MediaRefused, match=r"^There is no such file in an allowed folder"):
        read(f"file://{folder}/{path}", folder)


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "file:///dev/zero", "file://elsewhere/etc/passwd", "file:x"]
)
def test_paths_outside_of_the_folders_are_rejected(url: str, folder: Path) -> None:
    with pytest.raises(MediaRefused, match="no such file"):
        read(url, folder)


def test_a_link_within_the_folder_is_followed(folder: Path) -> None:
    (folder / "link.png").symlink_to(folder / "sub" / "c.png")
    assert read(f"file://{folder}/link.png", folder) == b"another"


def test_a_link_created_after_the_check_is_not_followed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "late").symlink_to(folder.parent)
    monkeypatch.setattr(os.path, "realpath", str)  # the check saw a plain folder there
    with pytest.raises(MediaRefused, match="no such file"):
        read(f"file://{folder}/late/secret", folder)


def test_a_large_file_is_rejected(folder: Path) -> None:
    with (folder / "large").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(BadMedia, match="at most 1 MiB"):
        read(f"file://{folder}/large", folder)


@pytest.mark.parametrize("url", ["file://sub/a.png", "file:///sub/a.png", "file:////sub//a.png"])
def test_a_path_may_begin_at_the_folder(tmp_path: Path, url: str) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.png").write_bytes(b"here")
    assert read_file_url(url, [tmp_path], 100) == b"here"


@pytest.mark.parametrize("url", ["file://../a.png", "file:///../a.png", "file://sub/../../a.png"])
def test_a_path_that_begins_at_the_folder_stays_below_it(tmp_path: Path, url: str) -> None:
    (tmp_path / "a.png").write_bytes(b"outside")
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    with pytest.raises(MediaRefused):
        read_file_url(url, [folder], 100)
