"""Presets: the operator's own prompts, which `rekindle.yaml` lists under `projects:`."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter, ValidationError

from rekindle.api.tools import Tool, Tools, described
from rekindle.config import Preset
from rekindle.errors import ConfigError

_tools: TypeAdapter[list[Tool]] = TypeAdapter(Tools)


def described_tools(name: str, preset: Preset) -> list[dict[str, Any]] | None:
    """The preset's tools as a chat template sees them, held to the rules for requests."""
    try:
        return described(_tools.validate_python(preset.tools))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, (name, "tools", *first["loc"])))
        reason = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"`projects`, `{place}`: {reason}") from None
