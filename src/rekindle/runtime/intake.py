"""Requests into turns: what the encoder threads do, beside the engine."""

from __future__ import annotations

from dataclasses import replace

from rekindle.cache.entries import Entries
from rekindle.cache.key import namespace, unpack
from rekindle.engine.base import Abilities
from rekindle.engine.llamacpp.vocabulary import Vocabulary
from rekindle.errors import BadRequest, ContextTooLong
from rekindle.prompt.head import Recall, Remembered
from rekindle.prompt.tokens import Encoder, Prompt
from rekindle.runtime import wire
from rekindle.runtime.turn import Turn

SHARED_SALT = b"shared by the operator"  # shorter than any key's digest


class Intake:
    """Any thread may call it: it looks at nothing that changes but the remembered heads."""

    def __init__(
        self,
        abilities: Abilities,
        vocabulary: Vocabulary,
        encoder: Encoder,
        entries: Entries,
        secret: bytes,
    ) -> None:
        self._abilities = abilities
        self._vocabulary = vocabulary
        self._encoder = encoder
        self._entries = entries
        self._secret = secret

    def root(self, salt: bytes) -> bytes:
        """The namespace of a tenant."""
        abilities = self._abilities
        return namespace(abilities.fingerprint, salt, abilities.block_tokens, self._secret)

    def turn(self, ask: wire.Ask) -> Turn:
        vocabulary = self._vocabulary
        if any(token >= vocabulary.size for token in ask.sampling.logit_bias):
            raise BadRequest(
                f"token ids of this model go from 0 to {vocabulary.size - 1}", param="logit_bias"
            )
        if ask.ignore_eos:
            ends = dict.fromkeys(vocabulary.end_tokens, float("-inf"))
            bias = {**ask.sampling.logit_bias, **ends}
            ask.sampling = replace(ask.sampling, logit_bias=bias)
        return Turn(
            ask,
            self._prompt(ask),
            namespace=self.root(_salt(ask)),
            tokenizer=vocabulary,
            end_tokens=vocabulary.end_tokens,
            context_tokens=self._abilities.context_tokens,
        )

    def _prompt(self, ask: wire.Ask) -> Prompt:
        # Exact answers are those of a server that remembers nothing, so its tokens are used.
        recall = self._recall(self.root(ask.salt)) if ask.reuse and not ask.exact else None
        if ask.messages is not None:
            self._check_size(ask.messages, ask.source)
            kwargs = ask.template_kwargs
            if ask.preparing is not None:
                return self._encoder.prefix(ask.messages, tools=ask.tools, template_kwargs=kwargs)
            return self._encoder.chat(
                ask.messages, template_kwargs=kwargs, tools=ask.tools, recall=recall
            )
        assert ask.prompt is not None
        if not ask.prompt:
            return self._beginning()
        if isinstance(ask.prompt, str):
            self._check_size(ask.prompt, ask.source)
            return self._encoder.text(ask.prompt, recall=recall)
        return self._given(ask.prompt)

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

    def prompt_about(self, op: wire.Validate | wire.IndexPrompt, salt: bytes) -> Prompt:
        """The prompt that a question about the cache is about."""
        self._check_size(op.messages, "messages")
        if isinstance(op, wire.IndexPrompt):
            return self._encoder.prefix(op.messages, tools=op.tools, template_kwargs={})
        return self._encoder.chat(
            op.messages,
            template_kwargs=op.template_kwargs,
            tools=op.tools,
            recall=self._recall(self.root(salt)),
        )

    def _recall(self, root: bytes) -> Recall:
        """Remembered heads of one tenant, for the encoder."""

        def recall(marked: bytes) -> Remembered | None:
            entry = self._entries.recall(root, marked)
            return Remembered(entry.text, unpack(entry.packed)) if entry else None

        return recall


def _salt(ask: wire.Ask) -> bytes:
    return SHARED_SALT if ask.preparing is not None and ask.preparing.shared else ask.salt


def _characters(value: object) -> int:
    """Characters in all strings of a JSON value, a lower bound of their bytes."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(_characters(each) for each in value.values())
    if isinstance(value, list):
        return sum(_characters(each) for each in value)
    return 0
