"""Conversations that are known by their looks, and get a session of their own."""

from __future__ import annotations

from collections.abc import Callable

from rekindle.kvcache.entries import Entries, Entry
from rekindle.protocol.frames import LogLine
from rekindle.protocol.requests import GenerateRequest
from rekindle.runtime.request import EncodedRequest
from rekindle.runtime.session_names import AUTO_SESSION, FINGERPRINT

Log = Callable[[LogLine], None]


class AutoSessions:
    """Numbers the sessions of each tenant, from those of a runtime before this one on."""

    def __init__(self, entries: Entries, log: Log) -> None:
        self._entries = entries
        self._log = log
        self._last: dict[bytes, int] = {}  # the last number given, by namespace

    def find(self, encoded: EncodedRequest, entry: Entry | None) -> tuple[Entry | None, str]:
        """The entry and the session of a conversation that is known by its looks; a new session for
        one that is not, whose entry may have been named."""
        assert encoded.hashes is not None
        namespace, previous = encoded.namespace, encoded.hashes.previous_fingerprint
        found = self._entries.by_name(namespace, (FINGERPRINT, previous)) if previous else None
        known = _session_of(found)
        if found is not None and known is not None:
            self._info(encoded.request, f"matched existing session {known}")
            return found, known
        session = self._new_session(namespace)
        self._info(encoded.request, f"registered new session {session}")
        return entry, session

    def extend(self, request: GenerateRequest, session: str) -> None:
        """A turn of the session is remembered, and will be known by its looks, too."""
        self._info(request, f"extended session {session} fingerprint with assistant response")

    def _info(self, request: GenerateRequest, text: str) -> None:
        self._log(LogLine("info", f"FingerprintManager: {text}", request.request_id))

    def _new_session(self, namespace: bytes) -> str:
        last = self._last.get(namespace)
        if last is None:  # those of a runtime before this one
            taken = (_session_of(entry) for entry in self._entries.of(namespace))
            last = max((int(name.rpartition("_")[2]) for name in taken if name), default=-1)
        self._last[namespace] = last + 1
        return f"auto_session_{last + 1}"


def _session_of(entry: Entry | None) -> str | None:
    names = entry.names if entry else ()
    return next((name for kind, name in names if kind == AUTO_SESSION), None)
