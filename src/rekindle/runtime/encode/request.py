"""Defines a request as the runtime handles it: its prompt as tokens, its images and its lookup."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Literal

from rekindle.chat.message_hashes import ConversationHashes
from rekindle.chat.messages import picture_text
from rekindle.chat.prompt import Prompt
from rekindle.kvcache.block import WriteBack
from rekindle.kvcache.entries.entry import Entry, Reply
from rekindle.protocol.events import Reason, Stages
from rekindle.protocol.media import Picture
from rekindle.protocol.requests import GenerateRequest
from rekindle.runtime.encode.precision import Precision
from rekindle.runtime.schedule.output import ReplyDecoding
from rekindle.tokens import Tokens

#: Returns the tokens of an image, given its width, its height and its digest.
PictureTokens = Callable[[int, int, bytes], Tokens]

#: The stored replies that may be an assistant message of the request, by the message's index.
KnownReplies = dict[int, list[tuple[Entry, Reply]]]


@dataclass(frozen=True, slots=True)
class RequestPictures:
    """The images of one request. Their vectors are cached in `namespace`, which is the tenant's."""

    namespace: bytes = b""
    in_prompt: Mapping[str, Tokens] = field(default_factory=dict)  # by placeholder text
    by_span: Mapping[bytes, Picture] = field(default_factory=dict)  # by the digest of each span

    @classmethod
    def of(
        cls, pictures: Sequence[Picture], picture_tokens: PictureTokens, namespace: bytes
    ) -> RequestPictures:
        """Raises BadRequest for an image that the engine cannot process."""
        in_prompt, by_span = dict[str, Tokens](), dict[bytes, Picture]()
        for picture in pictures:
            tokens = picture_tokens(picture.width, picture.height, picture.digest)
            in_prompt[picture_text(picture.digest.hex())] = tokens
            by_span.update({span.digest: picture for span in tokens.media})
        return cls(namespace, in_prompt, by_span)


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """The messages or the text of a request as tokens."""

    prompt: Prompt
    hashes: ConversationHashes | None = None  # None: the request has no messages
    normalised: list[str] = field(default_factory=list)  # names of the changes made to it
    known_replies: KnownReplies = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRequest(EncodedPrompt):
    """A request with its encoded prompt."""

    request: GenerateRequest
    namespace: bytes  # of the tenant
    precision: Precision
    decoding: ReplyDecoding
    pictures: RequestPictures = field(default_factory=RequestPictures)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """The result of looking up the names in a request."""

    write_back: WriteBack  # when the state it computes is written to disk
    entry: Entry | None = None  # the entry that one of its names refers to
    problem: Reason | None = None  # why its cache key has no entry
    fingerprint_session: str | None = None  # the session found or created by its fingerprint


Stage = Literal["front", "encode", "queue", "plan", "restore", "compute"]


class Stopwatch:
    """Measures the stages of a turn up to its first token.

    Each lap adds the time since the previous lap to a stage, so the stages add up to the total. The
    clock is the machine's monotonic clock, which the front and the runtime share.
    """

    def __init__(self, received_s: float | None = None) -> None:
        self.stages = Stages()
        self._is_running = True
        self._last_s = time.monotonic() if received_s is None else received_s

    def lap(self, stage: Stage) -> None:
        """Add the time since the last lap. "compute" ends with the first token and is the last."""
        if not self._is_running:
            return
        self._is_running = stage != "compute"
        now_s = time.monotonic()
        setattr(self.stages, stage, getattr(self.stages, stage) + now_s - self._last_s)
        self._last_s = now_s

    def copy(self) -> Stopwatch:
        """Return an independent copy, for one choice of a request."""
        other = copy(self)
        other.stages = copy(self.stages)
        return other
