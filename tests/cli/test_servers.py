"""`rekindle chat` and `run` find a server, start one, or say at once that there is none."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from rich.console import Console

from rekindle.cli import main as cli
from rekindle.cli import servers
from rekindle.cli.cache import LOCAL_SERVER
from rekindle.cli.cache_client import NoServer
from rekindle.cli.chat import ChatServer, read_prompt
from rekindle.cli.servers import served_models
from rekindle.config import Config
from rekindle.errors import RekindleError

Answer = Callable[[httpx.Request], httpx.Response]
REPLY = [
    {"choices": [{"delta": {"reasoning_content": "hm"}}]},
    {"choices": [{"delta": {"content": "Blue "}}]},
    {"choices": [{"delta": {"content": "light."}}], "usage": {}},
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Backend:
    """A server with one model, which records the requests for chats."""

    def __init__(self, *models: str, status: int = 200) -> None:
        self.models = models
        self.status = status
        self.chats: list[dict[str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if not self.models:
            raise httpx.ConnectError("refused")
        if request.url.path.endswith("/models"):
            return httpx.Response(
                self.status, json={"data": [{"id": each} for each in self.models]}
            )
        self.chats.append(json.loads(request.content))
        events = [f"data: {json.dumps(chunk)}\n\n" for chunk in REPLY]
        return httpx.Response(200, text="".join([*events, "data: [DONE]\n\n"]))


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("REKINDLE_API_KEY", "REKINDLE_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer], None]:
    """Replaces the network."""
    real = httpx.Client

    def install(answer: Answer) -> None:
        transport = httpx.MockTransport(answer)
        monkeypatch.setattr(
            httpx, "Client", lambda **options: real(**{**options, "transport": transport})
        )

    return install


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The models that a server was started for, in place of really starting one."""
    found: list[str | None] = []

    @contextmanager
    def start(model: str | None, _config: Path | None, _console: Console) -> Any:
        found.append(model)
        yield ChatServer("http://started/v1", "m")

    monkeypatch.setattr(servers, "started_server", start)
    return found


def command(
    monkeypatch: pytest.MonkeyPatch, *arguments: str, stdin: io.StringIO | None = None
) -> int:
    """Run a command and return its exit status."""
    monkeypatch.setattr(sys, "argv", ["rekindle", *arguments])
    monkeypatch.setattr(sys, "stdin", stdin or Terminal())
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("prompt", "piped", "message"),
    [
        ("why?", None, "why?"),
        ("summarise", "a text\n", "a text\n\nsummarise"),
        (None, "a text\n", "a text"),
        ("why?", "", "why?"),
        (None, None, None),
    ],
)
def test_what_is_piped_in_comes_before_the_prompt(
    prompt: str | None, piped: str | None, message: str | None
) -> None:
    stdin = Terminal() if piped is None else io.StringIO(piped)
    assert read_prompt(prompt, stdin) == message


@pytest.mark.parametrize(("prompt", "stdin"), [("", Terminal()), (None, io.StringIO(" \n"))])
def test_an_empty_prompt_is_refused(prompt: str | None, stdin: io.StringIO) -> None:
    with pytest.raises(RekindleError, match="prompt is empty"):
        read_prompt(prompt, stdin)


@pytest.mark.parametrize("name", ["chat", "run"])
def test_one_question_prints_only_the_answer(
    connect: Callable[[Answer], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    """A program that reads the output gets no reasoning and no figures."""
    backend = Backend("m")
    connect(backend)
    model = ["m"] if name == "run" else []
    status = command(
        monkeypatch, name, *model, "--system", "Be brief.", "--max-tokens", "5", "why?",
        stdin=io.StringIO("Sky."),
    )  # fmt: skip
    assert status == 0
    assert capsys.readouterr().out == "Blue light.\n"
    [body] = backend.chats
    assert [each["content"] for each in body["messages"]] == ["Be brief.", "Sky.\n\nwhy?"]
    assert (body["max_tokens"], body["temperature"]) == (5, 0.7)


def test_the_limit_of_a_reply_is_left_to_the_server(
    connect: Callable[[Answer], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = Backend("m")
    connect(backend)
    command(monkeypatch, "chat", "why?")
    assert "max_tokens" not in backend.chats[0]


def test_a_chat_without_a_server_ends_at_once_with_what_to_do(
    connect: Callable[[Answer], None],
    started: list[str | None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nobody can answer a question, because stderr is not a terminal here."""
    connect(Backend())
    assert command(monkeypatch, "chat") == 1
    error = capsys.readouterr().err
    assert f"no server answers at {LOCAL_SERVER}" in error
    assert "rekindle run" in error
    assert started == []


@pytest.mark.parametrize(("says", "models"), [(True, ["m"]), (False, [])])
def test_a_chat_in_a_terminal_offers_to_start_a_server(
    connect: Callable[[Answer], None],
    started: list[str | None],
    monkeypatch: pytest.MonkeyPatch,
    says: bool,
    models: list[str | None],
) -> None:
    connect(Backend())
    questions: list[str] = []

    def confirm(question: str, **_: Any) -> bool:
        questions.append(question)
        return says

    monkeypatch.setattr(typer, "confirm", confirm)
    monkeypatch.setattr(sys, "stdin", Terminal())
    console = Console(file=io.StringIO(), force_terminal=True)
    server = ChatServer(LOCAL_SERVER, "m")
    if says:
        with servers.running_server(server, console) as own:
            assert own.base_url == "http://started/v1"
    else:
        refused = pytest.raises(RekindleError, match="rekindle run")
        with refused, servers.running_server(server, console):
            pass
    assert LOCAL_SERVER in questions[0]
    assert started == models


def test_no_server_is_offered_in_place_of_another_machine(
    connect: Callable[[Answer], None], started: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    connect(Backend())
    monkeypatch.setattr(sys, "stdin", Terminal())
    console = Console(file=io.StringIO(), force_terminal=True)
    server = ChatServer("http://far/v1")
    with pytest.raises(NoServer), servers.running_server(server, console):
        pass
    assert started == []


@pytest.mark.parametrize(
    ("served", "wanted", "used"),
    [
        (["a", "b"], "b", "b"),
        (["a"], None, "default"),
        (["qwen3"], "qwen3:8b", "qwen3"),
        (["mine"], "/models/mine.gguf", "mine"),
        (["qwen3:8b"], "qwen3:8b-q8_0", None),
        (["a"], "b", None),
        ([], "b", None),
        ([], None, None),
    ],
)
def test_run_uses_a_server_that_has_the_model_and_starts_one_otherwise(
    connect: Callable[[Answer], None],
    started: list[str | None],
    served: list[str],
    wanted: str | None,
    used: str | None,
) -> None:
    connect(Backend(*served))
    with servers.server_with(wanted, LOCAL_SERVER, None, None, Console()) as server:
        if used is None:
            assert (server.base_url, started) == ("http://started/v1", [wanted])
        else:
            assert (server, started) == (ChatServer(LOCAL_SERVER, used), [])


@pytest.mark.parametrize(
    ("key", "message"), [(None, "needs an API key"), ("wrong", "does not know this API key")]
)
def test_a_wrong_key_and_a_missing_key_are_told_apart(
    connect: Callable[[Answer], None], key: str | None, message: str
) -> None:
    connect(Backend("m", status=401))
    with pytest.raises(RekindleError, match=message):
        served_models(LOCAL_SERVER, key)


def test_another_program_at_the_address_is_named_as_such(
    connect: Callable[[Answer], None],
) -> None:
    connect(lambda _request: httpx.Response(200, text="<html>"))
    with pytest.raises(RekindleError, match="is not OpenAI-compatible"):
        served_models(LOCAL_SERVER, None)


@pytest.mark.parametrize(
    ("settings", "key"),
    [({}, None), ({"api_key": ("a",)}, "a"), ({"admin_key": ("root",)}, "root")],
)
def test_a_server_for_one_chat_listens_on_this_machine_with_the_configured_keys(
    settings: dict[str, Any], key: str | None
) -> None:
    """The key of the settings gives the chat the cache of that tenant."""
    config, used = servers._for_this_chat(Config(host="0.0.0.0", ollama_port=1, **settings))
    assert (config.host, config.port, config.ollama_port) == ("127.0.0.1", 0, None)
    assert used == key


def test_a_file_of_keys_is_replaced_by_a_key_of_the_chat() -> None:
    config, used = servers._for_this_chat(Config(api_keys_file=Path("keys")))
    assert used is not None
    assert (config.api_key, config.api_keys_file) == ((used,), None)
