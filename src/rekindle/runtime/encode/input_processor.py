"""Encodes requests into tokens, on the encoder threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from msgspec import structs

from rekindle.chat.encode import Encoder
from rekindle.chat.escaping import EndMarkers, unescape
from rekindle.chat.grammar.lark import Grammar
from rekindle.chat.grammar.matcher import GrammarCompiler
from rekindle.chat.messages import picture_text, with_digests
from rekindle.chat.normalise import normalise
from rekindle.chat.prompt import Pictures, Prompt
from rekindle.chat.tools.registry import select
from rekindle.engine.base import Capabilities, TokenMask
from rekindle.errors import BadRequest, ContextTooLong
from rekindle.kvcache.block import namespace
from rekindle.kvcache.entries.index import EntryIndex
from rekindle.protocol.admin import IndexPrompt, Tokenize, Validate
from rekindle.protocol.requests import GenerateRequest, count_images
from rekindle.protocol.settings import Normaliser
from rekindle.runtime.encode.chat import ChatEncoder, History, RecentChats
from rekindle.runtime.encode.request import (
    EncodedPrompt,
    EncodedRequest,
    PictureTokens,
    RequestPictures,
    precision,
)
from rekindle.runtime.encode.threads import check_token_ids
from rekindle.runtime.schedule.output import ReplyDecoding
from rekindle.tokens import Tokenizer, Tokens

About = TypeVar("About", GenerateRequest, Validate, IndexPrompt, Tokenize)

SHARED_SALT = b"shared by the operator"  # no tenant has it: the digest of an API key is longer


class InputProcessor:
    """Encodes the requests for one model. Any thread may call it.

    The only mutable state that it reads is the index of stored conversations, which is locked.
    """

    def __init__(
        self,
        capabilities: Capabilities,
        tokenizer: Tokenizer,
        encoder: Encoder,
        entries: EntryIndex,
        secret: bytes,
        output_format: OutputFormat,
        *,
        picture_tokens: PictureTokens,
        normalisers: Sequence[Normaliser],
    ) -> None:
        """`normalisers` apply to requests that do not name their own."""
        self._capabilities = capabilities
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._entries = entries
        self._secret = secret
        self._output_format = output_format
        self._picture_tokens = picture_tokens
        self._normalisers = normalisers
        ends = output_format.end_tokens
        control = tokenizer.control_texts.items()
        self._ends = EndMarkers(text for text, token in control if token in ends)
        self._chats = ChatEncoder(encoder, entries, self._ends)
        self.shared_namespace = self.namespace(SHARED_SALT)  # of state that all tenants may reuse

    @property
    def recent_chats(self) -> RecentChats:
        return self._chats.recent_chats

    @property
    def has_reasoning(self) -> bool:
        """Whether the model writes reasoning before its answer."""
        return self._output_format.format.reasoning is not None

    def namespace(self, salt: bytes) -> bytes:
        """The namespace of a tenant."""
        fingerprint = self._capabilities.kv_layout.fingerprint
        return namespace(fingerprint, salt, self._capabilities.block_tokens, self._secret)

    def encode(self, request: GenerateRequest) -> list[EncodedRequest]:
        """Encode the prompt once, and return a request for each choice.

        Raises a ServerError for a request that this model cannot answer.
        """
        check_token_ids(request.sampling.logit_bias, self._tokenizer, "logit_bias")
        own = self.namespace(request.salt)
        is_shared = request.prepare is not None and request.prepare.shared
        tenant = self.shared_namespace if is_shared else own
        request, pictures, changes = self._normalised(request, own)
        encoded = self._prompt(request, tenant, pictures.in_prompt)
        # Check before the grammar is compiled, because that is expensive.
        count = len(encoded.prompt.tokens)
        self._check_fits(count, request.source, pictures=len(pictures.in_prompt))
        normalised = [*changes, *encoded.normalised]
        choices = request.choices()
        decodings = self._output_format.decodings(request, encoded.prompt, len(choices))
        return [
            EncodedRequest(
                request=_without_end(choice, decoding) if choice.ignore_eos else choice,
                prompt=encoded.prompt,
                hashes=encoded.hashes,
                normalised=normalised,
                namespace=tenant,
                precision=precision(choice, self._capabilities, tenant),
                decoding=decoding,
                pictures=pictures,
            )
            for choice, decoding in zip(choices, decodings, strict=True)
        ]

    def encode_about(self, op: Validate | IndexPrompt, salt: bytes) -> EncodedPrompt:
        """Encode the prompt of an admin request."""
        tenant = self.namespace(salt)
        if isinstance(op, IndexPrompt):
            indexed, pictures, _ = self._normalised(op, tenant)
            return self._chats.prefix(indexed, pictures.in_prompt)
        asked, pictures, _ = self._normalised(op, tenant)
        return self._chats.encode(asked, tenant, pictures.in_prompt, recalls=True)

    def encode_conversation(self, op: Tokenize) -> list[int]:
        """Return the tokens of a conversation that gets no reply."""
        asked, pictures, _ = self._normalised(op, b"")
        return self._chats.plain(asked, pictures.in_prompt).tokens.ids()

    def encode_wrapped(self, text: str, *, special: bool) -> list[int]:
        """Return the tokens of a text after the model's BOS token, if it uses one."""
        bos = self._tokenizer.bos if self._tokenizer.add_bos else None
        tokens = self._tokenizer.encode(text, special=special)
        return tokens if bos is None else [bos, *tokens]

    def _prompt(self, request: GenerateRequest, tenant: bytes, pictures: Pictures) -> EncodedPrompt:
        # An exact answer must equal that of a server without stored conversations.
        recalls = request.reuse and not request.exact
        if request.messages is None:
            assert request.prompt is not None, "a request has messages or a prompt"
            return EncodedPrompt(self._completion(request.prompt, tenant if recalls else None))
        if request.prepare is not None:
            return self._chats.prefix(request, pictures)
        if not request.reuse:
            return EncodedPrompt(self._chats.plain(request, pictures))
        return self._chats.encode(request, tenant, pictures, recalls=recalls)

    def _completion(self, prompt: str | list[int], tenant: bytes | None) -> Prompt:
        """Encode the prompt of a completion, with the tokens stored for the tenant's text."""
        if not prompt:
            if self._tokenizer.bos is None:
                raise BadRequest("the prompt is empty; send at least one token", param="prompt")
            return Prompt(Tokens.of([self._tokenizer.bos]))
        if not isinstance(prompt, str):
            check_token_ids(prompt, self._tokenizer, "prompt")
            return Prompt(Tokens.of(prompt))
        self._check_size(prompt, "prompt")
        if tenant is None:
            return self._encoder.text(prompt)
        history = History(self._entries, tenant)
        return self._encoder.text(prompt, recall=partial(history.recall, ends=self._ends))

    def _normalised(self, about: About, tenant: bytes) -> tuple[About, RequestPictures, list[str]]:
        """Name image parts by their content, and normalise messages and tools.

        Returns the request, its images, and the names of the normalisers that changed something.
        Raises ContextTooLong if the messages cannot fit, before anything is rendered.
        """
        if about.messages is None:
            return about, RequestPictures(), []
        messages, tools = about.messages, about.tools
        pictures, changes = RequestPictures(), list[str]()
        if messages and (about.pictures or count_images(messages)):
            digests = [picture.digest.hex() for picture in about.pictures]
            messages = with_digests(messages, digests)
            pictures = RequestPictures.of(about.pictures, self._picture_tokens, tenant)
            least = sum(len(pictures.in_prompt[picture_text(digest)]) for digest in digests)
            self._check_fits(least, "messages", pictures=len(digests), at_least=True)
        if about.normalise:
            names = self._normalisers if about.normalise is True else about.normalise
            shown, tools, changes = normalise(messages, tools, names)
            messages = [dict(message) for message in shown]
        self._check_size([messages, tools], "messages")
        return structs.replace(about, messages=messages, tools=tools), pictures, changes

    def _check_size(self, value: object, param: str) -> None:
        """Refuse a text that cannot fit even in the longest tokens; tokenising it takes long."""
        least = _characters(value) // self._tokenizer.longest_bytes
        self._check_fits(least, param, at_least=True)

    def _check_fits(
        self, tokens: int, param: str, *, pictures: int = 0, at_least: bool = False
    ) -> None:
        """The context has to hold the prompt and at least one token of the reply."""
        limit = self._capabilities.context_tokens
        if tokens >= limit:
            raise ContextTooLong(tokens, limit, param=param, pictures=pictures, at_least=at_least)


def _without_end(request: GenerateRequest, decoding: ReplyDecoding) -> GenerateRequest:
    """Ban the end tokens, unless a grammar decides when the reply is complete."""
    if decoding.token_mask is not None:
        return request
    sampling = request.sampling
    banned = dict.fromkeys(decoding.end_tokens, float("-inf"))
    sampling = replace(sampling, logit_bias={**sampling.logit_bias, **banned})
    return structs.replace(request, sampling=sampling)


def _characters(value: object) -> int:
    """Number of characters in all strings of a JSON value; a lower bound of their bytes."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(_characters(each) for each in value.values())
    if isinstance(value, list):
        return sum(_characters(each) for each in value)
    return 0


class OutputFormat:
    """The tool-call and reasoning format of one model. Thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | None,
        *,
        tool_format: str | None = None,
        reasoning_format: str | None = None,
    ) -> None:
        self.format = select(template, tool_format=tool_format, reasoning_format=reasoning_format)
        self._control = tokenizer.control_texts
        self._shown = self._tokens(self.format.markers)
        self.end_tokens = tokenizer.end_tokens | self._tokens(self.format.end_markers)
        self._grammars = self.format.grammars(self._control)
        self._compiler = GrammarCompiler(
            tokenizer, vocabulary_size=tokenizer.size, end_tokens=self.end_tokens
        )

    def _tokens(self, texts: tuple[str, ...]) -> frozenset[int]:
        return frozenset(self._control[text] for text in texts if text in self._control)

    def decodings(
        self, request: GenerateRequest, prompt: Prompt, count: int
    ) -> list[ReplyDecoding]:
        """Return one decoding for each of `count` choices. The grammar is compiled once.

        Raises BadRequest for a schema that cannot be enforced.
        """
        output = request.structured_output
        if request.messages is None or request.prepare is not None:
            masks = self._masks(self._grammars.text(output) if output else None, count)
            return [ReplyDecoding(token_mask=mask, end_tokens=self.end_tokens) for mask in masks]
        # The last 4 KiB suffice to see whether the prompt ends inside reasoning.
        end = unescape(prompt.escaped[-4096:]).decode(errors="ignore")
        opened = self.format.opens_reasoning(end)
        tools = [*(request.tools or ()), *request.loaded_tools]
        calls = bool(tools) and request.tool_use.choice != "none"
        masks = self._masks(self._grammar(request, tools if calls else [], opened=opened), count)
        if not calls and self.format.reasoning is None:
            return [ReplyDecoding(token_mask=mask, end_tokens=self.end_tokens) for mask in masks]
        return [
            ReplyDecoding(
                self.format.parser(tools, calls=calls, opened=opened),
                self._shown,
                mask,
                self.end_tokens,
            )
            for mask in masks
        ]

    def _masks(self, grammar: Grammar | None, count: int) -> Sequence[TokenMask | None]:
        if grammar is None:
            return [None] * count
        first = self._compiler.compile(grammar)
        return [first, *(first.copy() for _ in range(count - 1))]

    def _grammar(
        self, request: GenerateRequest, callable_tools: list[Any], *, opened: bool
    ) -> Grammar | None:
        output = request.structured_output
        if not callable_tools:
            return self._grammars.answer(output, opened=opened) if output else None
        return self._grammars.calls(callable_tools, request.tool_use, opened=opened, answer=output)
