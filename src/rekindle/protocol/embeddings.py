"""Defines the requests to an embedding model or a reranker, and their results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

from msgspec import Struct, structs


class EmbedderRequest(Struct, kw_only=True):
    turn: int = 0
    reuse: bool = True
    salt: bytes = b""  # of the tenant
    request_id: str | None = None  # of the HTTP request, for the log

    @property
    def turns(self) -> list[int]:
        return [self.turn]

    def with_turn_ids(self, ids: Iterator[int]) -> Self:
        return structs.replace(self, turn=next(ids))


class EmbedRequest(EmbedderRequest, tag=True, kw_only=True):
    """Asks for one vector per input, which is a text or token ids. Ends with Embedded."""

    inputs: list[str | list[int]]
    truncate: bool = False  # shorten a text that is longer than the context; False: refuse it
    dimensions: int | None = None  # truncate each vector and normalise it again; None: keep all
    batch_size: int | None = None  # maximum number of inputs of this request in one batch


class RankRequest(EmbedderRequest, tag=True, kw_only=True):
    """Asks for one relevance score per document. Ends with Ranked."""

    query: str
    documents: list[str]


class Embedded(Struct, tag=True):
    """The vectors of a request, in the order of its inputs."""

    turn: int
    vectors: bytes  # little-endian f32, concatenated
    dimensions: int  # of each vector
    prompt_tokens: int
    reused_tokens: int  # prompt tokens that were not computed for this request


class Ranked(Struct, tag=True):
    """The scores of a request, from 0 to 1, in the order of its documents."""

    turn: int
    scores: list[float]
    prompt_tokens: int
    reused_tokens: int
