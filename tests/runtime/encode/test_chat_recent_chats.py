"""Recent encodings are found by their messages, per tenant and within a memory limit."""

from __future__ import annotations

import json
import threading
from random import Random
from typing import Any

from rekindle.chat.message_hashes import ConversationHashes
from rekindle.chat.prompt import ChatPrompt
from rekindle.runtime.encode.chat import (
    ChatTools,
    RecentChat,
    RecentChats,
    chat_key,
    object_bytes,
)
from rekindle.tokens import Tokens
from tests.kvcache.measure import allocated_bytes


def said(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


def chat(*texts: str) -> RecentChat:
    messages = said(*texts)
    hashes, tools = ConversationHashes(messages), ChatTools.of(None, None)
    return RecentChat(messages, hashes, ChatPrompt(Tokens()), tools, object_bytes(messages))


def put(recent: RecentChats, tenant: bytes, *texts: str) -> RecentChat:
    stored = chat(*texts)
    recent.put(tenant, chat_key(said(*texts)), stored)
    return stored


def test_the_longest_known_prefix_of_a_conversation_is_found() -> None:
    recent = RecentChats()
    put(recent, b"one", "a")
    longest = put(recent, b"one", "a", "b")
    put(recent, b"one", "a", "b", "d")
    assert recent.find(b"one", chat_key(said("a", "b", "c"))) is longest
    assert recent.find(b"one", chat_key(said("a", "b"))) is longest
    assert recent.find(b"one", chat_key(said("b"))) is None
    assert recent.find(b"other", chat_key(said("a", "b"))) is None


def test_a_key_is_a_prefix_of_another_only_if_its_messages_are() -> None:
    assert not chat_key(said("ab")).startswith(chat_key(said("a")))
    assert chat_key([{"n": 1}]) != chat_key([{"n": 1.0}])
    assert chat_key([{"n": 1}]) != chat_key([{"n": True}])
    assert chat_key([{"n": 1, "m": 2}]) != chat_key([{"m": 2, "n": 1}])


def test_over_the_limit_the_largest_tenant_loses_its_oldest_chat() -> None:
    cost_bytes = chat("a").cost_bytes(chat_key(said("a")))
    recent = RecentChats(4 * cost_bytes)
    kept = put(recent, b"small", "a")
    for text in "abcdef":
        put(recent, b"large", text)
        assert recent.used_bytes <= 4 * cost_bytes
    assert recent.find(b"small", chat_key(said("a"))) is kept
    known = [recent.find(b"large", chat_key(said(text))) for text in "abcdef"]
    assert [each is not None for each in known] == [False, False, False, True, True, True]


def test_a_chat_larger_than_the_limit_is_not_kept_and_evicts_nothing() -> None:
    recent = RecentChats(chat("a").cost_bytes(chat_key(said("a"))))
    kept = put(recent, b"one", "a")
    put(recent, b"one", "b" * 1000)
    assert recent.find(b"one", chat_key(said("a"))) is kept


def junk(number: int) -> list[Any]:
    """Messages whose objects take 60 times the memory of their JSON."""
    return list(json.loads(f'[{{"role": "user", "n": {number}, "junk": [{"[]," * 20_000} 1]}}]'))


def test_the_limit_counts_the_memory_that_is_held() -> None:
    limit_bytes = 8 << 20
    recent = RecentChats(limit_bytes)

    def fill() -> None:
        for number in range(50):
            messages = junk(number)
            tools = ChatTools.of(messages if number % 2 else None, None)
            hashes, size_bytes = ConversationHashes([]), object_bytes(messages)
            chat = RecentChat(messages, hashes, ChatPrompt(Tokens()), tools, size_bytes)
            recent.put(b"one", chat_key(messages), chat)

    assert limit_bytes // 2 < allocated_bytes(fill) < limit_bytes
    assert limit_bytes // 2 < recent.used_bytes <= limit_bytes


def test_storing_the_same_messages_again_takes_no_more_memory() -> None:
    recent = RecentChats()
    put(recent, b"one", "a")
    once = recent.used_bytes
    newest = put(recent, b"one", "a")
    assert recent.used_bytes == once
    assert recent.find(b"one", chat_key(said("a"))) is newest


def test_threads_can_find_put_and_forget_concurrently() -> None:
    recent = RecentChats(20 * chat("a").cost_bytes(chat_key(said("a"))))
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        chance = Random(seed)
        try:
            for _ in range(300):
                tenant, texts = chance.choice((b"one", b"two")), chance.choices("ab", k=3)
                put(recent, tenant, *texts)
                found = recent.find(tenant, chat_key(said(*texts, "c")))
                assert found is None or list(found.messages) == said(*texts)[: len(found.messages)]
                if chance.random() < 0.05:
                    recent.forget(tenant)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    recent.forget(b"one")
    recent.forget(b"two")
    assert recent.used_bytes == 0
