"""A request before the engine sees it: as tokens, and beside what is known by its names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rekindle.chat.message_hashes import ConversationHashes
from rekindle.chat.pictures import picture_text
from rekindle.chat.prompt import Prompt
from rekindle.errors import ContextTooLong
from rekindle.kvcache.block import WriteBack
from rekindle.kvcache.entries import Entry
from rekindle.protocol.events import Reason
from rekindle.protocol.media import Picture
from rekindle.protocol.requests import GenerateRequest
from rekindle.runtime.output_format import ReplyDecoding
from rekindle.runtime.precision import Precision
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
