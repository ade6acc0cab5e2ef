"""Requests into tokens: what the encoder threads do, beside the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from msgspec import structs

from rekindle.chat.encode import Encoder
from rekindle.chat.escaping import EndMarkers
from rekindle.chat.message_hashes import ConversationHashes
from rekindle.chat.messages import picture_text, with_digests, with_parsed_arguments
from rekindle.chat.normalise import normalise, without_strict
from rekindle.chat.prompt import Pictures, Prompt
from rekindle.engine.base import Capabilities
from rekindle.errors import BadRequest, ContextTooLong
from rekindle.kvcache.block import namespace
from rekindle.kvcache.entries.entries import Entries
from rekindle.kvcache.entries.index import EntryIndex
from rekindle.protocol.admin import IndexPrompt, Tokenize, Validate
from rekindle.protocol.media import count_images
from rekindle.protocol.requests import GenerateRequest, SamplingParams
from rekindle.protocol.settings import DEFAULT_NORMALISERS, Normaliser
from rekindle.runtime.encode.chat import ChatEncoder, RecentChats
from rekindle.runtime.encode.output_format import OutputFormat, ReplyDecoding
from rekindle.runtime.encode.precision import precision
from rekindle.runtime.encode.replay import History
from rekindle.runtime.encode.request import (
    EncodedPrompt,
    EncodedRequest,
    PictureTokens,
    RequestPictures,
    check_room,
)
from rekindle.tokens import Tokenizer, Tokens

# ----------------------------------------------------------------------
# What tokens a request has at least, seen before any of it is tokenised.


def check_size(value: object, longest_bytes: int, context_tokens: int, *, param: str) -> None:
    """Refuse what cannot fit in tokens of so many bytes: making them takes its time."""
    least = _characters(value) // longest_bytes
    if least >= context_tokens:
        raise ContextTooLong(least, context_tokens, param=param, at_least=True)


def _characters(value: object) -> int:
    """Characters in all strings of a JSON value, a lower bound of their bytes."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(_characters(each) for each in value.values())
    if isinstance(value, list):
        return sum(_characters(each) for each in value)
    return 0


# ----------------------------------------------------------------------
# Prompts that are no conversations: texts and token ids.


class TextEncoder:
    """Any thread may call it."""

    def __init__(
        self, tokenizer: Tokenizer, encoder: Encoder, entries: EntryIndex, ends: EndMarkers
    ) -> None:
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._entries = entries
        self._ends = ends

    def encode(self, prompt: str | list[int], tenant: bytes | None) -> Prompt:
        """With the tokens that are remembered of a tenant's text; None: nothing is."""
        if not prompt:
            return self._beginning()
        if not isinstance(prompt, str):
            return self._ids(prompt)
        if tenant is None:
            return self._encoder.text(prompt)
        history = History(self._entries, tenant)
        return self._encoder.text(prompt, recall=partial(history.recall, ends=self._ends))

    def wrapped(self, text: str, *, special: bool) -> list[int]:
        """A text with what the model wants in front of it."""
        bos = self._tokenizer.bos if self._tokenizer.add_bos else None
        tokens = self._tokenizer.encode(text, special=special)
        return tokens if bos is None else [bos, *tokens]

    def _beginning(self) -> Prompt:
        """An empty prompt: the model's own beginning of a text."""
        bos = self._tokenizer.bos
        if bos is None:
            raise BadRequest("the prompt is empty; send at least one token", param="prompt")
        return Prompt(Tokens.of([bos]))

    def _ids(self, ids: list[int]) -> Prompt:
        """A prompt that came as token ids."""
        most = self._tokenizer.size
        if any(not 0 <= token < most for token in ids):
            raise BadRequest(f"token ids of this model go from 0 to {most - 1}", param="prompt")
        return Prompt(Tokens.of(ids))


Messages = list[dict[str, Any]]
Tools = list[Any] | None
About = TypeVar("About", GenerateRequest, Validate, IndexPrompt, Tokenize)

SHARED_SALT = b"shared by the operator"  # shorter than any key's digest


class InputProcessor:
    """Any thread may call it: of what changes it reads the remembered conversations alone."""

    def __init__(
        self,
        capabilities: Capabilities,
        tokenizer: Tokenizer,
        encoder: Encoder,
        entries: Entries,
        secret: bytes,
        output_format: OutputFormat,
        *,
        picture_tokens: PictureTokens,
        normalisers: Sequence[Normaliser] = DEFAULT_NORMALISERS,
    ) -> None:
        """`normalisers`: of requests that do not name any."""
        self._picture_tokens = picture_tokens
        self._capabilities = capabilities
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._secret = secret
        self._output_format = output_format
        self._normalisers = normalisers
        ends = _end_markers(tokenizer, output_format)
        self._chats = ChatEncoder(encoder, entries.index, ends)
        self.texts = TextEncoder(tokenizer, encoder, entries.index, ends)

    @property
    def recent_chats(self) -> RecentChats:
        return self._chats.recent_chats

    @property
    def has_reasoning(self) -> bool:
        """Whether the model writes for itself before it answers."""
        return self._output_format.format.reasoning is not None

    def namespace(self, salt: bytes) -> bytes:
        """The namespace of a tenant."""
        fingerprint = self._capabilities.kv_layout.fingerprint
        return namespace(fingerprint, salt, self._capabilities.block_tokens, self._secret)

    @property
    def shared_namespace(self) -> bytes:
        """The namespace of what the operator declared common to all tenants."""
        return self.namespace(SHARED_SALT)

    def encode(self, request: GenerateRequest) -> list[EncodedRequest]:
        """Each choice as tokens, which are found once for all of them.

        Raises a ServerError for a request that this model cannot answer.
        """
        self._check_bias(request.sampling)
        request, pictures = self._seen(request, request.salt)
        request, changes = self._normalised(request)
        encoded = self._encoded(request, pictures.in_prompt)
        # Before a grammar is compiled.
        check_room(request, encoded.prompt, pictures, self._capabilities.context_tokens)
        normalised = [*changes, *encoded.normalised]
        choices = request.choices()
        decodings = self._output_format.decodings(request, encoded.prompt, len(choices))
        return [
            self._choice(each, encoded, normalised, pictures, decoding)
            for each, decoding in zip(choices, decodings, strict=True)
        ]

    def _choice(
        self,
        request: GenerateRequest,
        encoded: EncodedPrompt,
        normalised: list[str],
        pictures: RequestPictures,
        decoding: ReplyDecoding,
    ) -> EncodedRequest:
        """One choice, with a parser and a grammar's state of its own."""
        if request.ignore_eos:
            request = structs.replace(request, sampling=self._endless(request.sampling, decoding))
        is_shared = request.prepare is not None and request.prepare.shared
        tenant = self.shared_namespace if is_shared else self.namespace(request.salt)
        return EncodedRequest(
            request=request,
            prompt=encoded.prompt,
            namespace=tenant,
            precision=precision(request, self._capabilities, tenant),
            decoding=decoding,
            hashes=encoded.hashes,
            normalised=normalised,
            pictures=pictures,
        )

    def encode_about(self, op: Validate | IndexPrompt, salt: bytes) -> EncodedPrompt:
        """The prompt that an admin request is about."""
        if isinstance(op, IndexPrompt):
            seen, pictures = self._seen(op, salt)
            indexed, _ = self._normalised(seen)
            return self._prefix(indexed.messages, indexed.tools, {}, pictures.in_prompt)
        shown, pictures = self._seen(op, salt)
        asked, _ = self._normalised(shown)
        self._check_size([asked.messages, asked.tools], "messages")
        tenant = self.namespace(salt)
        return self._chats.encode(asked, tenant, pictures.in_prompt, recalls=True)

    def _seen(self, about: About, salt: bytes) -> tuple[About, RequestPictures]:
        """The request with its image parts named by what they show; and its pictures."""
        if not about.messages or not (about.pictures or count_images(about.messages)):
            return about, RequestPictures()
        digests = [picture.digest.hex() for picture in about.pictures]
        messages = with_digests(about.messages, digests)
        namespace = self.namespace(salt)
        pictures = RequestPictures.of(about.pictures, self._picture_tokens, namespace)
        self._check_pictures(digests, pictures)
        return structs.replace(about, messages=messages), pictures

    def _check_pictures(self, digests: list[str], pictures: RequestPictures) -> None:
        """Refuse what cannot fit before it is rendered."""
        sizes = {text: len(tokens) for text, tokens in pictures.in_prompt.items()}
        least = sum(sizes[picture_text(digest)] for digest in digests)
        limit = self._capabilities.context_tokens
        if least >= limit:
            raise ContextTooLong(
                least, limit, param="messages", pictures=len(digests), at_least=True
            )

    def encode_conversation(self, op: Tokenize) -> list[int]:
        """The tokens of a conversation that nobody has to answer."""
        shown, pictures = self._seen(op, b"")
        asked, _ = self._normalised(shown)
        self._check_size([asked.messages, asked.tools], "messages")
        return self._chats.plain(asked, pictures.in_prompt).tokens.ids()

    def _normalised(self, about: About) -> tuple[About, list[str]]:
        """The request with messages and tools normalised, unless it asks not to; what changed."""
        if about.messages is None or not about.normalise:
            return about, []
        names = self._normalisers if about.normalise is True else about.normalise
        messages, tools, changes = normalise(about.messages, about.tools, names)
        plain = [dict(message) for message in messages]
        return structs.replace(about, messages=plain, tools=tools), changes

    def _check_bias(self, sampling: SamplingParams) -> None:
        most = self._tokenizer.size - 1
        if any(token > most for token in sampling.logit_bias):
            raise BadRequest(f"token ids of this model go from 0 to {most}", param="logit_bias")

    def _endless(self, sampling: SamplingParams, decoding: ReplyDecoding) -> SamplingParams:
        """No end token may be sampled, unless a schema says when the reply is whole."""
        if decoding.token_mask is not None:
            return sampling
        ends = dict.fromkeys(decoding.end_tokens, float("-inf"))
        return replace(sampling, logit_bias={**sampling.logit_bias, **ends})

    def _encoded(self, request: GenerateRequest, pictures: Pictures) -> EncodedPrompt:
        # Exact answers are those of a server that remembers nothing, so its tokens are used.
        recalls = request.reuse and not request.exact
        known = self.namespace(request.salt) if recalls else None
        if request.messages is not None:
            if request.prepare is not None:
                kwargs = request.template_kwargs
                return self._prefix(request.messages, request.tools, kwargs, pictures)
            self._check_size([request.messages, request.tools], "messages")
            if not request.reuse:
                return EncodedPrompt(self._chats.plain(request, pictures))
            tenant = self.namespace(request.salt)
            return self._chats.encode(request, tenant, pictures, recalls=recalls)
        assert request.prompt is not None, "a request has messages or a prompt"
        if isinstance(request.prompt, str):
            self._check_size(request.prompt, "prompt")
        return EncodedPrompt(self.texts.encode(request.prompt, known))

    def _prefix(
        self, messages: Messages, tools: Tools, kwargs: dict[str, Any], pictures: Pictures
    ) -> EncodedPrompt:
        """What every conversation that begins with these messages begins with."""
        self._check_size([messages, tools], "messages")
        prompt = self._encoder.prefix(
            [with_parsed_arguments(message) for message in messages],
            tools=without_strict(tools),
            template_kwargs=kwargs,
            pictures=pictures,
        )
        return EncodedPrompt(prompt, ConversationHashes(messages, tools))

    def _check_size(self, value: object, param: str) -> None:
        longest_bytes = self._tokenizer.longest_bytes
        check_size(value, longest_bytes, self._capabilities.context_tokens, param=param)


def _end_markers(tokenizer: Tokenizer, output_format: OutputFormat) -> EndMarkers:
    """The texts that a reply may end with."""
    ends = output_format.end_tokens
    return EndMarkers(text for text, token in tokenizer.control_texts.items() if token in ends)
