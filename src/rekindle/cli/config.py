"""Implements `rekindle config`, which shows every setting in force and where its value was set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table

from rekindle.cli.cache_views import plain
from rekindle.cli.flags import is_size
from rekindle.config import HIDDEN, SETTINGS, Config, Declaration, default_files, origin
from rekindle.protocol.settings import Group, format_size


def settings_table(config: Config, *, only_given: bool = False) -> RenderableType:
    """One line per setting, in the groups of `rekindle serve --help`."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("setting", "value", "from"):
        table.add_column(title, overflow="fold", no_wrap=title == "setting")
    for group in get_args(Group):
        for name, declared in SETTINGS.items():
            if declared.setting.group == group and (name in config.given or not only_given):
                style = "bold" if name in config.given else "dim"
                given = origin(config, name)
                source = "settings file" if given == str(config.settings_file) else given
                cells = (name, _text(getattr(config, name), declared), source)
                table.add_row(*map(plain, cells), style=style)
    return Lines(*map(plain, _file_lines(config)), table)


def _file_lines(config: Config) -> Iterator[str]:
    if config.settings_file:
        yield f"Settings file: {config.settings_file}"
        return
    yield "No settings file. Rekindle reads the first of these that exists:"
    yield from (f"  {path}" for path in default_files())


def _text(value: Any, declared: Declaration) -> str:
    """Write a value as the settings file takes it, or describe a default that is chosen later."""
    if declared.setting.secret and value:
        return HIDDEN
    if value is None or value == ():
        return declared.setting.default or "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | Mapping):
        return ", ".join(map(str, value)) or "none"
    return format_size(value) if is_size(declared) else str(value)
