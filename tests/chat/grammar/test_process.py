"""A grammar that would hang or crash its compiler is refused without harm to the server."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rekindle.chat.grammar.process import (
    GrammarAnswer,
    GrammarLimits,
    GrammarProcess,
    GrammarRequest,
    GrammarTooCostly,
    ReplyFormatSetup,
    written,
)
from rekindle.errors import BadRequest, ServerError, Unavailable
from rekindle.protocol.requests import StructuredOutput, ToolUse
from tests.chat.grammar.costly import (
    HANGS,
    OVERFLOWS,
    SLOW_TO_COMPILE,
    SLOW_TO_LOCATE,
    referring,
    unicode_pattern,
)
from tests.chat.grammar.writer import ByteVocabulary, Writer, reply_grammars

VOCABULARY = ByteVocabulary(["<tool_call>"])
SETUP = ReplyFormatSetup(
    tool_format="hermes",
    reasoning_format="none",
    control=dict(VOCABULARY.control_texts),
    vocabulary_size=VOCABULARY.size,
    end_tokens=sorted(VOCABULARY.end_tokens),
)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@contextmanager
def running(**limits: Any) -> Iterator[GrammarProcess]:
    setup = msgspec.structs.replace(SETUP, limits=GrammarLimits(**limits))
    process = GrammarProcess(setup)
    try:
        yield process
    finally:
        process.close()


@pytest.fixture(scope="module")
def process() -> Iterator[GrammarProcess]:
    with running() as started:
        yield started


def asking(*, tools: list[Any] | None = None, **output: Any) -> GrammarRequest:
    if tools is not None:
        return GrammarRequest(tools=tools, use=ToolUse(choice="required"))
    return GrammarRequest(output=StructuredOutput(**output))


def ask(process: GrammarProcess, request: GrammarRequest) -> GrammarAnswer:
    return process.answer(msgspec.msgpack.encode(request))


def tool(parameters: Any, *, strict: bool) -> dict[str, Any]:
    return {"function": {"name": "f", "parameters": parameters, "strict": strict}}


@pytest.mark.parametrize(
    "request_",
    [
        asking(schema=SCHEMA),
        asking(regex="[a-z]+"),
        asking(grammar='root ::= "a" | "b" root'),
        asking(choices=["a", "b"]),
        asking(tools=[tool(SCHEMA, strict=True)]),
        asking(tools=[tool({"type": "object", "not": {}}, strict=False)]),
        asking(tools=[]),
    ],
)
def test_the_process_writes_the_same_grammar_as_this_one(
    process: GrammarProcess, request_: GrammarRequest
) -> None:
    answer = ask(process, request_)
    grammars = reply_grammars("hermes", control=VOCABULARY.control_texts)
    assert answer.error is None
    assert answer.grammar == written(grammars, request_)
    if answer.grammar:
        Writer(["<tool_call>"]).matcher(answer.grammar)


@pytest.mark.parametrize(
    "request_",
    [
        asking(schema={"properties": {"a": {"items": {"not": {}}}}}, param="here"),
        asking(schema={"type": "string", "format": "nonsense"}),
        asking(schema={"type": "nothing"}),
        asking(schema={"$ref": "#/$defs/nowhere"}),
        asking(schema={"enum": list(range(100_000))}),
        asking(schema=False),
        asking(regex="(a", param="regex"),
        asking(grammar="root ::= nowhere"),
        asking(tools=[tool({"properties": {"a": {"not": {}}}}, strict=True)]),
        GrammarRequest(output=StructuredOutput(schema={"not": {}}), completion=True),
    ],
)
def test_the_process_refuses_with_the_same_words_as_this_one(
    process: GrammarProcess, request_: GrammarRequest
) -> None:
    with pytest.raises(BadRequest) as refused:
        written(reply_grammars("hermes"), request_)
    assert ask(process, request_).error == refused.value.info


@pytest.mark.parametrize(
    "request_",
    [
        asking(grammar=HANGS),
        asking(grammar=OVERFLOWS),
        asking(schema=SLOW_TO_COMPILE),
        asking(tools=[tool({"properties": {"a": SLOW_TO_COMPILE}}, strict=True)]),
        asking(tools=[tool({"properties": {"a": SLOW_TO_COMPILE}}, strict=False)]),
    ],
    ids=["it hangs", "it overflows the stack", "Unicode", "strict", "not strict"],
)
def test_a_request_that_exceeds_its_limits_ends_only_its_process(request_: GrammarRequest) -> None:
    with running(cpu_s=0.5) as process:
        first = process.pid
        with pytest.raises(GrammarTooCostly):
            ask(process, request_)
        assert process.pid != first
        assert ask(process, asking(schema=SCHEMA)).grammar is not None


@pytest.mark.parametrize("request_", [asking(grammar=HANGS), asking(schema=SLOW_TO_COMPILE)])
def test_the_time_limit_alone_ends_a_request(request_: GrammarRequest) -> None:
    """There is memory enough. Without the limit the answer would come late, or never."""
    with running(cpu_s=0.3, memory_bytes=64 << 30) as process, pytest.raises(GrammarTooCostly):
        ask(process, request_)


@pytest.mark.parametrize("classes", [1, 50])
def test_a_pattern_of_unicode_classes_is_enforced(process: GrammarProcess, classes: int) -> None:
    answer = ask(process, asking(schema={"type": "string", "pattern": unicode_pattern(classes)}))
    assert answer.grammar is not None
    writer = Writer(["<tool_call>"])
    assert writer.takes(answer.grammar, '"' + "ä" * classes + '"')
    assert not writer.takes(answer.grammar, '"' + "1" * classes + '"')


def test_a_request_that_needs_too_much_memory_ends_its_process() -> None:
    with running(cpu_s=60.0, memory_bytes=64 << 20) as process:
        with pytest.raises(GrammarTooCostly):
            ask(process, asking(schema=referring(unicode_pattern(8_000))))
        assert ask(process, asking(schema=SCHEMA)).grammar is not None


def test_a_process_that_has_grown_is_replaced_after_its_answer() -> None:
    with running(cpu_s=60.0, lasting_bytes=16 << 20) as process:
        first = process.pid
        assert ask(process, asking(schema=SCHEMA)).grammar is not None
        assert process.pid == first
        costly = {"type": "string", "pattern": unicode_pattern(1_000)}
        assert ask(process, asking(schema=costly)).grammar is not None
        assert process.pid != first


def chain(length: int) -> dict[str, Any]:
    """Each definition is a reference to the next one, and the last to the first."""
    links = {f"d{n}": {"$ref": f"#/$defs/d{(n + 1) % length}"} for n in range(length)}
    return {"$defs": links, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize("length", [1, 2, 100, 5_000])
@pytest.mark.parametrize("strict", [None, False, True])
def test_references_in_a_circle_end(
    process: GrammarProcess, length: int, strict: bool | None
) -> None:
    schema = chain(length)
    request = asking(schema=schema)
    if strict is not None:
        request = asking(tools=[tool(schema, strict=strict)])
    try:
        answer = ask(process, request)
    except GrammarTooCostly:
        return
    assert answer.grammar or (answer.error and answer.error.status == 400)


def test_an_unsupported_keyword_is_located_among_costly_parts(process: GrammarProcess) -> None:
    first = process.pid
    error = ask(process, asking(schema=SLOW_TO_LOCATE)).error
    assert error is not None
    assert error.message == "The schema uses `not`, which is not enforced: #/properties/odd."
    assert process.pid == first


def test_a_part_is_located_as_far_as_the_time_suffices() -> None:
    schema = referring(unicode_pattern(300), odd={"minItems": "many"})
    with running(cpu_s=1.0) as process:
        error = ask(process, asking(schema=schema)).error
    assert error is not None
    assert "'minItems'" in error.message
    assert error.message.endswith(": #.")  # the whole schema


def test_a_killed_process_is_replaced_and_the_request_answered(process: GrammarProcess) -> None:
    assert ask(process, asking(schema=SCHEMA)).grammar is not None
    first = process.pid
    os.kill(first, signal.SIGKILL)
    assert ask(process, asking(schema=SCHEMA)).grammar is not None
    assert process.pid != first


def test_a_process_that_does_not_answer_is_replaced() -> None:
    with running(wall_s=1.0) as process:
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(Unavailable, match="busy"):
            ask(process, asking(schema=SCHEMA))


def test_a_process_that_cannot_start_is_an_error_of_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with running() as process, pytest.raises(ServerError, match="exit status 1") as failed:
        ask(process, asking(schema=SCHEMA))
    assert failed.value.status == 500
    monkeypatch.setattr(sys, "executable", "/nowhere")
    with pytest.raises(ServerError, match="cannot start a process"):
        GrammarProcess(SETUP)


def test_the_process_inherits_no_file_or_socket(process: GrammarProcess) -> None:
    folder = Path(f"/proc/{process.pid}/fd")
    if not folder.exists():
        pytest.skip("this system does not list open files")
    assert ask(process, asking(schema=SCHEMA)).grammar is not None  # its modules are loaded
    targets = [str(each.readlink()) for each in folder.iterdir()]
    kinds = sorted(target.split(":")[0] for target in targets)
    assert kinds == ["/dev/null", "/dev/null", "socket"]


def test_the_process_ends_with_its_owner() -> None:
    process = GrammarProcess(SETUP)
    pid = process.pid
    del process
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
