"""Files that `file:` URLs name, inside the folders that the operator allows and nowhere else."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from rekindle.media.errors import BadMedia, MediaRefused

_DIRECTORY = getattr(os, "O_DIRECTORY", 0)
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # a pipe would block the open


def read_file_url(url: str, folders: Sequence[Path], most_bytes: int) -> bytes:
    """The file's bytes; raises MediaRefused for anything that is not a file in a folder.

    Whether a file outside of them exists is not told.
    """
    if not folders:
        raise MediaRefused(
            "`file:` URLs are not read: this server's operator has allowed no folder with "
            "--media-folder. Send a `data:` URL."
        )
    try:
        path = Path(os.path.realpath(_path(url)))
        folder = next(each for each in map(_resolved, folders) if path.is_relative_to(each))
        descriptor = _open_below(folder, path.relative_to(folder))
    except (OSError, ValueError, StopIteration):
        raise MediaRefused("There is no such file in a folder that may be read.") from None
    with os.fdopen(descriptor, "rb") as file:
        if os.fstat(descriptor).st_size > most_bytes:
            raise BadMedia(f"A file to read may have at most {most_bytes >> 20} MiB.")
        return file.read(most_bytes)


def _path(url: str) -> str:
    parts = urlsplit(url)
    path = unquote(parts.path, errors="strict")
    if parts.netloc not in ("", "localhost") or not path.startswith("/") or "\0" in path:
        raise ValueError("not a path of this machine")
    return path


def _resolved(folder: Path) -> Path:
    return Path(os.path.realpath(folder))


def _open_below(folder: Path, relative: Path) -> int:
    """Open it step by step from the folder, so that no link that was put there meanwhile is
    followed out of it."""
    flags = os.O_RDONLY | _NO_FOLLOW
    opened = os.open(folder, flags | _DIRECTORY)
    for number, step in enumerate(relative.parts, 1):
        above = opened
        kind = _NO_WAIT if number == len(relative.parts) else _DIRECTORY
        try:
            opened = os.open(step, flags | kind, dir_fd=above)
        finally:
            os.close(above)
    if not stat.S_ISREG(os.fstat(opened).st_mode):  # a folder, a pipe, a device
        os.close(opened)
        raise ValueError("not a file")
    return opened
