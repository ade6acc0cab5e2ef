"""A request before the engine sees it: as tokens, and beside what is known by its names."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Literal

from rekindle.chat.message_hashes import ConversationHashes
from rekindle.chat.messages import picture_text
from rekindle.chat.prompt import Prompt
from rekindle.errors import ContextTooLong
from rekindle.kvcache.block import WriteBack
from rekindle.kvcache.entries.entries import Entry
from rekindle.protocol.events import Reason, Stages
from rekindle.protocol.media import Picture
from rekindle.protocol.requests import GenerateRequest
from rekindle.runtime.encode.output_format import ReplyDecoding
from rekindle.runtime.encode.precision import Precision
from rekindle.tokens import Tokens

PictureTokens = Callable[[int, int, bytes], Tokens]  # of a size and a digest


@dataclass(frozen=True, slots=True)
class RequestPictures:
    """The pictures of one request. Whoever encodes one keeps it in `namespace`, the tenant's."""

    namespace: bytes = b""
    in_prompt: Mapping[str, Tokens] = field(default_factory=dict)  # by the text that stands for it
    by_span: Mapping[bytes, Picture] = field(default_factory=dict)  # by the digest of each span

    @classmethod
    def of(
        cls, pictures: Sequence[Picture], picture_tokens: PictureTokens, namespace: bytes
    ) -> RequestPictures:
        """Raises BadRequest for one that the engine cannot take."""
        in_prompt, by_span = dict[str, Tokens](), dict[bytes, Picture]()
        for picture in pictures:
            tokens = picture_tokens(picture.width, picture.height, picture.digest)
            in_prompt[picture_text(picture.digest.hex())] = tokens
            by_span.update({span.digest: picture for span in tokens.media})
        return cls(namespace, in_prompt, by_span)


def check_room(
    request: GenerateRequest, prompt: Prompt, pictures: RequestPictures, context_tokens: int
) -> None:
    """The context has to hold the prompt, and a token of the reply; raises ContextTooLong."""
    if len(prompt.tokens) >= context_tokens:
        raise ContextTooLong(
            len(prompt.tokens),
            context_tokens,
            param=request.source,
            pictures=len(pictures.in_prompt),
        )


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """Messages or a text as tokens."""

    prompt: Prompt
    hashes: ConversationHashes | None = None  # None: there are no messages
    normalised: list[str] = field(default_factory=list)  # what was changed so that more matches


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRequest:
    """A request as tokens."""

    request: GenerateRequest
    prompt: Prompt
    namespace: bytes  # of the tenant
    precision: Precision
    decoding: ReplyDecoding  # how its reply is read, and what it is held to
    hashes: ConversationHashes | None = None  # None: it has no messages
    normalised: list[str] = field(default_factory=list)  # what was changed so that more matches
    pictures: RequestPictures = field(default_factory=RequestPictures)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """What a request's names lead to."""

    write_back: WriteBack  # when what it computes is to be written to disk
    entry: Entry | None = None  # that one of its names stands for
    problem: Reason | None = None  # why its key stands for none
    auto_session: str | None = None  # what a fingerprint calls this conversation


# ----------------------------------------------------------------------
# The time that a turn takes up to its first token, stage by stage.

Stage = Literal["front", "encode", "queue", "plan", "restore", "compute"]


class Stopwatch:
    """Each lap adds the time since the last one to a stage, so stages add up to the whole.

    The clock is the machine's monotonic one, which front and runtime share.
    """

    def __init__(self, received_s: float | None = None) -> None:
        self.stages = Stages()
        self._is_running = True
        self._last_s = time.monotonic() if received_s is None else received_s

    def lap(self, stage: Stage) -> None:
        """Nothing counts after the first token, which ends the stage "compute"."""
        if not self._is_running:
            return
        self._is_running = stage != "compute"
        now_s = time.monotonic()
        setattr(self.stages, stage, getattr(self.stages, stage) + now_s - self._last_s)
        self._last_s = now_s

    def copy(self) -> Stopwatch:
        """One that goes on from here by itself, for a turn of its own."""
        other = copy(self)
        other.stages = copy(self.stages)
        return other
