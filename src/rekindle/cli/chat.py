"""Implements `rekindle chat`, a conversation in the terminal that shows the cost of each turn."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TextIO

import httpx
import orjson
from rich.console import Console
from rich.markup import escape
from rich.status import Status

from rekindle.cli.cache_client import connect
from rekindle.errors import RekindleError
from rekindle.event_stream import EventReader

DEFAULT_MODEL = "default"  # every server takes it for its first model
GREETING = "Type a message. /help lists the commands, /exit (or Ctrl-D) ends the chat."
HELP = """\
/help           show this list
/new, /clear    start a new conversation
/exit, /quit    end the chat (like Ctrl-D); Ctrl-C stops a reply
//word …        send a message that begins with /word"""


@dataclass(frozen=True, slots=True)
class ChatServer:
    """A server, and the model of it to chat with."""

    base_url: str
    model: str = DEFAULT_MODEL
    api_key: str | None = None


class PrefillProgress(NamedTuple):
    done_tokens: int
    prompt_tokens: int


class Reasoning(NamedTuple):
    text: str


class ToolCallText(NamedTuple):
    """A tool call, or the next piece of its arguments. It is shown, not executed."""

    name: str
    arguments: str


@dataclass(slots=True)
class TurnCost:
    first_token_s: float | None = None
    usage: dict[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        cached = _object(self.usage.get("prompt_tokens_details")).get("cached_tokens", 0)
        prompt = self.usage.get("prompt_tokens", 0)
        first = f"{self.first_token_s:.2f} s" if self.first_token_s is not None else "no token"
        return (
            f"reused {cached} of {prompt} prompt tokens, "
            f"first token after {first}, {self.usage.get('completion_tokens', 0)} generated"
        )


Part = str | Reasoning | ToolCallText | PrefillProgress | TurnCost


@dataclass(slots=True)
class Conversation:
    """The messages so far, and the server that answers them."""

    base_url: str
    model: str
    api_key: str
    options: dict[str, Any]
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    transport: httpx.BaseTransport | None = None

    def __post_init__(self) -> None:
        self.start_over()

    @classmethod
    def at(
        cls, server: ChatServer, options: Mapping[str, float | None], system: str | None
    ) -> Conversation:
        """Begin a conversation. An option that is None is left to the server."""
        return cls(
            base_url=server.base_url,
            model=server.model,
            api_key=server.api_key or "none",
            options={name: value for name, value in options.items() if value is not None},
            system=system,
        )

    def start_over(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def send(self, text: str) -> Iterator[Part]:
        """Yield the reply as it arrives, then its cost. The history leaves out a failed turn."""
        messages = [*self.messages, {"role": "user", "content": text}]
        reply = ""
        cost = TurnCost()
        started = time.perf_counter()
        for chunk in self._chunks(messages):
            cost.usage = _object(chunk.get("usage")) or cost.usage
            for part in _parts(chunk):
                if cost.first_token_s is None and not isinstance(part, PrefillProgress):
                    cost.first_token_s = time.perf_counter() - started
                if isinstance(part, str):  # reasoning is not sent back
                    reply += part
                yield part
        self.messages = [*messages, {"role": "assistant", "content": reply}]
        yield cost

    def _chunks(self, messages: list[dict[str, str]]) -> Iterator[dict[str, Any]]:
        body = {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "prefill_progress": True,
            **self.options,
        }
        url = f"{self.base_url.rstrip('/')}/chat/completions"
        with (
            connect(self.base_url, self.api_key, httpx.Timeout(None), self.transport) as client,
            client.stream("POST", url, json=body) as response,
        ):
            if response.status_code != httpx.codes.OK:
                response.read()
                raise RekindleError(_message(response))
            yield from _parse(response.iter_bytes())


def _parse(parts: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the chunks of a stream. Raises RekindleError if it ends without [DONE]."""
    reader = EventReader()
    for part in parts:
        for data in reader.feed(part):
            if data.strip() == "[DONE]":
                return
            yield _chunk(data)
    raise RekindleError("the reply ended early, or this is not an OpenAI-compatible server")


def _chunk(data: str) -> dict[str, Any]:
    try:
        chunk = orjson.loads(data)
    except ValueError:
        chunk = None
    match chunk:
        case {"error": {"message": message}}:
            raise RekindleError(str(message))
        case {"choices": [*choices]} if all(isinstance(each, dict) for each in choices):
            return dict(chunk)
    raise RekindleError(
        f"the server sent an event that is not a chat completion chunk: {data[:80]}"
    )


def _parts(chunk: dict[str, Any]) -> Iterator[Part]:
    match chunk.get("prefill_progress"):
        case {"done_tokens": int(done), "prompt_tokens": int(total)}:
            yield PrefillProgress(done, total)
    for choice in chunk["choices"]:
        delta = _object(choice.get("delta"))
        if reasoning := delta.get("reasoning_content"):
            yield Reasoning(str(reasoning))
        if text := delta.get("content"):
            yield str(text)
        calls = delta.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = _object(_object(call).get("function"))
            yield ToolCallText(
                str(function.get("name") or ""), str(function.get("arguments") or "")
            )


def _object(value: Any) -> dict[str, Any]:
    """Return the value if it is an object, else an empty object."""
    return value if isinstance(value, dict) else {}


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {response.status_code}"


def read_prompt(prompt: str | None, stdin: TextIO) -> str | None:
    """Join what is piped in with the prompt, in this order. None means a conversation."""
    piped = "" if stdin.isatty() else stdin.read().strip()
    parts = [part for part in (piped, prompt) if part]
    if not parts and (prompt is not None or not stdin.isatty()):
        raise RekindleError("the prompt is empty: give a question, or pipe text in")
    return "\n\n".join(parts) or None


def talk(conversation: Conversation, text: str | None, console: Console) -> None:
    """Answer one message, or hold a conversation if there is none."""
    if text is None:
        converse(conversation, console)
    else:
        answer(conversation, text, console)


def answer(conversation: Conversation, text: str, console: Console) -> None:
    """Print the reply to one message. Only a terminal gets reasoning and the cost, too."""
    if console.is_terminal:
        with Screen(console) as screen:
            for part in conversation.send(text):
                screen.show(part)
        return
    for part in conversation.send(text):
        if isinstance(part, str):
            console.file.write(part)
            console.file.flush()
    console.file.write("\n")


def converse(conversation: Conversation, console: Console) -> None:
    """Read messages and show replies until the user ends the chat."""
    console.print(f"[dim]{GREETING}[/]")
    while (text := _read(console)) is not None:
        if command := _command(text):
            if command in ("/exit", "/quit"):
                return
            _run_command(command, conversation, console)
        elif text:
            _show(conversation, text.removeprefix("/") if text.startswith("//") else text, console)


def _read(console: Console) -> str | None:
    try:
        return console.input("[bold]> [/]").strip()
    except (EOFError, KeyboardInterrupt):
        console.print()
        return None


def _command(text: str) -> str | None:
    """Return the command in a line, or None for a message. `/a/path` is not a command."""
    word = text.partition(" ")[0]
    return word.lower() if word.startswith("/") and word.count("/") == 1 else None


def _run_command(command: str, conversation: Conversation, console: Console) -> None:
    match command:
        case "/help":
            note = HELP
        case "/new" | "/clear":
            conversation.start_over()
            note = "This is a new conversation."
        case _:
            note = f"There is no command {command}; /help lists the commands."
    console.print(note, style="dim", markup=False, highlight=False)


def _show(conversation: Conversation, text: str, console: Console) -> None:
    with Screen(console) as screen:
        try:
            for part in conversation.send(text):
                screen.show(part)
        except KeyboardInterrupt:
            screen.note("\n[dim]stopped[/]")
        except RekindleError as error:
            screen.note(f"[bold red]error:[/] {escape(str(error))}")


class Screen:
    """Shows one reply: a status line until it begins, and reasoning and tool calls dimmed."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.status: Status | None = None
        self._kind: type[Part] | None = None  # kind of the previous part

    def __enter__(self) -> Screen:
        if self._console.is_terminal:  # in a file, the status would leave an empty line
            self.status = self._console.status("waiting")
            self.status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end_status()

    def show(self, part: Part) -> None:
        match part:
            case PrefillProgress(done, total):
                if self.status:
                    self.status.update(f"prefill: {done} of {total} prompt tokens")
            case TurnCost():
                self.note(f"\n[dim]{part.line()}[/]")
            case str():
                self._write(str, part)
            case Reasoning(text):
                self._write(Reasoning, text, "dim")
            case ToolCallText(name, arguments):
                call = f"calls {name} " if name else ""
                self._write(ToolCallText, call + arguments, "dim", is_new=bool(name))

    def note(self, markup: str) -> None:
        self._end_status()
        self._console.print(markup, highlight=False)

    def _write(
        self, kind: type[Part], text: str, style: str | None = None, *, is_new: bool = False
    ) -> None:
        self._end_status()
        if self._kind is not None and (is_new or self._kind is not kind):
            self._console.print("\n")
        self._kind = kind
        self._console.print(
            text, end="", style=style, markup=False, highlight=False, soft_wrap=True
        )

    def _end_status(self) -> None:
        if self.status:
            self.status.stop()
            self.status = None
