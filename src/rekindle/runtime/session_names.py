"""The kinds of names that requests give conversations."""

from __future__ import annotations

from collections.abc import Iterator

from rekindle.chat.message_hashes import EntryHashes
from rekindle.kvcache.entries import Name
from rekindle.protocol.requests import Names

SESSION, NUMBER, MESSAGE, PROMPT = (
    "session_id",
    "kv_cache_session_id",
    "message_id",
    "prompt_cache_key",
)
FINGERPRINT, AUTO_SESSION = "fingerprint", "auto_session"


def proposals(names: Names) -> Iterator[Name]:
    """The names a request was given but its key, the surest first."""
    if names.session_id is not None:
        yield SESSION, names.session_id
    if names.session_number is not None:
        yield NUMBER, str(names.session_number)
    for message in names.message_ids:
        yield MESSAGE, message
    if names.prompt_cache_key is not None:
        yield PROMPT, names.prompt_cache_key


def new_names(
    names: Names, message_id: str | None, auto_session: str | None, hashes: EntryHashes | None
) -> Iterator[Name]:
    """What a turn's entry is called from now on."""
    yield from (name for name in proposals(names) if name[0] != MESSAGE)
    if message_id is not None:
        yield MESSAGE, message_id
    if auto_session is not None and hashes is not None:
        yield AUTO_SESSION, auto_session
        yield FINGERPRINT, hashes.fingerprint


def is_named(names: Names) -> bool:
    """Whether a client may ask for this conversation by something it gave or was given."""
    keyed = names.cache_key or names.entry_key or names.return_cache_key
    asked = keyed or names.wants_message_id or names.message_id is not None
    return bool(asked or names.by_fingerprint or any(True for _ in proposals(names)))
