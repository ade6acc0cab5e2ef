"""Turns that a runtime has not ended: whose they are, who listens, and who may begin another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from rekindle.errors import TooManyRequests
from rekindle.protocol.events import TERMINAL, Delta, Event, Failed, Started

Listener = Callable[[Event], None]


@dataclass(slots=True)
class OpenTurn:
    tenant: bytes
    listener: Listener | None  # None: it was given up, and the runtime has not let go of it yet
    is_started: bool = False

    @property
    def is_waiting(self) -> bool:
        return self.listener is not None and not self.is_started


class OpenTurns:
    """A bounded number of places. A tenant alone may have them all; when others come and all are
    taken, room is made by the tenants that have more than their share, out of what has not begun.
    (Fixed quotas were rejected: they leave places empty while somebody is refused.)"""

    def __init__(self, places: int) -> None:
        self._places = places
        self._turns: dict[int, OpenTurn] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._turns)

    def ids(self) -> list[int]:
        return list(self._turns)

    def displaced_by(self, tenant: bytes, count: int) -> list[int]:
        """The turns that make room for so many more of a tenant; raises TooManyRequests."""
        excess = self._taken_for(tenant) + count - self._places
        if excess <= 0:
            return []
        held = Counter(turn.tenant for turn in self._turns.values())
        share = max(self._places // len({*held, tenant}), 1)
        displaced: list[int] = []
        if held[tenant] + count <= share:
            for number, turn in reversed(self._turns.items()):
                if len(displaced) < excess and turn.is_waiting and held[turn.tenant] > share:
                    held[turn.tenant] -= 1
                    displaced.append(number)
        if len(displaced) < excess:
            raise TooManyRequests(
                f"{len(self._turns)} requests are already queued or running; try again later"
            )
        return displaced

    def _taken_for(self, tenant: bytes) -> int:
        """Places that are taken when a tenant asks for one: what was given up counts against those
        who gave it up alone, so hanging up early wins nobody a place and costs nobody else one."""
        turns = self._turns.values()
        return sum(turn.listener is not None or turn.tenant == tenant for turn in turns)

    def add(self, number: int, tenant: bytes, listener: Listener) -> None:
        self._turns[number] = OpenTurn(tenant, listener)

    def deliver(self, event: Event) -> None:
        """Hand an event to whoever listens; a terminal one ends the turn."""
        turn = self._turns.get(event.turn)
        if turn is None:
            return
        if not isinstance(event, Delta):
            turn.is_started |= isinstance(event, Started)
            if isinstance(event, TERMINAL):
                del self._turns[event.turn]
        if turn.listener is not None:
            turn.listener(event)

    def give_up(self, number: int) -> Listener | None:
        """Deliver no more of a turn; returns who listened, None when it is over already. One that
        has begun gives its place back at once; any other when the runtime has let go of it."""
        turn = self._turns.get(number)
        if turn is None or turn.listener is None:
            return None
        listener, turn.listener = turn.listener, None
        if turn.is_started:
            del self._turns[number]
        return listener

    def displace(self, number: int) -> None:
        """Refuse a turn after all: others have come, and its tenant has more than its share."""
        listener = self.give_up(number)
        assert listener is not None, "somebody waits for it"
        refusal = TooManyRequests("other clients need the place of this request; try again later")
        listener(Failed(number, refusal.info))
