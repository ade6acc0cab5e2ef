"""What the front asks of a runtime whose model makes vectors or scores, and what comes back."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct, structs


class EmbedRequest(Struct, tag=True, kw_only=True):
    """A vector for each input: a text, or token ids. Ends with Embedded."""

    turn: int = 0
    inputs: list[str | list[int]]
    dimensions: int | None = None  # the first so many, made of length one again; None: all
    batch_size: int | None = None  # the most inputs of this request that are computed at once
    reuse: bool = True
    salt: bytes = b""
    request_id: str | None = None  # of the HTTP request, for the log

    @property
    def turns(self) -> list[int]:
        return [self.turn]

    def with_turn_ids(self, ids: Iterator[int]) -> EmbedRequest:
        return structs.replace(self, turn=next(ids))


class RankRequest(Struct, tag=True, kw_only=True):
    """A score for each document: how well it answers the query. Ends with Ranked."""

    turn: int = 0
    query: str
    documents: list[str]
    reuse: bool = True
    salt: bytes = b""
    request_id: str | None = None

    @property
    def turns(self) -> list[int]:
        return [self.turn]

    def with_turn_ids(self, ids: Iterator[int]) -> RankRequest:
        return structs.replace(self, turn=next(ids))


class Embedded(Struct, tag=True):
    """The vectors of a request, in the order of its inputs."""

    turn: int
    vectors: bytes  # little-endian f32, one vector after the other
    dimensions: int  # of each
    prompt_tokens: int
    reused_tokens: int  # of those, that were not computed for this request


class Ranked(Struct, tag=True):
    """The scores of a request, from 0 to 1, in the order of its documents."""

    turn: int
    scores: list[float]
    prompt_tokens: int
    reused_tokens: int
