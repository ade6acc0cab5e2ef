"""A turn's state from cells of one type into cells of another, while it goes on.

When a sequence goes beyond the start of quantisation, all that it holds is written again in smaller
cells, a slice a step; nothing is computed twice.
"""

from __future__ import annotations

from rekindle.engine.base import Engine, KvType, Sequence
from rekindle.errors import PoolFull
from rekindle.runtime.crossing import Crossing
from rekindle.runtime.offload import Allowance, Counts


class Transcoder:
    """Carries crossings on, within the step's allowance."""

    def __init__(self, engine: Engine, counts: Counts, allowance: Allowance) -> None:
        self._engine = engine
        self._counts = counts
        self._allowance = allowance
        self._block_tokens = engine.capabilities.block_tokens
        self._can_truncate = engine.capabilities.can_truncate

    def advance(self, crossing: Crossing, kv_type: KvType) -> bool:
        """Go on; True when all is over there and the source is closed. Raises NoMemory."""
        source = crossing.source
        try:
            if crossing.into is None:
                crossing.into = self._engine.open(exact=source.exact, kv_type=kv_type)
            while crossing.into.length < source.length:
                if self._allowance.is_spent:
                    return False
                self._move_block(source, crossing.into)
        except PoolFull:
            return False  # others will end and make room
        self._engine.close_sequence(source)
        return True

    def _move_block(self, source: Sequence, into: Sequence) -> None:
        start = into.length
        stop = min(start + self._block_tokens, source.length)
        resumable = stop == source.length and not self._can_truncate
        blob = self._engine.export(source, start, stop, resumable=resumable)
        small = self._engine.transcode(
            blob, stop - start, source.kv_type, into.kv_type, resumable=resumable
        )
        self._engine.restore(into, small, stop - start, resumable=resumable)
        self._counts.transcoded_bytes += len(blob)
        self._counts.transcoded_tokens += stop - start
