"""The normalisers of prompts, by the names that requests, settings and reports have for them."""

from __future__ import annotations

from typing import Literal

Normaliser = Literal[
    "claude-code-billing-header",
    "home-assistant-seconds",
    "goose-minutes",
    "tools",
    "session-paths",
    "dates",
]
#: What a request has done to its prompt: those the server is set to, nothing, or just these.
Normalise = bool | list[Normaliser]

#: Those that take nothing from a prompt that means anything to its model.
USUAL: tuple[Normaliser, ...] = (
    "claude-code-billing-header",
    "home-assistant-seconds",
    "goose-minutes",
    "tools",
)
