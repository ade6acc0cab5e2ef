"""Parses server-sent events by the rules of the WHATWG HTML standard.

Only a line feed, a carriage return or both end a line. `str.splitlines`, which HTTP clients use,
also splits at other characters, and a reply may contain them.
"""

from __future__ import annotations

from collections.abc import Iterator

from rekindle.errors import RekindleError

MAX_EVENT_BYTES = 64 << 20


class EventTooLarge(RekindleError):
    """A server sends an event that does not end."""

    def __init__(self) -> None:
        super().__init__(f"the server sent an event of more than {MAX_EVENT_BYTES} bytes")


class EventReader:
    """Takes a stream in pieces and yields the data of each complete event."""

    def __init__(self) -> None:
        self._rest = bytearray()  # the unfinished line
        self._data: list[bytes] = []  # lines of the unfinished event
        self._size_bytes = 0

    def feed(self, part: bytes) -> Iterator[str]:
        self._rest += part
        self._size_bytes += len(part)
        if self._size_bytes > MAX_EVENT_BYTES:
            raise EventTooLarge
        if b"\n" in part or b"\r" in part:
            for line in self._lines():
                yield from self._take(line)

    def _lines(self) -> list[bytes]:
        """Take the finished lines. A final carriage return is not one: a line feed may follow."""
        lines = bytes(self._rest).splitlines(keepends=True)
        is_open = not lines[-1].endswith(b"\n")
        self._rest = bytearray(lines.pop() if is_open else b"")
        return lines

    def _take(self, line: bytes) -> Iterator[str]:
        line = line.rstrip(b"\r\n")
        if line:
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
            return
        self._size_bytes = len(self._rest)
        if self._data:
            data, self._data = b"\n".join(self._data), []
            yield data.decode(errors="replace")
