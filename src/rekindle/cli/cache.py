"""`rekindle cache`: show and change what a server stores."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.filesize import decimal

from rekindle.cli import cache_views as views
from rekindle.cli.cache_client import SUFFIX, CacheClient, PromptCacheFile, read_tokens
from rekindle.config import load_config
from rekindle.errors import RekindleError
from rekindle.models.progress import progress_bar

if TYPE_CHECKING:
    from rekindle.kvcache.disk.check import FolderReport

app = typer.Typer(
    name="cache",
    help="Look at what a server keeps, and tidy it.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

BaseUrl = Annotated[str, typer.Option(help="A running server")]
ApiKey = Annotated[
    str | None,
    typer.Option(envvar="REKINDLE_API_KEY", help="Its key; an admin key sees everybody's"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print what the server answered")]
Key = Annotated[str, typer.Argument(help="A cache key, or enough of its beginning")]
HERE = "http://127.0.0.1:8080/v1"


def _show(answer: Any, view: RenderableType, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
    else:
        Console().print(views.plain(view) if isinstance(view, str) else view)


@app.command("ls")
def list_entries(base_url: BaseUrl = HERE, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """List the entries, most recently used first."""
    answer = CacheClient(base_url, api_key).listing()
    _show(answer, views.entries_table(answer["entries"]), as_json=as_json)


@app.command()
def stats(base_url: BaseUrl = HERE, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """Show what the cache holds and how often it was hit."""
    answer = CacheClient(base_url, api_key).stats()
    _show(answer, views.stats_table(answer), as_json=as_json)


@app.command()
def show(
    key: Key, base_url: BaseUrl = HERE, api_key: ApiKey = None, as_json: AsJson = False
) -> None:
    """Show one entry in full."""
    client = CacheClient(base_url, api_key)
    answer = client.entry(client.find(key)["cache_key"])
    _show(answer, views.entry_table(answer), as_json=as_json)


@app.command()
def pin(
    key: Key, base_url: BaseUrl = HERE, api_key: ApiKey = None, as_json: AsJson = False
) -> None:
    """Never evict an entry."""
    client = CacheClient(base_url, api_key)
    answer = client.pin(client.find(key)["cache_key"])
    _show(answer, f"{answer['cache_key']} is pinned", as_json=as_json)


@app.command()
def unpin(
    key: Key, base_url: BaseUrl = HERE, api_key: ApiKey = None, as_json: AsJson = False
) -> None:
    """Let an entry expire and be evicted again."""
    client = CacheClient(base_url, api_key)
    answer = client.unpin(client.find(key)["cache_key"])
    _show(answer, f"{answer['cache_key']} is no longer pinned", as_json=as_json)


@app.command("rm")
def remove(
    keys: Annotated[list[str], typer.Argument(help="Cache keys, or enough of their beginnings")],
    base_url: BaseUrl = HERE,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Remove entries; none of them when one cannot be found."""
    client = CacheClient(base_url, api_key)
    found = dict.fromkeys(client.find(key)["cache_key"] for key in keys)
    answers = [client.remove(key) for key in found]
    _show(answers, "\n".join(f"{key} is forgotten" for key in found), as_json=as_json)


@app.command()
def export(
    key: Key,
    file: Annotated[Path, typer.Argument(help="A .safetensors file that mlx_lm can load")],
    base_url: BaseUrl = HERE,
    api_key: ApiKey = None,
) -> None:
    """Write an entry's state into a file for mlx_lm (MLX models)."""
    if file.suffix != SUFFIX:
        raise RekindleError(f"{file} must end with {SUFFIX}: mlx_lm goes by it")
    client = CacheClient(base_url, api_key)
    try:
        tokens = client.export(client.find(key)["cache_key"], file)
    except OSError as error:
        raise RekindleError(f"cannot write {file}: {error.strerror}") from None
    Console().print(views.plain(f"{file} holds the state of {tokens} tokens"))


@app.command("import")
def import_state(
    file: Annotated[Path, typer.Argument(help="What mlx_lm, or `export`, has written")],
    key: Annotated[
        str | None, typer.Option(help="A session_id by which requests go on from it")
    ] = None,
    tokens: Annotated[
        Path | None, typer.Option(help="JSON: the list of token ids that it is the state of")
    ] = None,
    prompt: Annotated[
        Path | None, typer.Option(help="The text that mlx_lm.cache_prompt was given")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Which of the models", show_default="the only one")
    ] = None,
    base_url: BaseUrl = HERE,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Have a server keep the state in a file. What mlx_lm wrote does not say which tokens it is
    of: name them with --tokens or --prompt."""
    content, client = PromptCacheFile(file), CacheClient(base_url, api_key)
    if tokens is not None:
        content.name_tokens(read_tokens(tokens))
    elif prompt is not None:
        content.name_tokens(client.tokenize(_text(prompt), model))
    elif not content.has_tokens:
        raise RekindleError(
            f"{file} does not say which tokens its state is of, and reuse is decided by comparing "
            "tokens: name them with --tokens, or with --prompt the text they came from"
        )
    answer = client.import_state(content.parts(), session_id=key, model=model)
    _show(
        answer,
        f"{answer['cache_key']} holds the state of {answer['token_count']} tokens",
        as_json=as_json,
    )


@app.command("gc")
def collect(base_url: BaseUrl = HERE, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """Remove now what has expired."""
    answer = CacheClient(base_url, api_key).collect()
    freed = decimal(answer["freed_bytes"])
    _show(answer, f"removed {answer['removed']} entries, freed {freed}", as_json=as_json)


@app.command()
def check(
    repair: Annotated[bool, typer.Option("--repair", help="Mend what can be mended")] = False,
    cache_dir: Annotated[
        Path | None, typer.Option(help="The folder", show_default="that of the settings")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Settings file", show_default="rekindle.yaml if there"),
    ] = None,
) -> None:
    """Verify the files on disk, without a server; exit status 1 when something was found."""
    # On the folder itself, without a server: the one command that needs the cache's own code.
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
    Console().print(_findings(folder, reports, repaired=repair))
    raise typer.Exit(code=int(any(report.findings for report in reports)))


def _findings(folder: Path, reports: Sequence[FolderReport], *, repaired: bool) -> RenderableType:
    """What a check of the files on disk found, folder by folder."""
    lines = [views.plain(f"{folder}: {len(reports)} models have state here")]
    for report in reports:
        if report.in_use:
            lines.append(
                views.plain(f"{report.path.name}: in use by a server, not looked at", "yellow")
            )
            continue
        if report.is_sealed:
            unknown = f"{report.path.name}: sealed with a secret that is not configured here"
            lines.append(views.plain(unknown, "yellow"))
            continue
        found = f"{len(report.findings)} findings" if report.findings else "nothing amiss"
        style = "red" if report.findings else "green"
        lines.append(
            views.plain(f"{report.path.name}: {report.blocks} good blocks, {found}", style)
        )
        lines += [views.plain(f"  {each.sentence} {each.key}".rstrip()) for each in report.findings]
    if any(report.findings for report in reports):
        lines.append(views.plain("Mended." if repaired else "Run it with --repair to mend this."))
    return Group(*lines)


@app.command()
def explain(
    key: Annotated[str, typer.Option(help="A cache key, or enough of its beginning")],
    messages: Annotated[
        Path, typer.Option(help="JSON: a list of messages, or the body of a request")
    ],
    model: Annotated[
        str | None, typer.Option(help="Which of the models", show_default="the entry's")
    ] = None,
    base_url: BaseUrl = HERE,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Show what a request would reuse of an entry, and where they differ."""
    request = _request(messages)
    client = CacheClient(base_url, api_key)
    entry = client.find(key)
    request["model"] = model or request.get("model") or entry["model"]
    answer = client.validate({**request, "cache_key": entry["cache_key"]})
    _show(answer, views.explanation(answer), as_json=as_json)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RekindleError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise RekindleError(f"{path} is not text in UTF-8") from None


def _request(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(_text(path))
    except ValueError:
        raise RekindleError(f"{path} is not JSON") from None
    match content:
        case list():
            return {"messages": content}
        case {"messages": list()}:
            known = ("model", "messages", "tools", "chat_template_kwargs")
            return {name: content[name] for name in known if name in content}
    raise RekindleError(f"{path} holds neither a list of messages nor an object with `messages`")
