"""Conversations can be exported to state files of the engine and imported from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rekindle.errors import BadRequest, CacheKeyNotFound, ServerError, Unsupported
from rekindle.kvcache.entries.entries import Draft
from rekindle.protocol.admin import (
    AdminOp,
    AdminRequest,
    EntryInfo,
    ExportState,
    ImportState,
    StateFile,
)
from rekindle.protocol.requests import Names
from rekindle.tokens import Tokens
from tests.support.fake import FakeEngine
from tests.support.fake_files import FakeStateFiles
from tests.support.harness import RuntimeHarness

PROMPT = [(7 * n) % 900 for n in range(50)]
KEYED = Names(return_cache_key=True)


def harness(*, can_truncate: bool = True, **more: Any) -> RuntimeHarness:
    files = FakeStateFiles()
    return RuntimeHarness(FakeEngine(can_truncate=can_truncate, state_files=files), **more)


def told(harness: RuntimeHarness, **request: Any) -> tuple[str, list[int]]:
    """Store a conversation and return its key and its tokens."""
    reply = harness.ask(PROMPT, max_tokens=6, names=KEYED, **request)
    key = reply.finished.cache.new_cache_key
    assert key is not None
    return key, [*PROMPT, *reply.tokens]


def administer(harness: RuntimeHarness, op: AdminOp, **more: Any) -> Any:
    """Answer as a runtime does, with steps and tier events between the pieces of work."""
    results: list[Any] = []
    request = AdminRequest(id=1, salt=more.pop("salt", b""), op=op, **more)
    for _ in harness.runtime.admin.answer(request, None, results.append):
        harness.scheduler.step()
        harness.take_events()
    while not results:
        harness.take_events(wait=not harness.scheduler.step())
    return results[0]


def exported(harness: RuntimeHarness, key: str, folder: Path, **more: Any) -> Path:
    found = administer(harness, ExportState(key, str(folder)), **more)
    assert isinstance(found, StateFile)
    path = folder / found.name
    assert found.size_bytes == path.stat().st_size
    assert found.token_count == len(json.loads(path.read_text())["tokens"])
    return path


def test_a_conversation_is_exported_by_message_id_and_by_session_id(tmp_path: Path) -> None:
    source = harness()
    names = Names(session_id="chat", session_number=5, message_id="msg_1", return_cache_key=True)
    finished = source.ask(PROMPT, max_tokens=6, names=names).finished
    assert finished.cache.new_cache_key is not None
    expected = exported(source, finished.cache.new_cache_key, tmp_path).read_bytes()
    for name in ("chat", "5", "msg_1"):
        assert exported(source, name, tmp_path).read_bytes() == expected
        with pytest.raises(CacheKeyNotFound):
            administer(source, ExportState(name, str(tmp_path)), salt=b"other")


@pytest.mark.parametrize("can_truncate", [True, False])
def test_another_server_resumes_an_exported_conversation(
    can_truncate: bool, tmp_path: Path
) -> None:
    source = harness(can_truncate=can_truncate)
    key, tokens = told(source)
    path = exported(source, key, tmp_path)
    other = harness(can_truncate=can_truncate)
    entry = administer(other, ImportState(str(path), "named"))
    assert isinstance(entry, EntryInfo)
    assert (
        entry.token_count == entry.held_tokens == len(tokens) - 1
    )  # the last token was sampled and never computed
    assert [(each.kind, each.name) for each in entry.names] == [("session_id", "named")]
    asked = [*tokens, 5, 6]
    reply = other.ask(asked, max_tokens=4, names=Names(session_id="named"))
    assert reply.reused == len(tokens) - 1
    assert reply.finished.cache.status == "hit"
    assert reply.tokens == harness(can_truncate=can_truncate).ask(asked, max_tokens=4).tokens


@pytest.mark.parametrize("can_truncate", [True, False])
def test_state_on_disk_is_read_for_an_export(can_truncate: bool, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    first = harness(can_truncate=can_truncate, folder=folder)
    key, _ = told(first)
    first.close()
    again = harness(can_truncate=can_truncate, folder=folder)
    path = exported(again, key, tmp_path)
    again.close()
    assert json.loads(path.read_text())["tokens"][:50] == PROMPT


def test_an_admin_cannot_export_the_state_of_others(tmp_path: Path) -> None:
    mine = harness()
    key, tokens = told(mine, salt=b"alice")
    for salt, admin in ((b"bob", False), (b"bob", True)):
        with pytest.raises(CacheKeyNotFound):
            exported(mine, key, tmp_path, salt=salt, admin=admin)
    assert list(tmp_path.iterdir()) == []
    path = exported(mine, key, tmp_path, salt=b"alice")
    administer(mine, ImportState(str(path)), salt=b"carol", admin=True)
    assert mine.ask(tokens, max_tokens=1, salt=b"carol").reused == len(tokens) - 1
    assert mine.ask(tokens, max_tokens=1, salt=b"dave").reused == 0


def test_an_engine_without_state_files_refuses_exports_and_imports(tmp_path: Path) -> None:
    plain = RuntimeHarness(FakeEngine())
    key, _ = told(plain)
    for op in (ExportState(key, str(tmp_path)), ImportState(str(tmp_path / "state.json"))):
        with pytest.raises(Unsupported, match="cannot be exported or imported"):
            administer(plain, op)


def test_state_that_cannot_be_exported_is_refused_with_the_reason(tmp_path: Path) -> None:
    mine = harness()
    key, _ = told(mine, kv_bits=8, kv_quantization_start=0)
    with pytest.raises(Unsupported, match="default precision"):
        exported(mine, key, tmp_path)
    draft = Draft(namespace=mine.namespace(), tokens=Tokens.of(PROMPT), text=b"", keyed=True)
    entry = mine.entries.remember(draft)  # its state was never computed at the default precision
    assert entry is not None
    with pytest.raises(ServerError, match="has no state to export") as raised:
        exported(mine, entry.key, tmp_path)
    assert raised.value.status == 409


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1000] * 3, "from 0 to 999"),
        ([-1], "from 0 to"),
        ([5] * 513, "context of this model has 512"),
    ],
)
def test_a_file_with_impossible_tokens_is_refused(
    tokens: list[int], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "state.json"
    path.write_text(json.dumps({"tokens": tokens, "cells": "", "checkpoint": ""}))
    with pytest.raises(BadRequest, match=message):
        administer(harness(), ImportState(str(path)))
    path.write_text("{}")
    with pytest.raises(BadRequest, match="no file"):
        administer(harness(), ImportState(str(path)))


def test_an_import_without_room_is_refused_and_creates_no_entry(tmp_path: Path) -> None:
    source = harness()
    key, tokens = told(source)
    path = exported(source, key, tmp_path)
    small = harness(ram_bytes=256)
    with pytest.raises(ServerError, match="room for the first") as raised:
        administer(small, ImportState(str(path), "named"))
    assert raised.value.status == 507
    assert len(small.storage.entries) == 0
    assert small.ask(tokens, max_tokens=2).tokens == source.ask(tokens, max_tokens=2).tokens
