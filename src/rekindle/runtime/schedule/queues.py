"""Queues of waiting, restoring and running turns, and the rule which waiting turn starts next."""

from __future__ import annotations

from collections.abc import Iterator

from rekindle.runtime.schedule.turn import Turn

# A turn waits for another one that is computing a shared prefix of at least this length.
MIN_SHARED_TOKENS = 32
# Number of turns that a turn overtakes for each point of its priority.
OVERTAKEN_TURNS = 8


class TurnQueues:
    """Each queue is ordered by the turns' places."""

    def __init__(self) -> None:
        self.waiting: list[Turn] = []
        self.restoring: list[Turn] = []  # or being requantised
        self.running: list[Turn] = []
        self.ended: list[Turn] = []  # which still hold their sequences
        self._tickets = 0

    def __len__(self) -> int:
        return len(self.waiting) + len(self.restoring) + len(self.running)

    def __iter__(self) -> Iterator[Turn]:
        return iter([*self.waiting, *self.restoring, *self.running])

    def submit(self, turn: Turn) -> None:
        """Add a turn. Its priority moves it ahead of a limited number of turns, so no turn waits
        forever."""
        self._tickets += 1
        turn.place = self._tickets - OVERTAKEN_TURNS * turn.request.priority
        insert(self.waiting, turn)

    def remove(self, turn: Turn) -> None:
        for turns in (self.waiting, self.restoring, self.running):
            if turn in turns:
                turns.remove(turn)

    def end(self, turn: Turn) -> None:
        self.remove(turn)
        turn.sampler = None
        self.ended.append(turn)

    @property
    def started(self) -> int:
        """Turns that hold memory: running and restoring ones."""
        return len(self.running) + len(self.restoring)

    def are_all(self, turns: int, parallel: int) -> bool:
        """Whether this many turns are all that have started, and no other one can start now."""
        is_full = not self.waiting or self.started >= parallel
        return is_full and self.started == turns

    def take_started(self) -> list[Turn]:
        """Remove and return all turns that hold memory."""
        started = [*self.running, *self.restoring]
        self.running.clear()
        self.restoring.clear()
        return started

    def next_to_start(self, exact_sequences: int) -> Turn | None:
        """The first waiting turn that may start. `exact_sequences` limits exact turns."""
        return next((turn for turn in self.waiting if self._may_start(turn, exact_sequences)), None)

    def _may_start(self, turn: Turn, exact_sequences: int) -> bool:
        if turn.request.exact and self._exact_sequences >= exact_sequences:
            return False
        return not self._follows(turn)

    @property
    def _exact_sequences(self) -> int:
        """Those that are open; of turns that cross and have two, the first is not counted twice."""
        exact = [turn for turn in (*self.running, *self.restoring) if turn.request.exact]
        requantising = sum(turn.requantisation is not None for turn in exact)
        return len(exact) + max(requantising - 1, 0)

    def _follows(self, turn: Turn) -> bool:
        """Whether another turn is computing or restoring a prefix that this turn needs. Then this
        turn waits, so that the prefix is computed once."""
        reading = (leader for leader in self.running if leader.is_prefilling)
        return any(_leads(leader, turn) for leader in (*reading, *self.restoring))


def _leads(leader: Turn, turn: Turn) -> bool:
    """Whether `leader` is about to have a prefix that `turn` needs."""
    ahead_of, behind = leader.request, turn.request
    together = ahead_of.reuse and behind.reuse and ahead_of.exact == behind.exact
    precision = turn.precision
    if not together or not (leader.precision == precision or leader.kv_format == precision.initial):
        return False
    common = min(leader.tokens.common_prefix(turn.tokens), len(turn.tokens) - 1)
    if leader.precision != precision and precision.start_tokens:
        common = min(common, precision.start_tokens)  # then it goes on in cells of its own
    is_on_its_way = leader.restoration or leader.requantisation
    held_tokens = 0 if is_on_its_way else leader.held_tokens  # which can be shared
    # An exact turn reuses state from the store, which has it once the leader's prompt is done.
    ahead = turn.request.exact or common > held_tokens
    if common < MIN_SHARED_TOKENS or not ahead:
        return False
    if leader.checkpoints and common > leader.held_tokens:
        leader.checkpoints.add(common)
    return True


def insert(turns: list[Turn], turn: Turn) -> None:
    """Insert a turn by its place."""
    behind = (at for at, other in enumerate(turns) if other.place > turn.place)
    turns.insert(next(behind, len(turns)), turn)
