"""Makes the flags of `rekindle serve` from the settings, and words the help of all commands."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from rekindle.config import SETTINGS, Declaration
from rekindle.protocol.settings import DURATION_TEXT, SIZE_TEXT, Group, format_size

F = TypeVar("F", bound=Callable[..., Any])

#: What the help shows in place of a value, by the type that the command line parses.
_METAVARS = {
    bool: "",
    int: "<number>",
    float: "<number>",
    str: "<text>",
    list[str]: "<text>",
    Path: "<path>",
}


class _Command(TyperCommand):
    """A command whose help shows a type only for options that take a value."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _hide_types_of_switches(self.get_params(ctx))
        super().format_help(ctx, formatter)


class _Commands(TyperGroup):
    """A group of commands with the same kind of help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _hide_types_of_switches(self.get_params(ctx))
        super().format_help(ctx, formatter)


class CommandLine(typer.Typer):
    """A command line whose commands have this kind of help."""

    def __init__(self, **options: Any) -> None:
        super().__init__(cls=_Commands, no_args_is_help=True, rich_markup_mode="rich", **options)

    def command(self, name: str | None = None, **options: Any) -> Callable[[F], F]:
        return super().command(name, cls=_Command, **options)


def _hide_types_of_switches(parameters: Iterable[object]) -> None:
    for each in parameters:
        if isinstance(each, TyperOption) and each.is_bool_flag:
            each.metavar = ""


def takes_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command a flag for each setting that has one. It gets them as `**flags`."""
    own = inspect.signature(command, eval_str=True).parameters.values()
    kept = [parameter for parameter in own if parameter.kind is not parameter.VAR_KEYWORD]
    groups = get_args(Group)
    flags = sorted(
        (each for each in SETTINGS.values() if each.setting.flag),
        key=lambda each: groups.index(each.setting.group),
    )
    parameters = [*map(_parameter, flags), *kept]
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # where typer looks
        [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in parameters]
    )
    return command


def _parameter(declared: Declaration) -> inspect.Parameter:
    """Make the flag of a setting. Its default is None, which means that it was not given."""
    option = typer.Option(
        spelling(declared),
        help=declared.setting.help,
        metavar=_METAVARS[_kind(declared)] if not is_size(declared) else "<size>",
        show_default=shown_default(declared) or False,
        rich_help_panel=declared.setting.group,
    )
    return inspect.Parameter(
        declared.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[_kind(declared) | None, option],
    )


def spelling(declared: Declaration) -> str:
    """Spell the flag. A switch that may be on by default gets a --no- variant."""
    flag = declared.name.replace("_", "-")
    switch = declared.default is True or (declared.default is None and _kind(declared) is bool)
    return f"--{flag}/--no-{flag}" if switch else f"--{flag}"


def shown_default(declared: Declaration) -> str:
    default = declared.default
    if declared.setting.default is not None:
        return declared.setting.default
    if isinstance(default, bool):
        return "on" if default else ""
    if default in (None, ()):
        return ""
    return format_size(default) if is_size(declared) else str(default)


def _kind(declared: Declaration) -> Any:
    """The type that the command line parses. `Config` parses everything else from text."""
    if isinstance(declared.default, tuple):
        return list[str]
    kind, *_ = get_args(declared.type)
    parts = {kind, *get_args(kind)}
    simple = [each for each in (bool, int, float, Path) if each in parts]
    is_text = is_size(declared) or DURATION_TEXT in get_args(declared.type)
    return str if is_text or not simple else simple[0]


def is_size(declared: Declaration) -> bool:
    return SIZE_TEXT in get_args(declared.type)
