"""Encodes requests into tokens, on the encoder threads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from msgspec import structs

from rekindle.chat.encode import Encoder
from rekindle.chat.escaping import EndMarkers, unescape
from rekindle.chat.grammar.clients import ClientGrammars
from rekindle.chat.grammar.matcher import GrammarCompiler
from rekindle.chat.grammar.process import GrammarRequest, ReplyFormatSetup
from rekindle.chat.grammar.reply import is_strict
from rekindle.chat.messages import picture_text, with_digests
from rekindle.chat.normalise import normalise
from rekindle.chat.prompt import Pictures, Prompt
from rekindle.chat.tools.registry import select
from rekindle.engine.base import Engine, TokenMask
from rekindle.errors import BadRequest, ContextTooLong, Unsupported
from rekindle.kvcache.block import namespace
from rekindle.protocol.admin import IndexPrompt, Tokenize, Validate
from rekindle.protocol.requests import GenerateRequest, count_images
from rekindle.runtime.encode.chat import ChatEncoder, History, RecentChats
from rekindle.runtime.encode.infill import InfillEncoder, mixed_tokens
from rekindle.runtime.encode.request import (
    EncodedPrompt,
    EncodedRequest,
    RequestPictures,
    precision,
)
from rekindle.runtime.encode.sampling import SamplingEncoder
from rekindle.runtime.encode.threads import check_token_ids
from rekindle.runtime.schedule.output import ReplyDecoding
from rekindle.runtime.storage.storage import Storage
from rekindle.tokens import TokenBuffer, Tokens

About = TypeVar("About", GenerateRequest, Validate, IndexPrompt, Tokenize)

SHARED_SALT = b"shared by the operator"  # no tenant has it: the digest of an API key is longer


class InputProcessor:
    """Encodes the requests for one model. Any thread may call it.

    The only mutable state that it reads is the index of stored conversations, which is locked.
    """

    def __init__(
        self, engine: Engine, storage: Storage, encoder: Encoder, output_format: OutputFormat
    ) -> None:
        self._capabilities = engine.capabilities
        self._fingerprint = engine.capabilities.kv_layout.fingerprint
        self.tokenizer = engine.tokenizer
        self._encoder = encoder
        self._entries = storage.entries.index
        self._secret = storage.secret
        self._output_format = output_format
        self._picture_tokens = engine.picture_tokens
        self._sampling = SamplingEncoder(engine.tokenizer)
        self._infill = InfillEncoder(engine.tokenizer, engine.capabilities.context_tokens)
        self._normalisers = storage.settings.normaliser  # for requests that do not name their own
        ends = output_format.end_tokens
        control = engine.tokenizer.control_texts.items()
        self._ends = EndMarkers(text for text, token in control if token in ends)
        self._chats = ChatEncoder(encoder, self._entries, self._ends)
        self.shared_namespace = self.namespace(SHARED_SALT)  # of state that all tenants may reuse

    @property
    def recent_chats(self) -> RecentChats:
        return self._chats.recent_chats

    @property
    def has_reasoning(self) -> bool:
        """Whether the model writes reasoning before its answer."""
        return self._output_format.format.reasoning is not None

    def forget_tenant(self, salt: bytes) -> None:
        """Forget what was remembered of the tenant's requests."""
        self._chats.recent_chats.forget(self.namespace(salt))
        self._output_format.forget_tenant(salt)

    def close(self) -> None:
        self._output_format.close()

    def namespace(self, salt: bytes) -> bytes:
        return namespace(self._fingerprint, salt, self._capabilities.block_tokens, self._secret)

    def group_namespaces(self, groups: Iterable[str]) -> tuple[bytes, ...]:
        """The namespaces of state that the operator shares with groups of tenants."""
        return tuple(self._group_namespace(group) for group in groups)

    def _group_namespace(self, group: str) -> bytes:
        return self.namespace(SHARED_SALT + b"\0" + group.encode())

    def owner(self, request: GenerateRequest) -> bytes:
        """The namespace in which the state of a request is stored."""
        shared = request.prepare.shared if request.prepare is not None else False
        if isinstance(shared, str):
            return self._group_namespace(shared)
        return self.shared_namespace if shared else self.namespace(request.salt)

    def encode(self, request: GenerateRequest) -> list[EncodedRequest]:
        """Encode the prompt once, and return a request for each choice.

        Raises a ServerError for a request that this model cannot answer.
        """
        if request.exact and not self._capabilities.can_be_exact:
            raise Unsupported(
                "This model cannot answer exactly: MLX does not compute the same bits twice on an "
                "NVIDIA GPU. Leave `cache_exact` out, or serve the model with --engine llama.cpp.",
                param="cache_exact",
            )
        check_token_ids(request.sampling.logit_bias, self.tokenizer, "logit_bias")
        check_token_ids(request.stop_token_ids, self.tokenizer, "stop_token_ids")
        tenant = self.owner(request)
        request, pictures, changes = self._normalised(request, tenant)
        whole = self._prompt(request, tenant, pictures.in_prompt)
        encoded = self._truncated(whole, request)
        # Check before the grammar is compiled, because that is expensive.
        count = len(encoded.prompt.tokens)
        self._check_fits(count, request.source, pictures=len(pictures.in_prompt))
        normalised = [*changes, *encoded.normalised]
        shown = self._text_of(encoded.prompt) if request.returns_prompt else None
        sampling = self._sampling.encode(request.sampling)
        choices = structs.replace(request, sampling=sampling).choices()
        decodings = self._output_format.decodings(request, whole.prompt, len(choices))
        return [
            EncodedRequest(
                request=_with_ends(choice, decoding),
                prompt=encoded.prompt,
                hashes=encoded.hashes,
                normalised=normalised,
                namespace=tenant,
                groups=self.group_namespaces(request.groups),
                precision=precision(choice, self._capabilities, tenant),
                decoding=decoding,
                shown_prompt=shown,
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

    def encode_conversation(self, op: Tokenize) -> tuple[list[int], str]:
        """Return the tokens of a conversation that gets no reply, and its text."""
        asked, pictures, _ = self._normalised(op, b"")
        prompt = self._chats.plain(asked, pictures.in_prompt)
        return prompt.tokens.ids(), unescape(prompt.escaped).decode() if op.with_text else ""

    def encode_wrapped(self, text: str, *, special: bool) -> list[int]:
        """Return the tokens of a text after the model's BOS token, if it uses one."""
        bos = self.tokenizer.bos if self.tokenizer.add_bos else None
        tokens = self.tokenizer.encode(text, special=special)
        return tokens if bos is None else [bos, *tokens]

    def _prompt(self, request: GenerateRequest, tenant: bytes, pictures: Pictures) -> EncodedPrompt:
        # An exact answer must equal that of a server without stored conversations.
        recalls = request.reuse and not request.exact
        if request.messages is None:
            assert request.prompt is not None, "a request has messages or a prompt"
            if request.infill is not None:
                assert isinstance(request.prompt, str), "the text in a gap is no list"
                asked = (request.infill, request.prompt, request.max_tokens)
                return EncodedPrompt(Prompt(Tokens.of(self._infill.encode(*asked))))
            is_truncated = request.truncate_prompt_tokens is not None
            owner = tenant if recalls else None
            return EncodedPrompt(self._completion(request.prompt, owner, is_truncated=is_truncated))
        if request.prepare is not None:
            return self._chats.prefix(request, pictures)
        if not request.reuse:
            return EncodedPrompt(self._chats.plain(request, pictures))
        return self._chats.encode(request, tenant, pictures, recalls=recalls)

    def _text_of(self, prompt: Prompt) -> str:
        """The text of a prompt with its control tokens, and without its images."""
        ids = TokenBuffer(prompt.tokens).text_ids
        return b"".join(self.tokenizer.piece(each, special=True) for each in ids).decode(
            errors="replace"
        )

    def _truncated(self, encoded: EncodedPrompt, request: GenerateRequest) -> EncodedPrompt:
        """Keep the last `truncate_prompt_tokens` of a prompt. A picture that is cut is left out."""
        limit = request.truncate_prompt_tokens
        if limit is None:
            return encoded
        if limit < 0:  # as many as leave room for the reply
            reply_tokens = min(request.max_tokens or 1, self._capabilities.context_tokens - 2)
            limit = self._capabilities.context_tokens - reply_tokens
        tokens = encoded.prompt.tokens
        begin = len(tokens) - limit
        if begin <= 0:
            return encoded
        cut = (each.stop for each in tokens.media if each.start < begin < each.stop)
        left = tokens[next(cut, begin) :]
        if not left:
            raise BadRequest(
                "`truncate_prompt_tokens` cuts the image at the end of the prompt: send more.",
                param="truncate_prompt_tokens",
            )
        return EncodedPrompt(Prompt(left), normalised=encoded.normalised)

    def _completion(
        self, prompt: str | list[int | str], tenant: bytes | None, *, is_truncated: bool
    ) -> Prompt:
        """Encode the prompt of a completion, with the tokens stored for the tenant's text."""
        if not prompt:
            if self.tokenizer.bos is None:
                raise BadRequest("the prompt is empty; send at least one token", param="prompt")
            return Prompt(Tokens.of([self.tokenizer.bos]))
        if not isinstance(prompt, str):
            if not is_truncated:
                self._check_size(prompt, "prompt")
            return Prompt(Tokens.of(mixed_tokens(prompt, self.tokenizer)))
        if not is_truncated:
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
        is_truncated = getattr(about, "truncate_prompt_tokens", None) is not None
        pictures, changes = RequestPictures(), list[str]()
        if messages and (about.pictures or count_images(messages)):
            digests = [picture.digest.hex() for picture in about.pictures]
            messages = with_digests(messages, digests)
            pictures = RequestPictures.of(about.pictures, self._picture_tokens, tenant)
            least = sum(len(pictures.in_prompt[picture_text(digest)]) for digest in digests)
            if not is_truncated:
                self._check_fits(least, "messages", pictures=len(digests), at_least=True)
        if about.normalise:
            names = self._normalisers if about.normalise is True else about.normalise
            shown, tools, changes = normalise(messages, tools, names)
            messages = [dict(message) for message in shown]
        if not is_truncated:
            self._check_size([messages, tools], "messages")
        return structs.replace(about, messages=messages, tools=tools), pictures, changes

    def _check_size(self, value: object, param: str) -> None:
        """Refuse a text that cannot fit even in the longest tokens; tokenising it takes long."""
        least = _characters(value) // self.tokenizer.longest_bytes
        self._check_fits(least, param, at_least=True)

    def _check_fits(
        self, tokens: int, param: str, *, pictures: int = 0, at_least: bool = False
    ) -> None:
        """The context has to hold the prompt and at least one token of the reply."""
        limit = self._capabilities.context_tokens
        if tokens >= limit:
            raise ContextTooLong(tokens, limit, param=param, pictures=pictures, at_least=at_least)


def _with_ends(request: GenerateRequest, decoding: ReplyDecoding) -> GenerateRequest:
    """Ban end tokens: all the time with `ignore_eos`, or for the first `min_tokens` tokens."""
    sampling, ends = request.sampling, decoding.end_tokens
    if request.ignore_eos and decoding.token_mask is None:  # a grammar needs them to end
        banned = dict.fromkeys(ends.difference(request.stop_token_ids), float("-inf"))
        sampling = replace(sampling, logit_bias={**sampling.logit_bias, **banned})
    if sampling.min_tokens:
        sampling = replace(sampling, end_tokens=sorted(ends.union(request.stop_token_ids)))
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
        self, engine: Engine, tool_format: str | None, reasoning_format: str | None
    ) -> None:
        tokenizer, template = engine.tokenizer, engine.chat_template
        self.format = select(template, tool_format=tool_format, reasoning_format=reasoning_format)
        self._control = tokenizer.control_texts
        self._shown = self._tokens(self.format.markers)
        self.end_tokens = tokenizer.end_tokens | self._tokens(self.format.end_markers)
        compiler = GrammarCompiler(
            tokenizer, vocabulary_size=tokenizer.size, end_tokens=self.end_tokens
        )
        setup = ReplyFormatSetup(
            template=template,
            tool_format=tool_format,
            reasoning_format=reasoning_format,
            control=dict(self._control),
            vocabulary_size=tokenizer.size,
            end_tokens=sorted(self.end_tokens),
        )
        self._grammars = ClientGrammars(setup, compiler.compile)

    def _tokens(self, texts: tuple[str, ...]) -> frozenset[int]:
        return frozenset(self._control[text] for text in texts if text in self._control)

    def _opens_reasoning(self, prompt: Prompt) -> bool:
        """Whether the prompt ends inside reasoning. Its last 4 KiB suffice to see that."""
        if self.format.reasoning is None:
            return False
        return self.format.reasoning.is_open(
            unescape(prompt.escaped[-4096:]).decode(errors="ignore")
        )

    def decodings(
        self, request: GenerateRequest, prompt: Prompt, count: int
    ) -> list[ReplyDecoding]:
        """Return one decoding for each of `count` choices. The grammar is compiled once.

        Raises BadRequest for a schema that cannot be enforced.
        """
        if request.messages is None or request.prepare is not None:
            asked = GrammarRequest(output=request.structured_output, completion=True)
            masks = self._masks(request, asked, count)
            return [ReplyDecoding(token_mask=mask, end_tokens=self.end_tokens) for mask in masks]
        opened = self._opens_reasoning(prompt)
        tools, callable_tools = _tools(request), _callable_tools(request)
        calls = bool(callable_tools)
        asked = GrammarRequest(
            tools=callable_tools,
            use=request.tool_use,
            output=request.structured_output,
            opened=opened,
        )
        masks = self._masks(request, asked, count)
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

    def _masks(
        self, request: GenerateRequest, asked: GrammarRequest, count: int
    ) -> Sequence[TokenMask | None]:
        if not is_constrained(request):
            return [None] * count
        first = self._grammars.matcher(asked, request.salt)
        if first is None:
            return [None] * count
        return [first, *(first.copy() for _ in range(count - 1))]

    def forget_tenant(self, salt: bytes) -> None:
        self._grammars.forget_tenant(salt)

    def close(self) -> None:
        self._grammars.close()


def _tools(request: GenerateRequest) -> list[Any]:
    return [*(request.tools or ()), *request.loaded_tools]


def _callable_tools(request: GenerateRequest) -> list[Any]:
    return _tools(request) if request.tool_use.choice != "none" else []


def is_constrained(request: GenerateRequest) -> bool:
    """Whether the reply may have to follow a grammar, which takes time to compile."""
    if request.structured_output is not None or request.tool_use.choice == "required":
        return True
    return any(map(is_strict, _callable_tools(request)))
