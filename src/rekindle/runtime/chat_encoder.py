"""A request's conversation into its prompt: what was found out about it at an earlier turn is taken
over, and replies are put back as they were sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from rekindle.chat.encode import Encoder
from rekindle.chat.known_prefix import Pictures
from rekindle.chat.message_hashes import ConversationHashes
from rekindle.chat.messages import Message, with_parsed_arguments
from rekindle.chat.normalise import without_strict
from rekindle.chat.prompt import ChatPrompt
from rekindle.chat.replay import EndMarkers
from rekindle.errors import TemplateFailed
from rekindle.kvcache.entry_index import EntryIndex
from rekindle.protocol.admin import Validate
from rekindle.protocol.requests import GenerateRequest
from rekindle.protocol.tokenisation import Tokenize
from rekindle.runtime.recent_chats import ChatTools, RecentChat, RecentChats, chat_key
from rekindle.runtime.replay import History, Restoration
from rekindle.runtime.request import EncodedPrompt


class ChatEncoder:
    """Any thread may call it."""

    def __init__(self, encoder: Encoder, entries: EntryIndex, ends: EndMarkers) -> None:
        """`ends`: where assistant messages end in a prompt."""
        self.recent_chats = RecentChats()
        self._encoder = encoder
        self._entries = entries
        self._ends = ends

    def plain(self, about: GenerateRequest | Tokenize, pictures: Pictures) -> ChatPrompt:
        """The prompt of a conversation of which nothing is remembered."""
        sent = list(map(with_parsed_arguments, about.messages or ()))
        tools = without_strict(about.tools)
        return self._encoder.chat(sent, tools=tools, pictures=pictures, **_options(about))

    def encode(
        self,
        about: GenerateRequest | Validate,
        tenant: bytes,
        pictures: Pictures,
        *,
        recalls: bool,
    ) -> EncodedPrompt:
        """A tenant's conversation; `recalls`: with the tokens that are remembered of it."""
        messages = about.messages or []
        key = chat_key(messages)
        earlier = self.recent_chats.find(tenant, key)
        known = earlier.messages if earlier else ()
        sent = [*known, *map(with_parsed_arguments, messages[len(known) :])]
        tools = ChatTools.of(about.tools, earlier)
        # Long conversations are hashed here, on an encoder thread, not between two engine steps.
        hashes = ConversationHashes(
            messages,
            tools.sent,
            continued=isinstance(about, GenerateRequest) and about.continue_final_message,
            earlier=earlier.hashes if earlier else None,
        )
        history = History(self._entries, tenant, sent, hashes) if recalls else None
        restored = history.restorations(earlier.restorations if earlier else {}) if history else {}

        def encode(messages: Sequence[Message]) -> ChatPrompt:
            return self._encoder.chat(
                messages,
                tools=tools.shown,
                pictures=pictures,
                recall=partial(history.recall, ends=self._ends) if history else None,
                earlier=earlier.prompt if earlier else None,
                **_options(about),
            )

        prompt, changes = _encoded(encode, sent, restored)
        if isinstance(about, GenerateRequest):
            recent = RecentChat(sent, hashes, prompt, tools, restored)
            self.recent_chats.put(tenant, key, recent)
        return EncodedPrompt(prompt, hashes, changes)


def _encoded(
    encode: Callable[[Sequence[Message]], ChatPrompt],
    sent: Sequence[Message],
    restored: Mapping[int, Restoration],
) -> tuple[ChatPrompt, list[str]]:
    """The messages with tool calls and reasoning as they were sampled, encoded; and the names of
    what that changed."""
    changes = sorted({name for each in restored.values() for name in each.changes})
    if changes:
        places = enumerate(sent)
        as_sampled = [restored[at].message if at in restored else each for at, each in places]
        with suppress(TemplateFailed):  # it refuses what its model wrote: then as it was sent
            return encode(as_sampled), changes
    return encode(sent), []


def _options(about: GenerateRequest | Validate | Tokenize) -> dict[str, Any]:
    """How a request wants its conversation encoded."""
    options = {"template_kwargs": about.template_kwargs}
    if isinstance(about, Validate):
        return options
    ends = ("add_generation_prompt", "continue_final_message")
    return {**options, **{name: getattr(about, name) for name in ends}}
