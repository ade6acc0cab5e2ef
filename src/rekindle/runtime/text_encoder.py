"""Prompts that are no conversations: texts and token ids."""

from __future__ import annotations

from functools import partial

from rekindle.chat.encode import Encoder
from rekindle.chat.prompt import Prompt
from rekindle.chat.replay import EndMarkers
from rekindle.errors import BadRequest
from rekindle.kvcache.entry_index import EntryIndex
from rekindle.runtime.replay import History
from rekindle.tokens import Tokenizer, Tokens


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
