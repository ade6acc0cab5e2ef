"""Which inputs are computed together."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

CALL_TOKENS = 512  # that inputs which are computed together have, unless one has more


def packed(lengths: Seq[int], most_tokens: int, most_inputs: int) -> Iterator[list[int]]:
    """Places of inputs that are computed together, the longest first: those of one call take about
    the same time, and what is left for the last call is short."""
    places: list[int] = []
    tokens = 0
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        if places and (tokens + lengths[place] > most_tokens or len(places) == most_inputs):
            yield places
            places, tokens = [], 0
        places.append(place)
        tokens += lengths[place]
    if places:
        yield places
