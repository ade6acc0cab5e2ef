"""A tenant that sends the names of another learns nothing, not even from the response time.

The tests do not measure time. They check that a name of another tenant and an unknown name run the
same lines of code in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rekindle.chat.prompt import Prompt
from rekindle.protocol.admin import (
    AdminOp,
    DeleteEntry,
    ExportState,
    Flush,
    GetDocument,
    PinEntry,
    RemoveSession,
    ShowEntry,
    StoreDocument,
    Validate,
)
from rekindle.protocol.requests import Names
from rekindle.tokens import Tokens
from tests.support.fake import FakeEngine
from tests.support.harness import RuntimeHarness
from tests.support.traced import Line, lines_of

ANNA, BERT = b"anna", b"bert"
PROMPT = list(range(100, 140))


@pytest.fixture
def harness() -> Iterator[RuntimeHarness]:
    runtime = RuntimeHarness(FakeEngine())
    yield runtime
    runtime.close()


def stolen(harness: RuntimeHarness) -> dict[str, str]:
    """The names of Anna's conversation."""
    names = Names(return_cache_key=True, session_id="anna's", wants_message_id=True)
    finished = harness.ask(PROMPT, salt=ANNA, names=names).finished
    assert finished.cache.new_cache_key is not None
    assert finished.message_id is not None
    harness.administer(StoreDocument(key="conv_anna", content=b"{}"), salt=ANNA)
    return {
        "document": "conv_anna",
        "cache_key": finished.cache.new_cache_key,
        "session_id": "anna's",
        "message_id": finished.message_id,
    }


def made_up(names: dict[str, str]) -> dict[str, str]:
    return {kind: name[::-1] for kind, name in names.items()}


def validate(cache_key: str) -> Validate:
    return Validate(cache_key=cache_key, messages=[{"role": "user", "content": "x"}])


WAYS: dict[str, Callable[[dict[str, str]], AdminOp]] = {
    "show": lambda names: ShowEntry(names["cache_key"]),
    "show session": lambda names: ShowEntry(names["session_id"]),
    "show message": lambda names: ShowEntry(names["message_id"]),
    "export": lambda names: ExportState(names["cache_key"], "/none"),
    "export message": lambda names: ExportState(names["message_id"], "/none"),
    "export session": lambda names: ExportState(names["session_id"], "/none"),
    "delete": lambda names: DeleteEntry(names["cache_key"]),
    "pin": lambda names: PinEntry(names["cache_key"], pinned=True),
    "unpin": lambda names: PinEntry(names["cache_key"], pinned=False),
    "flush": lambda names: Flush(names["cache_key"]),
    "remove session": lambda names: RemoveSession(names["session_id"]),
    "remove message": lambda names: RemoveSession(names["message_id"]),
    "validate": lambda names: validate(names["cache_key"]),
    "read document": lambda names: GetDocument(names["document"]),
    "delete document": lambda names: DeleteEntry(names["document"]),
    "show document": lambda names: ShowEntry(names["document"]),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_stolen_name_runs_the_same_code_as_an_unknown_one(
    harness: RuntimeHarness, way: str
) -> None:
    names = stolen(harness)
    prompt = Prompt(Tokens.of(PROMPT)) if way == "validate" else None

    def asked(which: dict[str, str]) -> tuple[list[Line], Any]:
        op = WAYS[way](which)
        return lines_of(lambda: harness.administer(op, salt=BERT, prompt=prompt))

    asked(made_up(names))  # warm up one-time work
    lines, result = asked(names)
    assert lines
    assert (lines, result) == asked(made_up(names))
    own = harness.administer(ShowEntry(names["cache_key"]), salt=ANNA)
    assert not getattr(own, "pinned", True)
    assert harness.administer(GetDocument(names["document"]), salt=ANNA)


@pytest.mark.parametrize("kind", ["cache_key", "session_id", "message_id"])
def test_a_turn_with_a_stolen_name_runs_the_same_code_as_one_with_an_unknown_name(
    harness: RuntimeHarness, kind: str
) -> None:
    names = stolen(harness)
    fields: dict[str, Callable[[str], Names]] = {
        "cache_key": lambda name: Names(cache_key=name),
        "session_id": lambda name: Names(session_id=name),
        "message_id": lambda name: Names(message_ids=[name]),
    }

    def found(name: str) -> tuple[list[Line], Any]:
        reply = harness.submit(PROMPT, salt=BERT, names=fields[kind](name))
        way = lines_of(lambda: harness.sessions.find(reply.turn.encoded))
        harness.run(reply)
        return way

    before, with_stolen = found(names[kind][::-1]), found(names[kind])
    assert before[0]
    assert with_stolen == before


def test_the_owner_of_a_name_runs_other_code(harness: RuntimeHarness) -> None:
    """This proves that the tests above can see a difference."""
    op = ShowEntry(stolen(harness)["cache_key"])
    own = lines_of(lambda: harness.administer(op, salt=ANNA))
    assert own[0] != lines_of(lambda: harness.administer(op, salt=BERT))[0]
