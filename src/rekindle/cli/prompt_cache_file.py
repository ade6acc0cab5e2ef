"""A prompt cache of mlx_lm's on its way to a server, with the tokens that its state is of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rekindle.errors import RekindleError

SUFFIX = ".safetensors"
TOKENS = "0.rekindle_tokens"  # in the header's metadata; 0 is what mlx_lm calls metadata
_METADATA = "__metadata__"
_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 32 << 20
_PART_BYTES = 1 << 20


class PromptCacheFile:
    """A safetensors file as it is, but for the tokens in its header. Raises RekindleError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
                header = file.read(length) if length <= _MOST_HEADER_BYTES else b""
        except OSError as error:
            raise RekindleError(f"cannot read {path}: {error.strerror}") from None
        self._data_start = _LENGTH_BYTES + length
        try:
            self._header: dict[str, Any] = json.loads(header)
            self._metadata: dict[str, str] = self._header.setdefault(_METADATA, {})
            self.has_tokens = TOKENS in self._metadata
        except (ValueError, RecursionError, AttributeError, TypeError):
            raise RekindleError(f"{path} is no safetensors file") from None

    def name_tokens(self, tokens: list[int]) -> None:
        self._metadata[TOKENS] = json.dumps(tokens)

    def parts(self) -> Iterator[bytes]:
        """The file with its header as it is now."""
        header = json.dumps(self._header).encode()
        yield len(header).to_bytes(_LENGTH_BYTES, "little") + header
        with self._path.open("rb") as file:
            file.seek(self._data_start)
            while part := file.read(_PART_BYTES):
                yield part


def read_tokens(path: Path) -> list[int]:
    """A JSON list of token ids; raises RekindleError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RekindleError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise RekindleError(f"{path} is not JSON") from None
    if not isinstance(found, list) or not all(type(each) is int for each in found):
        raise RekindleError(f"{path} holds no list of token ids")
    return found
