"""A conversation in the terminal that shows what each turn cost."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from rekindle.cli.conversation import (
    ChatFailed,
    Conversation,
    Cost,
    Part,
    PrefillProgress,
    Reasoning,
    ToolCall,
)

GREETING = "Type a message. /help lists commands, /exit (or Ctrl-D) ends."
HELP = """\
/help           this list
/new, /clear    start over
/exit, /quit    end (Ctrl-D too); Ctrl-C stops a reply
//word …        send a message that begins with /word"""
ENDINGS = ("/exit", "/quit")


def converse(conversation: Conversation, console: Console) -> None:
    """Read, answer and show the cost, until the user ends it."""
    console.print(f"[dim]{GREETING}[/]")
    while (text := _read(console)) is not None:
        if command := _command(text):
            if command in ENDINGS:
                return
            _obey(command, conversation, console)
        elif text:
            _show(conversation, text.removeprefix("/") if text.startswith("//") else text, console)


def _read(console: Console) -> str | None:
    try:
        return console.input("[bold]> [/]").strip()
    except (EOFError, KeyboardInterrupt):
        console.print()
        return None


def _command(text: str) -> str | None:
    """The command that a line is, known or not; None: a message, such as one about /a/path."""
    word = text.partition(" ")[0]
    return word.lower() if word.startswith("/") and word.count("/") == 1 else None


def _obey(command: str, conversation: Conversation, console: Console) -> None:
    match command:
        case "/help":
            note = HELP
        case "/new" | "/clear":
            conversation.start_over()
            note = "A new conversation."
        case _:
            note = f"There is no command {command}; /help lists them."
    console.print(note, style="dim", markup=False, highlight=False)


def _show(conversation: Conversation, text: str, console: Console) -> None:
    with Screen(console) as screen:
        try:
            for part in conversation.send(text):
                screen.show(part)
        except KeyboardInterrupt:
            screen.note("\n[dim]stopped[/]")
        except ChatFailed as error:
            screen.note(f"[bold red]error:[/] {escape(str(error))}")


class Screen:
    """Shows one reply: a status line until it begins, reasoning and calls dimmed."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.status: Status | None = None
        self._kind: type[Part] | None = None  # of what was shown last

    def __enter__(self) -> Screen:
        if self._console.is_terminal:  # in a file it would leave an empty line
            self.status = self._console.status("waiting")
            self.status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end_status()

    def show(self, part: Part) -> None:
        match part:
            case PrefillProgress(done, total):
                if self.status:
                    self.status.update(f"reading the prompt: {done} of {total} tokens")
            case Cost():
                self.note(f"\n[dim]{part.line()}[/]")
            case str():
                self._write(str, part)
            case Reasoning(text):
                self._write(Reasoning, text, "dim")
            case ToolCall(name, arguments):
                begun = f"calls {name} " if name else ""
                self._write(ToolCall, begun + arguments, "dim", apart=bool(begun))

    def note(self, markup: str) -> None:
        self._end_status()
        self._console.print(markup, highlight=False)

    def _write(
        self, kind: type[Part], text: str, style: str | None = None, *, apart: bool = False
    ) -> None:
        self._end_status()
        if self._kind is not None and (apart or self._kind is not kind):
            self._console.print("\n")
        self._kind = kind
        self._console.print(
            text, end="", style=style, markup=False, highlight=False, soft_wrap=True
        )

    def _end_status(self) -> None:
        if self.status:
            self.status.stop()
            self.status = None
