"""Saves what eviction has learned in one small file of the model's folder, and loads it.

The file has a line with its version, the BLAKE3 hash of the rest, and the state of each tier as
JSON. It is not a promise: a file that is damaged or of an unknown version is ignored.
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
_VERSION = b"rekindle learnt 3\n"

PolicyState = Mapping[str, object]  # by the tier's name


def write_policy_state(folder: Path, state: PolicyState) -> None:
    payload = json.dumps(state).encode()
    with closing(Files(folder)) as files:
        files.write(FILE, [_VERSION, blake3(payload).digest(), payload])


def read_policy_state(folder: Path) -> PolicyState:
    """The state that was written last; empty if there is none that can be used."""
    try:
        with closing(Files(folder)) as files:
            content, size_bytes = files.read_start(FILE, 1 << 20)
        return _parse(content, size_bytes)
    except FileNotFoundError:
        return {}
    except (OSError, CorruptBlock, ValueError, RecursionError) as error:
        log.warning("eviction starts learning again, because %s: %s", folder / FILE, error)
        return {}


def _parse(content: bytes, size_bytes: int) -> PolicyState:
    start = len(_VERSION) + blake3().digest_size
    payload = content[start:]
    if len(content) != size_bytes or not content.startswith(_VERSION):
        raise ValueError("it has another version")
    if blake3(payload).digest() != content[len(_VERSION) : start]:
        raise ValueError("it is damaged")
    found = json.loads(payload)
    if not isinstance(found, dict):
        raise ValueError("it has no tiers")
    return found
