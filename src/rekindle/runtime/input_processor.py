"""Requests into turns: what the encoder threads do, beside the engine."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

from rekindle.chat.arguments import parsed
from rekindle.chat.encode import Encoder, Prompt
from rekindle.chat.message_hashes import Told
from rekindle.chat.replay import Ends, Keys
from rekindle.chat.tool_order import described, differ, ordered
from rekindle.chat.volatile import settled
from rekindle.engine.base import Abilities
from rekindle.engine.llamacpp.tokenizer import Vocabulary
from rekindle.errors import BadRequest, ContextTooLong, TemplateFailed
from rekindle.kvcache.entries import Entries
from rekindle.kvcache.key import namespace
from rekindle.protocol.admin import IndexPrompt, Validate
from rekindle.protocol.requests import GenerateRequest
from rekindle.runtime.output_format import OutputFormat
from rekindle.runtime.replay import History
from rekindle.runtime.turn import Turn

Messages = list[dict[str, Any]]
Tools = list[Any] | None

TOOLS_IN_ORDER = "tools"
SHARED_SALT = b"shared by the operator"  # shorter than any key's digest


class Read(NamedTuple):
    """A request as a prompt."""

    prompt: Prompt
    changes: list[str]  # in the request, so that more of it matches
    keys: Keys | None = None  # of a conversation's replies


class Intake:
    """Any thread may call it: it looks at nothing that changes but the remembered heads."""

    def __init__(
        self,
        abilities: Abilities,
        vocabulary: Vocabulary,
        encoder: Encoder,
        entries: Entries,
        secret: bytes,
        output_format: OutputFormat | None = None,
    ) -> None:
        self._abilities = abilities
        self._vocabulary = vocabulary
        self._encoder = encoder
        self._entries = entries
        self._secret = secret
        self._output_format = output_format or OutputFormat(vocabulary, None)

    def root(self, salt: bytes) -> bytes:
        """The namespace of a tenant."""
        abilities = self._abilities
        return namespace(abilities.fingerprint, salt, abilities.block_tokens, self._secret)

    def turn(self, ask: GenerateRequest) -> Turn:
        vocabulary = self._vocabulary
        if any(token >= vocabulary.size for token in ask.sampling.logit_bias):
            raise BadRequest(
                f"token ids of this model go from 0 to {vocabulary.size - 1}", param="logit_bias"
            )
        prompt, changes, keys = self._prompt(ask)
        decoding = self._output_format.decoding(ask, prompt)
        # A constrained reply ends when it is complete, whatever the request says.
        if ask.ignore_eos and decoding.constraint is None:
            ends = dict.fromkeys(self._output_format.end_tokens, float("-inf"))
            bias = {**ask.sampling.logit_bias, **ends}
            ask.sampling = replace(ask.sampling, logit_bias=bias)
        turn = Turn(
            ask,
            prompt,
            namespace=self.root(_salt(ask)),
            tokenizer=vocabulary,
            end_tokens=self._output_format.end_tokens,
            context_tokens=self._abilities.context_tokens,
            parser=decoding.parser,
            shown=decoding.shown,
            constraint=decoding.constraint,
        )
        turn.normalised = changes
        if ask.messages and ask.reuse:  # long conversations are hashed here, not between two steps
            turn.keys, turn.told = keys, Told(ask.messages, ask.tools)
        return turn

    def _prompt(self, ask: GenerateRequest) -> Read:
        # Exact answers are those of a server that remembers nothing, so its tokens are used.
        recalls = ask.reuse and not ask.exact
        if ask.messages is not None:
            changes = self._settle(ask)
            kwargs = ask.template_kwargs
            if ask.prepare is not None:
                return Read(self._prefix(ask.messages, ask.tools, kwargs), changes)
            root = self.root(ask.salt) if recalls else None
            prompt, more, keys = self._chat(ask.messages, ask.tools, kwargs, root)
            return Read(prompt, [*changes, *more], keys)
        assert ask.prompt is not None
        if not ask.prompt:
            return Read(self._beginning(), [])
        if isinstance(ask.prompt, str):
            self._check_size(ask.prompt, ask.source)
            history = History(self._entries, self.root(ask.salt), [], Keys([]))
            recall = partial(history.recall, ends=self._ends) if recalls else None
            return Read(self._encoder.text(ask.prompt, recall=recall), [])
        return Read(self._given(ask.prompt), [])

    def _settle(self, about: GenerateRequest | Validate | IndexPrompt) -> list[str]:
        """Take out of a request what changes without meaning; the names of what was found."""
        assert about.messages is not None
        if not about.normalise:
            return []
        messages, changes = settled(about.messages)
        if not messages:  # there is nothing else to ask
            messages, changes = list(about.messages), []
        about.messages = [dict(message) for message in messages]
        if about.tools:
            tools = ordered(about.tools)
            changes += [TOOLS_IN_ORDER] if differ(tools, about.tools) else []
            about.tools = tools
        return changes

    def _prefix(self, messages: Messages, tools: Tools, kwargs: dict[str, Any]) -> Prompt:
        self._check_size(messages, "messages")
        return self._encoder.prefix(
            [parsed(message) for message in messages],
            tools=described(tools),
            template_kwargs=kwargs,
        )

    def _chat(
        self, messages: Messages, tools: Tools, kwargs: dict[str, Any], root: bytes | None
    ) -> Read:
        """A conversation's prompt, and what was put back in it; without a root nothing is."""
        self._check_size(messages, "messages")
        sent = [parsed(message) for message in messages]
        keys = Keys(sent)
        encode = partial(self._encoder.chat, tools=described(tools), template_kwargs=kwargs)
        if root is None:
            return Read(encode(sent), [], keys)
        history = History(self._entries, root, sent, keys)
        recall = partial(history.recall, ends=self._ends)
        as_sampled, changes = history.restored()
        if changes:
            with suppress(TemplateFailed):  # it refuses what its model wrote: then as it was sent
                return Read(encode(as_sampled, recall=recall), changes, keys)
        return Read(encode(sent, recall=recall), [], keys)

    @cached_property
    def _ends(self) -> Ends:
        known = self._vocabulary.control_texts.items()
        return Ends(text for text, token in known if token in self._output_format.end_tokens)

    def _check_size(self, text: object, param: str) -> None:
        """Tokenising takes its time: refuse what cannot fit before trying."""
        least = _characters(text) // self._vocabulary.longest_bytes
        if least >= self._abilities.context_tokens:
            limit = self._abilities.context_tokens
            raise ContextTooLong(f"at least {least}", limit, param=param)

    def _beginning(self) -> Prompt:
        """An empty prompt: the model's own beginning of a text."""
        bos = self._vocabulary.bos
        if bos is None:
            raise BadRequest("the prompt is empty; send at least one token", param="prompt")
        return Prompt((bos,), boundaries=())

    def _given(self, tokens: list[int]) -> Prompt:
        """A prompt that came as token ids."""
        most = self._abilities.vocabulary
        if any(not 0 <= token < most for token in tokens):
            raise BadRequest(f"token ids of this model go from 0 to {most - 1}", param="prompt")
        return Prompt(tuple(tokens), boundaries=())

    def prompt_about(self, op: Validate | IndexPrompt, salt: bytes) -> Prompt:
        """The prompt that a question about the cache is about."""
        self._settle(op)
        if isinstance(op, IndexPrompt):
            return self._prefix(op.messages, op.tools, {})
        return self._chat(op.messages, op.tools, op.template_kwargs, self.root(salt)).prompt


def _salt(ask: GenerateRequest) -> bytes:
    return SHARED_SALT if ask.prepare is not None and ask.prepare.shared else ask.salt


def _characters(value: object) -> int:
    """Characters in all strings of a JSON value, a lower bound of their bytes."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(_characters(each) for each in value.values())
    if isinstance(value, list):
        return sum(_characters(each) for each in value)
    return 0
