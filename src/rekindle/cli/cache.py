"""Implements `rekindle cache`, which shows and changes what a server stores."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.filesize import decimal

from rekindle.cli import cache_views as views
from rekindle.cli.cache_client import (
    SUFFIX,
    CacheClient,
    PromptCacheFile,
    entry_path,
    read_json,
    read_text,
    read_tokens,
)
from rekindle.cli.flags import CommandLine
from rekindle.config import load_config
from rekindle.errors import RekindleError
from rekindle.models.progress import progress_bar

if TYPE_CHECKING:
    from rekindle.kvcache.disk.check import FolderReport

app = CommandLine(name="cache", help="Show what a server stores, and clean it up.")

DAMAGED, UNCHECKED = 1, 2  # exit statuses of `check`
IN_USE = "not checked, because a server is using it. Stop the server first"
SEALED = (
    "not checked, because it was written with another secret. Set `cache_secret_file` in the "
    "settings file, or REKINDLE_CACHE_SECRET_FILE, to the file with that secret"
)
SETTINGS_PLACES = "rekindle.yaml here, else in ~/.config/rekindle"
LOCAL_SERVER = "http://127.0.0.1:8080/v1"
BaseUrl = Annotated[str, typer.Option(help="URL of the server")]
ApiKey = Annotated[
    str | None,
    typer.Option(envvar="REKINDLE_API_KEY", help="API key, if the server has any"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON")]
Key = Annotated[
    str,
    typer.Argument(
        help="Cache key or a unique beginning of it, message id, session id or project name"
    ),
]

Result = tuple[Any, RenderableType]  # the server's answer, and how to show it


def server_command(name: str | None = None) -> Callable[[Callable[..., Result]], None]:
    """Register a command that gets a CacheClient first and returns a Result.

    The command line shows the command's other parameters, --base-url, --api-key and --json.
    """

    def register(command: Callable[..., Result]) -> None:
        def run(
            *,
            base_url: BaseUrl = LOCAL_SERVER,
            api_key: ApiKey = None,
            as_json: AsJson = False,
            **arguments: Any,
        ) -> None:
            answer, view = command(CacheClient(base_url, api_key), **arguments)
            if as_json:
                typer.echo(json.dumps(answer, indent=2))
            else:
                views.show(views.plain(view) if isinstance(view, str) else view)

        _client, *own = inspect.signature(command, eval_str=True).parameters.values()
        *options, _arguments = inspect.signature(run, eval_str=True).parameters.values()
        own = [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in own]
        run.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]
        run.__doc__ = command.__doc__
        app.command(name or command.__name__)(run)

    return register


@server_command("ls")
def list_entries(
    client: CacheClient,
    all_: Annotated[bool, typer.Option("--all", help="Also list entries without state")] = False,
) -> Result:
    """List the entries, most recently used first."""
    answer = client.listing()
    return answer, views.entries_table(answer["entries"], show_empty=all_)


@server_command()
def stats(client: CacheClient) -> Result:
    """Show the size of the cache and how often it was hit."""
    answer = client.send("GET", "/cache/stats")
    return answer, views.stats_table(answer)


@server_command()
def show(client: CacheClient, key: Key) -> Result:
    """Show all details of one entry."""
    answer = client.send("GET", client.path(key))
    return answer, views.entry_table(answer)


@server_command()
def pin(client: CacheClient, key: Key) -> Result:
    """Pin an entry, so that it is never evicted."""
    answer = client.send("POST", client.path(key) + "/pin", json={})
    return answer, f"{answer['cache_key']} is pinned"


@server_command()
def unpin(client: CacheClient, key: Key) -> Result:
    """Unpin an entry, so that it can expire and be evicted again."""
    answer = client.send("POST", client.path(key) + "/unpin", json={})
    return answer, f"{answer['cache_key']} is no longer pinned"


@server_command("rm")
def remove(
    client: CacheClient,
    keys: Annotated[
        list[str], typer.Argument(help="Cache keys, or unique beginnings of cache keys")
    ],
) -> Result:
    """Delete entries and their state.

    If one of them does not exist, none is deleted."""
    found = dict.fromkeys(client.find(key)["cache_key"] for key in keys)
    answers = [client.send("DELETE", entry_path(key)) for key in found]
    return answers, "\n".join(f"{key} is deleted" for key in found)


@app.command()
def export(
    key: Key,
    file: Annotated[Path, typer.Argument(help="The .safetensors file to write, for mlx_lm")],
    base_url: BaseUrl = LOCAL_SERVER,
    api_key: ApiKey = None,
) -> None:
    """Write the state of an entry to a file for mlx_lm (only MLX models)."""
    if file.suffix != SUFFIX:
        raise RekindleError(f"{file} must end with {SUFFIX}, or mlx_lm cannot load it")
    client = CacheClient(base_url, api_key)
    try:
        tokens = client.export(client.path(key), file)
    except OSError as error:
        raise RekindleError(f"cannot write {file}: {error.strerror}") from None
    views.show(views.plain(f"{file} contains the state of {tokens} tokens"))


@server_command("import")
def import_state(
    client: CacheClient,
    file: Annotated[Path, typer.Argument(help="A file that mlx_lm or `export` wrote")],
    key: Annotated[
        str | None, typer.Option(help="The session_id with which requests can reuse the state")
    ] = None,
    tokens: Annotated[
        Path | None, typer.Option(help="JSON file with the token ids of the state")
    ] = None,
    prompt: Annotated[
        Path | None, typer.Option(help="File with the prompt that mlx_lm.cache_prompt was given")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Name of the model", show_default="the only model")
    ] = None,
) -> Result:
    """Store the state of a file on a server (only MLX models).

    Files of mlx_lm do not contain the token ids, so add --tokens or --prompt for them."""
    content = PromptCacheFile(file)
    if tokens is not None:
        content.name_tokens(read_tokens(tokens))
    elif prompt is not None:
        content.name_tokens(client.tokenize(read_text(prompt), model))
    elif not content.has_tokens:
        raise RekindleError(
            f"{file} does not contain the token ids of its state, and reuse compares tokens: give "
            "the ids with --tokens, or the text with --prompt"
        )
    answer = client.import_state(content.parts(), session_id=key, model=model)
    return answer, f"{answer['cache_key']} now has the state of {answer['token_count']} tokens"


@server_command("gc")
def collect(client: CacheClient) -> Result:
    """Delete expired entries now."""
    answer = client.send("POST", "/cache/gc", json={})
    freed = decimal(answer["freed_bytes"])
    return answer, f"removed {answer['removed']} entries, freed {freed}"


@server_command()
def explain(
    client: CacheClient,
    key: Annotated[str, typer.Option(help="Cache key, or a unique beginning of it")],
    messages: Annotated[
        Path, typer.Option(help="JSON file with a list of messages, or with a request body")
    ],
    model: Annotated[
        str | None, typer.Option(help="Name of the model", show_default="the entry's model")
    ] = None,
) -> Result:
    """Show how much of an entry a request would reuse, and the first difference."""
    request = _read_request(messages)
    entry = client.find(key)
    request["model"] = model or request.get("model") or entry["model"]
    request["cache_key"] = entry["cache_key"]
    answer = client.send("POST", "/cache/validate", json=request)
    return answer, views.explanation(answer)


@app.command()
def check(
    repair: Annotated[bool, typer.Option("--repair", help="Repair what can be repaired")] = False,
    cache_dir: Annotated[
        Path | None, typer.Option(help="Cache folder", show_default="from the settings")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Settings file", show_default=SETTINGS_PLACES)
    ] = None,
) -> None:
    """Verify the files on disk.

    Exits with status 1 if it finds damage, and with 2 if it could not check everything, because a
    server uses the folder or the secret is missing."""
    # Only this command needs the cache's own code.
    from rekindle.kvcache.disk.check import check as verify
    from rekindle.kvcache.disk.secret import read_secret_file

    settings = load_config({"cache_dir": cache_dir}, file=config)
    folder, secret_file = settings.cache_dir, settings.cache_secret_file
    secret = read_secret_file(Path(secret_file)) if secret_file else None
    try:
        with progress_bar("checking", Console(stderr=True)) as on_progress:
            reports = verify(folder, repair=repair, secret=secret, progress=on_progress)
    except OSError as error:
        raise RekindleError(f"cannot check {folder}: {error.strerror}") from None
    views.show(_findings(folder, reports, repaired=repair))
    raise typer.Exit(_exit_status(reports))


@app.command()
def backup(
    target: Annotated[Path, typer.Argument(help="Folder for the copy, which is made")],
    cache_dir: Annotated[
        Path | None, typer.Option(help="Cache folder", show_default="from the settings")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Settings file", show_default=SETTINGS_PLACES)
    ] = None,
) -> None:
    """Copy the cache folder, also while a server uses it. Serve the copy with --cache-dir."""
    from rekindle.kvcache.disk.backup import back_up

    folder = load_config({"cache_dir": cache_dir}, file=config).cache_dir
    try:
        report = back_up(folder, target)
    except OSError as error:
        raise RekindleError(f"cannot copy {folder} to {target}: {error.strerror}") from None
    size = f"{report.files} files of {report.folders} models, {decimal(report.size_bytes)}"
    views.show(views.plain(f"{target}: {size}"))
    for name in report.torn:
        text = f"{name}: its index changed all the time, so names of the last minutes are missing"
        views.show(views.plain(text, "yellow"))


def _exit_status(reports: Sequence[FolderReport]) -> int:
    if any(report.findings for report in reports):
        return DAMAGED
    skipped = any(report.in_use or report.is_sealed for report in reports)
    return UNCHECKED if skipped else 0


def _findings(folder: Path, reports: Sequence[FolderReport], *, repaired: bool) -> RenderableType:
    models = "1 model" if len(reports) == 1 else f"{len(reports)} models"
    lines = [views.plain(f"{folder}: state of {models}")]
    for report in reports:
        if report.in_use:
            result, style = IN_USE, "yellow"
        elif report.is_sealed:
            result, style = SEALED, "yellow"
        else:
            found = f"damage found: {len(report.findings)}" if report.findings else "no damage"
            style = "red" if report.findings else "green"
            unused = f", {report.unreached} of them in no entry" if report.unreached else ""
            result = f"{report.blocks} good blocks{unused}, {found}"
        lines.append(views.plain(f"{report.path.name}: {result}", style))
        for each in report.findings:
            lines.append(views.plain(f"  {each.sentence} {each.key}".rstrip()))
    if any(report.findings for report in reports):
        lines.append(
            views.plain("Repaired." if repaired else "Run it with --repair to repair this.")
        )
    return Group(*lines)


def _read_request(path: Path) -> dict[str, Any]:
    match content := read_json(path):
        case list():
            return {"messages": content}
        case {"messages": list()}:
            known = ("model", "messages", "tools", "chat_template_kwargs")
            return {name: content[name] for name in known if name in content}
    raise RekindleError(f"{path} must contain a list of messages, or an object with `messages`")
