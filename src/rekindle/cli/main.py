"""Defines the commands. Each imports what it needs, so that none waits for the others."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape

from rekindle.cli import cache as cache_cli
from rekindle.cli.cache import LOCAL_SERVER, SETTINGS_PLACES, ApiKey, AsJson, BaseUrl
from rekindle.cli.cache_views import show
from rekindle.cli.flags import takes_settings
from rekindle.cli.interrupts import QuietImports
from rekindle.config import load_config
from rekindle.errors import RekindleError
from rekindle.models.catalogue import DEFAULT_EMBEDDING_MODEL, DEFAULT_MODEL
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

INTERRUPTED = 128 + 2  # exit status after Ctrl-C, as shells report it

Quant = Literal["f32", "f16", "bf16", "q8_0", "q4_0"]
BuildKind = Literal["cuda", "vulkan", "metal", "cpu"]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="Settings file", show_default=SETTINGS_PLACES),
]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rekindle {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", callback=_show_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Serve models, download them, chat with them and measure them."""


@app.command()
@takes_settings
def serve(config: ConfigFile = None, **flags: Any) -> None:
    """Serve models over HTTP. Flags override REKINDLE_* variables, which override rekindle.yaml."""
    with QuietImports():
        from rekindle.front.launch import serve as run_server

    run_server(load_config(flags, file=config), console)


@app.command()
def pull(
    name: Annotated[str, typer.Argument(help="Catalogue name or org/repo[:quant-or-file]")],
    config: ConfigFile = None,
) -> None:
    """Download a model, verify it and print its path."""
    with QuietImports():
        from rekindle.models.progress import progress_on
        from rekindle.models.pull import loadable
        from rekindle.models.pull import pull as fetch

    settings = load_config({}, file=config)
    folder, progress = settings.models_dir, progress_on(console)
    path = fetch(name, models_dir=folder, progress=progress)
    typer.echo(loadable(path, settings.runtime.engine, models_dir=folder, progress=progress))


@app.command()
def convert(
    name: Annotated[str, typer.Argument(help="Model folder, or org/repo to pull first")],
    quant: Annotated[
        Quant | None,
        typer.Option(help="Type of the weights", show_default="the folder's own"),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The file", show_default="in the models folder"),
    ] = None,
    config: ConfigFile = None,
) -> None:
    """Convert a model folder of safetensors to a GGUF file, and print its path."""
    with QuietImports():
        from rekindle.models.conversion import convert as write_gguf
        from rekindle.models.progress import progress_on
        from rekindle.models.pull import pull as fetch

    folder, progress = load_config({}, file=config).models_dir, progress_on(console)
    path = fetch(name, models_dir=folder, progress=progress)
    if not path.is_dir():
        raise RekindleError(f"{path} is not a model folder of safetensors: it is ready to serve.")
    converted = write_gguf(path, models_dir=folder, progress=progress, quant=quant, output=output)
    typer.echo(converted)


PulledName = Annotated[str, typer.Argument(help="Name from `rekindle ls`")]
Prompt = Annotated[
    str | None,
    typer.Argument(help="Question to answer once; text that is piped in comes before it"),
]
System = Annotated[str | None, typer.Option(help="System prompt")]
MaxTokens = Annotated[
    int | None, typer.Option(min=1, help="Maximum tokens of a reply", show_default="the server's")
]
Temperature = Annotated[float, typer.Option(min=0.0, help="Temperature; 0 is greedy")]


@app.command()
def run(
    model: Annotated[
        str | None,
        typer.Argument(help="As for `serve --model`", show_default="the server's, else smollm2"),
    ] = None,
    prompt: Prompt = None,
    base_url: BaseUrl = LOCAL_SERVER,
    api_key: ApiKey = None,
    system: System = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 0.7,
    config: ConfigFile = None,
) -> None:
    """Chat with a model, pulling and loading it if needed. Uses a running server that serves it."""
    with QuietImports():
        from rekindle.cli.chat import Conversation, read_prompt, talk
        from rekindle.cli.servers import server_with

    text = read_prompt(prompt, sys.stdin)
    with server_with(model, base_url, api_key, config, console) as server:
        options = {"max_tokens": max_tokens, "temperature": temperature}
        talk(Conversation.at(server, options, system), text, Console())


@app.command()
def chat(
    prompt: Prompt = None,
    base_url: BaseUrl = LOCAL_SERVER,
    model: Annotated[str, typer.Option(help="Name of the model")] = "default",
    system: System = None,
    api_key: ApiKey = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 0.7,
) -> None:
    """Chat with a running server, or ask it one question. Shows what each turn reused."""
    with QuietImports():
        from rekindle.cli.chat import ChatServer, Conversation, read_prompt, talk
        from rekindle.cli.servers import running_server

    text = read_prompt(prompt, sys.stdin)
    with running_server(ChatServer(base_url, model, api_key), console) as server:
        options = {"max_tokens": max_tokens, "temperature": temperature}
        talk(Conversation.at(server, options, system), text, Console())


@app.command("ls")
def list_models(
    catalogue: Annotated[
        bool, typer.Option("--catalogue", help="List the names that can be pulled instead")
    ] = False,
    config: ConfigFile = None,
) -> None:
    """List the models on this machine."""
    from rekindle.cli.models import catalogue_table, models_table
    from rekindle.models.local import pulled_models

    models_dir = load_config({}, file=config).models_dir
    table = catalogue_table() if catalogue else models_table(pulled_models(models_dir))
    show(table)


ServedName = Annotated[str, typer.Argument(help="Name of a model that the server offers")]


@app.command("load")
def load_model(name: ServedName, base_url: BaseUrl = LOCAL_SERVER, api_key: ApiKey = None) -> None:
    """Load a model into a running server, and wait until it is loaded."""
    from rekindle.cli.models import change_model

    typer.echo(change_model("load", name, base_url, api_key))


@app.command("unload")
def unload_model(
    name: ServedName, base_url: BaseUrl = LOCAL_SERVER, api_key: ApiKey = None
) -> None:
    """Unload a model from a running server. The next request for it loads it again."""
    from rekindle.cli.models import change_model

    typer.echo(change_model("unload", name, base_url, api_key))


@app.command("ps")
def list_running(base_url: BaseUrl = LOCAL_SERVER, api_key: ApiKey = None) -> None:
    """List the models that a server has loaded."""
    from rekindle.cli.models import running_models, running_table

    show(running_table(running_models(base_url, api_key)))


@app.command("show")
def show_model(name: PulledName, config: ConfigFile = None) -> None:
    """Show what is known about a model on this machine."""
    from rekindle.cli.models import model_table
    from rekindle.models.local import find_pulled_model

    models_dir = load_config({}, file=config).models_dir
    show(model_table(find_pulled_model(name, models_dir)))


@app.command("rm")
def remove_models(
    names: Annotated[list[str], typer.Argument(help="Names from `rekindle ls`")],
    config: ConfigFile = None,
) -> None:
    """Remove models from this machine. If one of them does not exist, none is removed."""
    from rekindle.models.local import find_pulled_model, remove

    models_dir = load_config({}, file=config).models_dir
    for model in [find_pulled_model(name, models_dir) for name in dict.fromkeys(names)]:
        freed = decimal(remove(model, models_dir))
        Console().print(f"{model.name} is removed, {freed} freed", markup=False, highlight=False)


@app.command()
def bench(
    base_url: BaseUrl = LOCAL_SERVER,
    model: Annotated[str | None, typer.Option(help="Name of the model")] = None,
    api_key: ApiKey = None,
    output: Annotated[Path, typer.Option(help="Folder for bench.json")] = Path("bench-results"),
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure only the cache and replies, within a minute")
    ] = False,
    png: Annotated[
        Path | None, typer.Option(help="Draw an image into this file; needs matplotlib")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Draw a page into this file")] = None,
) -> None:
    """Measure any OpenAI-compatible server: cold and warm turns, concurrency, decode speed."""
    with QuietImports():
        from rekindle import bench as bench_api

    if png is not None:
        bench_api.require_matplotlib()
    options = bench_api.quick_options if quick else bench_api.BenchOptions
    results = bench_api.run(options(base_url=base_url, model=model, api_key=api_key), console)
    bench_api.print_table(results, Console())
    bench_api.print_chart(results, Console())
    written = output / "bench.json"
    bench_api.save_json(results, written)
    if png is not None:
        bench_api.plot([results], png)
    if html is not None:
        bench_api.write_page([results], html)
    files = ", ".join(str(file) for file in (written, png, html) if file)
    console.print(f"Written: {files}", markup=False, highlight=False, soft_wrap=True)


@app.command("build-gpu")
def build_gpu(
    kind: Annotated[
        BuildKind | None,
        typer.Argument(help="cuda, vulkan, metal or cpu", show_default="what this machine has"),
    ] = None,
    arch: Annotated[
        str, typer.Option(help="CUDA architectures, such as 90 or '86;89'", show_default="this GPU")
    ] = "native",
    source: Annotated[
        Path | None, typer.Option(help="Archive or folder of the sources", show_default="download")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the build", show_default="~/.local/share/rekindle"),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Compilers at a time", show_default="by memory")
    ] = None,
) -> None:
    """Build llama.cpp for the GPU of this machine, and let `rekindle serve` use it."""
    from rekindle.cli import build_gpu as build

    chosen = kind or build.default_kind()
    folder = out or build.default_folder(chosen)
    options = build.BuildOptions(kind=chosen, arch=arch, source=source, out=folder, jobs=jobs)
    typer.echo(build.build_gpu(options, console))


@app.command()
def selftest(
    model: Annotated[str, typer.Argument(help="Model to check with")] = DEFAULT_MODEL,
    output: Annotated[Path, typer.Option(help="File for the report")] = Path(
        "rekindle-selftest.json"
    ),
    config: ConfigFile = None,
) -> None:
    """Check the results and the speed on this machine, and write a report for an issue."""
    from rekindle.cli.selftest import selftest as run_checks

    if not run_checks(load_config({}, file=config), model, output, console):
        raise typer.Exit(1)


@app.command()
def key(
    name: Annotated[str, typer.Argument(help="Name of the key's owner")],
    file: Annotated[
        Path | None, typer.Option(help="Append the key to this file, for --api-keys-file")
    ] = None,
    admin: Annotated[bool, typer.Option("--admin", help="Make an admin key")] = False,
) -> None:
    """Make an API key. It is shown only once, because the file stores its digest."""
    from rekindle.http import auth

    secret = auth.new_key()
    line = auth.key_line(name, secret, admin=admin)
    if file is None:
        console.print("The key, and the line to add to the file of --api-keys-file:")
    else:
        auth.append_key_line(file, line)
    typer.echo(secret)
    if file is None:
        typer.echo(line)


@app.command("config")
def show_config(
    config: ConfigFile = None,
    given: Annotated[
        bool, typer.Option("--given", help="Leave out settings with defaults")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show every setting in force, and whether a file, a variable or a default has set it."""
    from rekindle.cli.config import settings_table, values_in_force

    settings = load_config({}, file=config)
    if as_json:
        typer.echo(json.dumps(values_in_force(settings), indent=2))
    else:
        show(settings_table(settings, only_given=given))


def respelled(arguments: Sequence[str]) -> list[str]:
    """Translate other spellings: `--server --m MODEL` into `serve --model MODEL`, and
    `--embedding-model` without a value into one with the default model."""
    given = list(arguments)
    if "--server" in given and given[0].startswith("-"):
        given.remove("--server")
        given.insert(0, "serve")
    if given[:1] != ["serve"]:
        return given
    spelled = [re.sub(r"^--m(?==|$)", "--model", argument) for argument in given]
    translated = []
    for argument, following in zip(spelled, [*spelled[1:], "--"], strict=True):
        translated.append(argument)
        if argument == "--embedding-model" and following.startswith("-"):
            translated.append(DEFAULT_EMBEDDING_MODEL)
    return translated


def main() -> None:
    """Run the command line. Our own errors are printed as one sentence, without a traceback."""
    try:
        app(respelled(sys.argv[1:]))
    except RekindleError as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
