"""Where checkpoints are taken: the places in a prompt where a later turn will want to go on.

A model whose state cannot be cut goes on from a checkpoint or from the beginning, so they are laid
where conversations part: after what all of them share, before the last user message, where the
prompt ends and the template's own words begin, and at intervals of a long prompt. The end of a
reply is one by itself: the sequence stands there when its turn ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from rekindle.chat.messages import SYSTEM_ROLES
from rekindle.chat.prompt import Prompt
from rekindle.engine.base import Capabilities

LEAST_INTERVAL_TOKENS, MOST_INTERVAL_TOKENS = 512, 4096


class Checkpoints:
    """The positions still to come at which one turn's state is to be kept."""

    def __init__(
        self, prompt: Prompt, capabilities: Capabilities, *, exact: bool, held: int
    ) -> None:
        self._grain = capabilities.step_tokens if exact else 1  # canonical steps are not cut short
        self._tokens = prompt.tokens
        self._places: set[int] = set()
        before = held
        for place in sorted({self._rounded(place) for place in _places(prompt, capabilities)}):
            # One just behind another saves next to nothing, and each costs as much.
            if place - before >= capabilities.block_tokens or (place > held and not before):
                self._places.add(place)
                before = place

    def add(self, place: int) -> None:
        """Take one more, where another conversation is seen to part from this one."""
        if (rounded := self._rounded(place)) > 0:
            self._places.add(rounded)

    def next_after(self, tokens: int) -> int | None:
        return min((place for place in self._places if place > tokens), default=None)

    def reach(self, tokens: int) -> bool:
        """Whether a checkpoint is due now."""
        due = tokens in self._places
        self._places.discard(tokens)
        return due

    def _rounded(self, place: int) -> int:
        """Where a later turn computes one token at least, and all of a picture."""
        place = self._tokens.whole_media(min(place, len(self._tokens) - 1))
        return place - place % self._grain


def _places(prompt: Prompt, capabilities: Capabilities) -> Iterator[int]:
    talk = [each for each in prompt.spans if each.role not in SYSTEM_ROLES]
    if talk:
        yield min(each.start for each in talk)
        yield max((each.start for each in talk if each.role == "user"), default=0)
        yield max(each.end for each in talk)
    yield len(prompt.tokens) - 1
    interval = interval_tokens(capabilities)
    yield from range(interval, len(prompt.tokens), interval)


def interval_tokens(capabilities: Capabilities) -> int:
    """As many tokens as take as much as a checkpoint does, within bounds."""
    layout = capabilities.kv_layout
    equal = math.ceil(layout.checkpoint_bytes / max(layout.token_bytes, 1))
    bounded = min(max(equal, LEAST_INTERVAL_TOKENS), MOST_INTERVAL_TOKENS)
    return -(-bounded // capabilities.step_tokens) * capabilities.step_tokens
