"""Questions about a model's tokens, and their answers. They travel as admin requests do."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from rekindle.protocol.media import Picture
from rekindle.protocol.normalisers import Normalise


class Tokenize(Struct, tag=True, kw_only=True):
    """The tokens of a text, or of a conversation as the model reads it. Answered with Tokenized."""

    text: str | None = None
    add_special: bool = False  # the tokens that the model wants around a text
    parse_special: bool = True  # a control token's text in a text is that token
    messages: list[dict[str, Any]] | None = None
    pictures: list[Picture] = []  # of the messages' image parts, in order
    tools: list[Any] | None = None
    template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    normalise: Normalise = True
    with_tokens: bool = True  # False: how many there are is enough
    with_pieces: bool = False


class Detokenize(Struct, tag=True):
    """Answered with Detokenized."""

    tokens: list[int]


class Tokenized(Struct, tag=True):
    count: int
    context_tokens: int  # that the model takes
    tokens: list[int] = []
    pieces: list[bytes] = []


class Detokenized(Struct, tag=True):
    text: str
