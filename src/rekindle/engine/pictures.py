"""Lists the parts of a picture: tokens of the vocabulary, and spans that are computed from vectors.

Some models have their own tokens around a picture (`<start_of_image>`), and a large picture may be
cut into tiles with tokens between them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import reduce
from operator import add

from blake3 import blake3

from rekindle.tokens import Tokens


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a picture: tokens of the vocabulary, or a number of vectors."""

    ids: tuple[int, ...] = ()
    vectors: int = 0
    positions: int = 0  # of the vectors


def tokens_of(parts: Seq[Part], digest: bytes) -> Tokens:
    """Return the tokens of the picture with this digest."""
    spans = sum(part.vectors > 0 for part in parts)
    digests = iter([digest] if spans == 1 else [_span_digest(digest, n) for n in range(spans)])
    return reduce(
        add,
        (
            Tokens.of_media(next(digests), part.vectors, part.positions)
            if part.vectors
            else Tokens.of(part.ids)
            for part in parts
        ),
    )


def _span_digest(digest: bytes, number: int) -> bytes:
    """Tell the tiles of one picture from each other."""
    return blake3(digest + number.to_bytes(4, "big")).digest()
