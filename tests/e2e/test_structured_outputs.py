"""A reply follows the requested format in every dialect, although the model writes nonsense."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.chat.grammar.costly import HANGS, OVERFLOWS, SLOW_TO_LOCATE
from tests.support.server import Server, running
from tests.support.tiny import write_llama

BOUND_S = 60.0  # a grammar has two seconds; allow for a busy machine
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("structured")
    with running(write_llama(folder / "tiny.gguf"), folder, "--threads", "1") as started:
        yield started


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def ask(client: httpx.Client, path: str, **fields: Any) -> httpx.Response:
    """Ask at a high temperature with a fixed seed."""
    given = (
        {"prompt": "Say"} if path == TEXT else {"messages": [{"role": "user", "content": "Say"}]}
    )
    sampling = {"temperature": 2, "top_p": 1, "seed": 7, "max_tokens": 60}
    return client.post(path, json={**given, **sampling, **fields})


def written(answer: httpx.Response) -> str:
    assert answer.is_success, answer.text
    [choice] = answer.json()["choices"]
    assert choice["finish_reason"] == "stop"
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


NUMBER = {"type": "integer", "minimum": 100, "maximum": 999}
NUMBERS: list[dict[str, Any]] = [
    {"grammar": "root ::= [1-9] [0-9]{2}"},
    {"grammar": "root ::= pair | root-2\nroot-2 ::= [1-9] pair\npair ::= [1-9] [0-9] root?"},
    {"json_schema": NUMBER},
    {"guided_json": NUMBER},
    {"guided_json": json.dumps(NUMBER)},
    {"guided_regex": "[1-9][0-9]{2}"},
    {"guided_choice": ["123", "456"]},
    {"guided_grammar": "start: /[1-9][0-9]{2}/"},
    {"structured_outputs": {"json": NUMBER}},
    {"structured_outputs": {"regex": r"^[1-9]\d\d$"}},
    {"structured_outputs": {"choice": ["123"]}},
    {"structured_outputs": {"grammar": "root ::= [1-9] [0-9]{2}"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": NUMBER}}},
]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("fields", NUMBERS, ids=json.dumps)
def test_a_reply_follows_the_requested_format(
    client: httpx.Client, path: str, fields: dict[str, Any]
) -> None:
    if "pair" in str(fields):  # any length; a truncated reply still consists of digits
        [choice] = ask(client, path, **fields).json()["choices"]
        assert (choice["text"] if path == TEXT else choice["message"]["content"]).isdigit()
        return
    assert 100 <= int(written(ask(client, path, **fields))) <= 999


DOUBLING = "\n".join(f"r{n} ::= r{n + 1} r{n + 1}" for n in range(60)) + "\nr60 ::= .\nroot ::= r0"
LOOP = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}


def repeated(levels: int) -> str:
    return "(" * levels + "a" + "{1,99})" * levels


COSTLY: list[dict[str, Any]] = [
    {"guided_regex": "(a+)+b"},
    {"guided_regex": repeated(40)},
    {"guided_regex": "(" * 5_000 + "a" + ")" * 5_000},
    {"guided_regex": "|".join(f"{number:07}" for number in range(2_000))},
    {"guided_regex": r"(\w{1,900}\d{1,900}){1,900}"},
    {"grammar": "root ::= " + "(" * 30 + '"a"' + "{1,9})" * 30},
    {"grammar": DOUBLING},
    {"grammar": "root ::= root root | root? | (root*)* | [a-z]*"},
    {"guided_grammar": HANGS},
    {"guided_grammar": OVERFLOWS[:60_000]},
    {"json_schema": {"$ref": "#"}},
    {"json_schema": {"$defs": LOOP, "$ref": "#/$defs/a"}},
    {"json_schema": {"allOf": [{"$ref": "#"}, {"$ref": "#"}]}},
    {"json_schema": {"type": "string", "pattern": "^(a+)+b$"}},
    {"json_schema": {"type": "string", "pattern": "x" * 200_000}},
    {"json_schema": SLOW_TO_LOCATE},
    {"json_schema": SLOW_TO_LOCATE},
]  # fmt: skip


def test_expensive_grammars_are_answered_in_time_and_delay_nobody(server: Server) -> None:
    served, over = 0, threading.Event()

    def others() -> None:
        nonlocal served
        with server.client() as client:
            while not over.is_set():
                assert ask(client, CHAT, max_tokens=2).is_success
                assert client.post("/tokenize", json={"content": "Say"}).is_success
                served += 1

    thread = threading.Thread(target=others)
    thread.start()
    try:
        with httpx.Client(base_url=server.url, timeout=BOUND_S) as client:
            for fields in COSTLY:
                before = served
                answer = ask(client, CHAT, **fields)
                assert answer.status_code in (200, 400), answer.text
                if answer.status_code == 400:
                    assert answer.json()["error"]["param"] in fields
                if "guided_grammar" in fields and fields["guided_grammar"] == HANGS:
                    assert answer.status_code == 400
                    assert served > before
    finally:
        over.set()
        thread.join()
    assert server.process.poll() is None
    assert served
