"""Implements `rekindle tenant`, which lists the tenants of a server and erases one of them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from rekindle.cli.cache import LOCAL_SERVER, ApiKey, AsJson, BaseUrl
from rekindle.cli.cache_client import CacheClient
from rekindle.cli.cache_views import plain, show

app = typer.Typer(
    name="tenant",
    help="Show who uses a server, and erase what is stored for one of them.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
COLUMNS = ("open_turns", "requests", "refused_requests", "generated_tokens")


@app.command("ls")
def list_tenants(
    base_url: BaseUrl = LOCAL_SERVER, api_key: ApiKey = None, as_json: AsJson = False
) -> None:
    """List the tenants whose keys the server accepts. Needs an admin key."""
    answer = CacheClient(base_url, api_key).send("GET", "/tenants")
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
    else:
        show(_table(answer["tenants"]))


def _table(tenants: list[dict[str, Any]]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("tenant", "keys", "groups", *(name.replace("_", " ") for name in COLUMNS)):
        table.add_column(title, no_wrap=True)
    for each in tenants:
        figures = (Text(f"{each[name]:,}", justify="right") for name in COLUMNS)
        groups = plain(", ".join(each["groups"]))
        table.add_row(plain(each["name"]), Text(str(each["keys"])), groups, *figures)
    return table


@app.command("rm")
def remove(
    name: Annotated[str, typer.Argument(help="Name of the tenant")],
    file: Annotated[
        Path | None, typer.Option(help="Also remove the tenant's keys from this file, first")
    ] = None,
    base_url: BaseUrl = LOCAL_SERVER,
    api_key: ApiKey = None,
) -> None:
    """Erase a tenant: its turns, entries, state in every tier, images and stored responses."""
    from rekindle.http.key_file import RELOAD_INTERVAL_S, remove_tenant

    client, entries, freed_bytes = CacheClient(base_url, api_key), 0, 0
    client.send("GET", "/tenants")  # before the keys are removed: the server has to accept us
    tenants = [name] if file is None else remove_tenant(file, name)
    if file is not None:
        time.sleep(RELOAD_INTERVAL_S + 0.5)  # then the server refuses the keys
    for tenant in tenants:
        removed = client.send("DELETE", f"/tenants/{quote(tenant, safe='')}")
        entries, freed_bytes = entries + removed["removed"], freed_bytes + removed["freed_bytes"]
    text = f"{name} is erased: {entries} entries with {decimal(freed_bytes)} are removed"
    if file is not None:
        text += f", and so are the keys in {file}"
    Console().print(f"{text}.", markup=False, highlight=False, soft_wrap=True)
