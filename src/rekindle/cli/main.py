"""The command line: serve, pull, chat, bench, key, cache."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from rekindle.cli import cache as cache_cli
from rekindle.cli.flags import takes_settings
from rekindle.config import load_config
from rekindle.errors import RekindleError
from rekindle.models.catalogue import DEFAULT_EMBEDDING_MODEL
from rekindle.version import __version__

app = typer.Typer(
    name="rekindle",
    help="An OpenAI-compatible server that never computes the same prompt twice.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.add_typer(cache_cli.app)
console = Console(stderr=True)

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="Settings file", show_default="rekindle.yaml if there"),
]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rekindle {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Serve models, fetch them, talk to them, measure them."""


@app.command()
@takes_settings
def serve(config: ConfigFile = None, **flags: Any) -> None:
    """Serve models over HTTP. Settings: rekindle.yaml, then REKINDLE_*, then these flags."""
    from rekindle.front.launch import serve as run_server

    run_server(load_config(flags, file=config), console)


@app.command()
def pull(
    name: Annotated[str, typer.Argument(help="Catalogue name or hub id org/repo[:quant-or-file]")],
    config: ConfigFile = None,
) -> None:
    """Fetch a model, check it, and print where it is."""
    from rekindle.models.progress import progress_on
    from rekindle.models.pull import pull as fetch

    settings = load_config({}, file=config)
    typer.echo(fetch(name, models_dir=settings.models_dir, progress=progress_on(console)))


@app.command()
def chat(
    base_url: Annotated[str, typer.Option(help="A running server")] = "http://127.0.0.1:8080/v1",
    model: Annotated[str, typer.Option(help="Which of its models")] = "default",
    system: Annotated[str | None, typer.Option(help="System prompt")] = None,
    api_key: Annotated[
        str, typer.Option(envvar="REKINDLE_API_KEY", help="The server's key, if it needs one")
    ] = "none",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest reply in tokens")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy")] = 0.7,
) -> None:
    """Talk to a running server; each turn shows what was reused and how fast it began."""
    from rekindle.cli.chat import Conversation, converse

    conversation = Conversation(
        base_url=base_url,
        model=model,
        api_key=api_key,
        options={"max_tokens": max_tokens, "temperature": temperature},
        system=system,
    )
    converse(conversation, Console())


@app.command()
def bench(
    base_url: Annotated[
        str, typer.Option(help="Any OpenAI-compatible server")
    ] = "http://127.0.0.1:8080/v1",
    model: Annotated[str | None, typer.Option(help="Which of its models")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="REKINDLE_API_KEY", help="Its key, if it needs one")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for results")] = Path("bench-results"),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repeats")] = False,
) -> None:
    """Measure a server: cold turn, turns two and three, questions at once, decode speed."""
    from rekindle.bench import BenchOptions, plot, print_table, run, save_json

    given: dict[str, Any] = {"model": model, "api_key": api_key, "repeats": 1 if quick else None}
    options = BenchOptions(
        base_url=base_url, **{name: value for name, value in given.items() if value is not None}
    )
    out = Console()
    results = run(options, console)
    print_table(results, out)
    output.mkdir(parents=True, exist_ok=True)
    save_json(results, output / "bench.json")
    plot([results], output / "bench.png")


@app.command()
def key(
    name: Annotated[str, typer.Argument(help="Whose key it is")],
    file: Annotated[
        Path | None, typer.Option(help="Append it to this file of --api-keys-file")
    ] = None,
    admin: Annotated[bool, typer.Option("--admin", help="Let it see every cache")] = False,
) -> None:
    """Make an API key. It is shown once; the file holds its digest alone."""
    from rekindle.http import auth

    secret = auth.new_key()
    line = auth.key_line(name, secret, admin=admin)
    if file is None:
        console.print("The key, then its line for the file of --api-keys-file:")
    else:
        auth.append_key_line(file, line)
    typer.echo(secret)
    if file is None:
        typer.echo(line)


def respelled(arguments: Sequence[str]) -> list[str]:
    """`--server --m MODEL …` as `serve --model MODEL …`, and a model after a lone
    `--embedding-model`; anything else as it is."""
    given = list(arguments)
    if "--server" in given and given[0].startswith("-"):
        given.remove("--server")
        given.insert(0, "serve")
    if given[:1] != ["serve"]:
        return given
    spelled = [re.sub(r"^--m(?==|$)", "--model", argument) for argument in given]
    return [word for argument in _pairs(spelled) for word in _with_value(*argument)]


def _pairs(arguments: list[str]) -> Iterator[tuple[str, str]]:
    """Each argument with the one that follows it; the last with one that looks like a flag."""
    return zip(arguments, [*arguments[1:], "--"], strict=True)


def _with_value(argument: str, following: str) -> tuple[str, ...]:
    """`--embedding-model` without a value stands for the model of the catalogue."""
    if argument == "--embedding-model" and following.startswith("-"):
        return argument, DEFAULT_EMBEDDING_MODEL
    return (argument,)


def main() -> None:
    """Run; an error of ours is one sentence, never a traceback."""
    try:
        app(respelled(sys.argv[1:]))
    except RekindleError as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
