"""Pins: whether there is room to keep one more conversation for good, or for a while."""

from __future__ import annotations

from rekindle.engine.base import KvLayout
from rekindle.errors import NoRoomForPins
from rekindle.kvcache.block import PrefixHandle
from rekindle.kvcache.entries import Entries
from rekindle.kvcache.store import Store
from rekindle.tokens import Tokens


class Pins:
    """Pinned state rests on the last tier, of several tenants each may pin its share of it."""

    def __init__(self, entries: Entries, store: Store, kv_layout: KvLayout) -> None:
        self._entries = entries
        self._conversations = store.conversations
        self._kv_layout = kv_layout

    def check(self, candidate: PrefixHandle) -> None:
        """Raise NoRoomForPins unless everything pinned, and this too, has room for good."""
        living = self._entries.of(None)
        pinned = [entry for entry in living if entry.pinned]
        own = [entry for entry in pinned if entry.tenant == candidate.tenant]
        tenants = {candidate.tenant, *(entry.tenant for entry in living)}
        limit = self._conversations.pin_limit_bytes
        for entries, most in ((pinned, limit), (own, limit // len(tenants))):
            needed = self._conversations.lasting_bytes(
                [*entries, candidate],
                self._kv_layout.token_bytes,
                self._kv_layout.checkpoint_bytes,
            )
            if needed > most or not self._entries.budget.has_room:
                raise NoRoomForPins(
                    f"With this one, pinned entries would take {needed} of the {most} bytes they "
                    "may take. Unpin or delete another, or raise --disk-cache."
                )

    def has_room_for_a_while(self, tenant: bytes, tokens: Tokens) -> bool:
        """Whether a pin for a while may be added. They share half of the room for pins, in equal
        parts for each tenant; each counts as if it shared nothing, which is soon found."""
        living = self._entries.of(None)
        tenants = {tenant, *(entry.tenant for entry in living)}
        own = (entry for entry in living if entry.pinned and entry.tenant == tenant)
        going_on = (each for each in own if not tokens.startswith(each.tokens))
        count = len(tokens) + sum(len(entry.tokens) for entry in going_on)
        most = self._conversations.pin_limit_bytes // (2 * len(tenants))
        return count * self._kv_layout.token_bytes <= most
