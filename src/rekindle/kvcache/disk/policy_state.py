"""What eviction has learnt, kept beside the blocks: one small file, there whole or not at all.

A line that says what it is, the BLAKE3 hash of the rest, and the rest as JSON: what each tier has
learnt, by its name. It is no promise: one that is damaged is learnt again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from blake3 import blake3

from rekindle.errors import CorruptBlock
from rekindle.kvcache.disk.files import Files

log = logging.getLogger("rekindle.cache")

FILE = "learnt"
MOST_BYTES = 1 << 20
_MAGIC = b"rekindle learnt 2\n"
_HASH_BYTES = 32

Learnt = Mapping[str, object]  # by the tier's name


def write_learnt(folder: Path, learnt: Learnt) -> None:
    payload = json.dumps(learnt).encode()
    with closing(Files(folder)) as files:
        files.write(FILE, [_MAGIC, blake3(payload).digest(), payload])


def read_learnt(folder: Path) -> Learnt:
    """What was written last; nothing if there is none, or none of this version that is whole."""
    try:
        with closing(Files(folder)) as files:
            content, size_bytes = files.read_start(FILE, MOST_BYTES)
        return _parsed(content, size_bytes)
    except FileNotFoundError:
        return {}
    except (OSError, CorruptBlock, ValueError, RecursionError) as error:
        log.warning("what eviction had learnt cannot be read and is learnt again: %s", error)
        return {}


def _parsed(content: bytes, size_bytes: int) -> Learnt:
    start = len(_MAGIC) + _HASH_BYTES
    payload = content[start:]
    if len(content) != size_bytes or not content.startswith(_MAGIC):
        raise ValueError("it is of another kind or version")
    if blake3(payload).digest() != content[len(_MAGIC) : start]:
        raise ValueError("it is damaged")
    found = json.loads(payload)
    if not isinstance(found, dict):
        raise ValueError("it names no tiers")
    return found
