"""Defines the commands. Each imports what it needs, so that none waits for the others."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape

from rekindle.cli import cache as cache_cli
from rekindle.cli import tenants as tenants_cli
from rekindle.cli.cache import LOCAL_SERVER, SETTINGS_PLACES, ApiKey, AsJson, BaseUrl
from rekindle.cli.cache_views import show
from rekindle.cli.flags import CommandLine, takes_settings
from rekindle.cli.interrupts import QuietImports
from rekindle.config import load_config
from rekindle.errors import RekindleError
from rekindle.models.catalogue import DEFAULT_EMBEDDING_MODEL, DEFAULT_MODEL
from rekindle.version import __version__

TALK, MODELS, STATE, MACHINE = "Serve and chat", "Models", "Cache and settings", "This machine"

app = CommandLine(
    name="rekindle",
    help="An OpenAI-compatible inference server that keeps and reuses the KV cache of every "
    "conversation.",
    epilog="Begin with `rekindle run` for a chat, or with `rekindle serve` for a server.",
    pretty_exceptions_enable=False,
)
app.add_typer(cache_cli.app, rich_help_panel=STATE)
app.add_typer(tenants_cli.app, rich_help_panel=STATE)
service_app = typer.Typer(
    name="service",
    help="Run the server as a service of systemd.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.add_typer(service_app, rich_help_panel=MACHINE)
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


@app.command(rich_help_panel=TALK)
@takes_settings
def serve(config: ConfigFile = None, **flags: Any) -> None:
    """Serve models over HTTP.

    Flags override REKINDLE_* variables, which override rekindle.yaml."""
    with QuietImports():
        from rekindle.front.launch import serve as run_server

    load = partial(load_config, flags, file=config)
    run_server(load(), console, load)


@app.command(rich_help_panel=MODELS)
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


@app.command(rich_help_panel=MODELS)
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


@app.command(rich_help_panel=TALK)
def run(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Catalogue name, GGUF file, model folder or org/repo[:quant]",
            show_default="the server's, else smollm2",
        ),
    ] = None,
    prompt: Prompt = None,
    base_url: BaseUrl = LOCAL_SERVER,
    api_key: ApiKey = None,
    system: System = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 0.7,
    config: ConfigFile = None,
) -> None:
    """Chat with a model. Downloads and loads it if needed."""
    with QuietImports():
        from rekindle.cli.chat import Conversation, read_prompt, talk
        from rekindle.cli.servers import server_with

    text = read_prompt(prompt, sys.stdin)
    with server_with(model, base_url, api_key, config, console) as server:
        options = {"max_tokens": max_tokens, "temperature": temperature}
        talk(Conversation.at(server, options, system), text, Console())


@app.command(rich_help_panel=TALK)
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


@app.command("ls", rich_help_panel=MODELS)
def list_models(
    catalogue: Annotated[
        bool, typer.Option("--catalogue", help="List the names that can be pulled")
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


@app.command("load", rich_help_panel=MODELS)
def load_model(name: ServedName, base_url: BaseUrl = LOCAL_SERVER, api_key: ApiKey = None) -> None:
    """Load a model into a running server, and wait until it is loaded."""
    from rekindle.cli.models import change_model

    typer.echo(change_model("load", name, base_url, api_key))


@app.command("unload", rich_help_panel=MODELS)
def unload_model(
    name: ServedName, base_url: BaseUrl = LOCAL_SERVER, api_key: ApiKey = None
) -> None:
    """Unload a model from a running server. The next request for it loads it again."""
    from rekindle.cli.models import change_model

    typer.echo(change_model("unload", name, base_url, api_key))


@app.command("ps", rich_help_panel=MODELS)
def list_running(base_url: BaseUrl = LOCAL_SERVER, api_key: ApiKey = None) -> None:
    """List the models that a server has loaded."""
    from rekindle.cli.models import running_models, running_table

    show(running_table(running_models(base_url, api_key)))


@app.command("show", rich_help_panel=MODELS)
def show_model(name: PulledName, config: ConfigFile = None) -> None:
    """Describe a model on this machine."""
    from rekindle.cli.models import model_table
    from rekindle.models.local import find_pulled_model

    models_dir = load_config({}, file=config).models_dir
    show(model_table(find_pulled_model(name, models_dir)))


@app.command("rm", rich_help_panel=MODELS)
def remove_models(
    names: Annotated[list[str], typer.Argument(help="Names from `rekindle ls`")],
    config: ConfigFile = None,
) -> None:
    """Delete models from this machine.

    If one of them does not exist, none is deleted."""
    from rekindle.models.local import find_pulled_model, remove

    models_dir = load_config({}, file=config).models_dir
    for model in [find_pulled_model(name, models_dir) for name in dict.fromkeys(names)]:
        freed = decimal(remove(model, models_dir))
        Console().print(f"{model.name} is deleted, {freed} freed", markup=False, highlight=False)


@app.command(rich_help_panel=MACHINE)
def bench(
    base_url: BaseUrl = LOCAL_SERVER,
    model: Annotated[str | None, typer.Option(help="Name of the model")] = None,
    api_key: ApiKey = None,
    output: Annotated[Path, typer.Option(help="Folder of bench.json")] = Path("bench-results"),
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure the cache and replies only, within a minute")
    ] = False,
    png: Annotated[
        Path | None, typer.Option(help="Draw the chart into this PNG file; needs matplotlib")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Draw the chart into this HTML file")] = None,
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


@app.command("build-gpu", rich_help_panel=MACHINE)
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


@app.command(rich_help_panel=MACHINE)
def selftest(
    model: Annotated[str, typer.Argument(help="Model to check with")] = DEFAULT_MODEL,
    output: Annotated[Path, typer.Option(help="File for the report")] = Path(
        "rekindle-selftest.json"
    ),
    config: ConfigFile = None,
) -> None:
    """Check correctness and speed on this machine, and write a report to attach to an issue."""
    from rekindle.cli.selftest import selftest as run_checks

    if not run_checks(load_config({}, file=config), model, output, console):
        raise typer.Exit(1)


@app.command(rich_help_panel=MACHINE)
@takes_settings
def doctor(config: ConfigFile = None, as_json: AsJson = False, **flags: Any) -> None:
    """Check whether `serve` would work here with the same flags, and say what to change."""
    with QuietImports():
        from rekindle.cli import doctor as doctor_cli

    try:
        findings = list(doctor_cli.examine(load_config(flags, file=config)))
    except RekindleError as error:
        findings = [doctor_cli.Diagnosis("settings", "failed", str(error))]
    if as_json:
        checks = [asdict(each) for each in findings]
        typer.echo(json.dumps({"works": doctor_cli.works(findings), "checks": checks}, indent=2))
    else:
        doctor_cli.report(findings, Console())
    if not doctor_cli.works(findings):
        raise typer.Exit(1)


@app.command(rich_help_panel=STATE)
def key(
    name: Annotated[str, typer.Argument(help="Name of the key's owner")],
    file: Annotated[
        Path | None, typer.Option(help="Append the key to this file, for --api-keys-file")
    ] = None,
    admin: Annotated[bool, typer.Option("--admin", help="Make an admin key")] = False,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", help="Limit or group, such as requests_per_minute=60; repeatable"),
    ] = None,
) -> None:
    """Make an API key. It is shown only once, because the file stores its digest. A second key of
    the same name belongs to the same tenant."""
    from rekindle.http import key_file

    secret, options = key_file.new_key(), option or []
    known = None if file is None else key_file.options_of_tenant(file, name, options)
    line = key_file.key_line(name, secret, admin=admin, options=options if known is None else known)
    if file is None:
        console.print("The key, and the line to add to the file of --api-keys-file:")
    else:
        key_file.append_key_line(file, line)
    if known is not None:
        console.print(
            f"{name} has a key in {file} already. The new key belongs to the same tenant, with the "
            "same cache. To end the old key, delete its line.",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    typer.echo(secret)
    if file is None:
        typer.echo(line)


IsSystem = Annotated[
    bool,
    typer.Option("--system/--user", help="For the whole system, as root; or for this user"),
]


@service_app.command("install", context_settings={"ignore_unknown_options": True})
def install_service(
    flags: Annotated[list[str] | None, typer.Argument(help="Flags of `serve`, after --")] = None,
    system: IsSystem = False,
    dry_run: Annotated[bool, typer.Option("--print", help="Only print the unit file")] = False,
) -> None:
    """Write a systemd unit that runs `rekindle serve`, and check it."""
    from rekindle.cli import service

    unit = service.Service(service.installed_program(), tuple(flags or ()), system)
    if dry_run:
        typer.echo(service.shown(unit), nl=False)
    else:
        service.install(unit, console)


@service_app.command("remove")
def remove_service(system: IsSystem = False) -> None:
    """Delete the systemd unit."""
    from rekindle.cli import service

    service.remove(service.Service(service.installed_program(), is_system=system), console)


@app.command("config", rich_help_panel=STATE)
def show_config(
    config: ConfigFile = None,
    given: Annotated[
        bool, typer.Option("--given", help="Show only settings that were changed")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the settings in force, and where each value comes from."""
    from rekindle.cli.config import settings_table
    from rekindle.config import values_in_force

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
