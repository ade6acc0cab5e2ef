"""What one template can render, and conversations adapted to it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from rekindle.chat.capabilities import forms, requirements, system_messages, tool_fallback
from rekindle.chat.capabilities.forms import ArgumentForms, Tools
from rekindle.chat.capabilities.requirements import ToolRequirements
from rekindle.chat.capabilities.system_messages import SystemMessages
from rekindle.chat.capabilities.tool_fallback import ToolFallback, uses_tools
from rekindle.chat.messages import (
    DEVELOPER,
    REASONING_FIELDS,
    SYSTEM_ROLES,
    Message,
    reasoning,
)


class RenderTemplate(Protocol):
    """Runs a template on messages and tools as they are; raises TemplateFailed."""

    def __call__(
        self, messages: Sequence[Message], tools: Tools | None, /, *, add_generation_prompt: bool
    ) -> str: ...


@dataclass(frozen=True, slots=True)
class FieldNames:
    """The names of roles and fields that a template's source contains."""

    developer_role: bool
    reasoning: str | None  # the field it reads a reply's reasoning from

    @classmethod
    def of(cls, source: str) -> FieldNames:
        read = (name for name in REASONING_FIELDS if re.search(rf"""[.'"]{name}\b""", source))
        return cls(developer_role=DEVELOPER in source, reasoning=next(read, None))

    def adapt(self, message: Message) -> Message:
        if message.get("role") == DEVELOPER and not self.developer_role:
            return {**message, "role": "system"}
        sent = reasoning(message)
        if sent is None or self.reasoning is None or self.reasoning in message:
            return message
        if message.get("tool_calls") and message.get("content"):
            return message  # gpt-oss's template refuses both at once
        return {**message, self.reasoning: sent}


class TemplateCapabilities:
    """Found by probing; what concerns tools is probed when tools are first used."""

    def __init__(self, source: str, render: RenderTemplate) -> None:
        self._render = render
        self._fields = FieldNames.of(source)
        self._content = forms.probe_content(
            lambda messages, tools: render(messages, tools, add_generation_prompt=True)
        )

    @property
    def shows_tools(self) -> bool:
        """Whether the template shows tools itself; else they are written into a message."""
        return self._fallback.shows_tools

    def adapt(
        self, messages: Sequence[Message], tools: Tools | None
    ) -> tuple[list[Message], list[Any] | None]:
        """The conversation and its tools in a form that the template renders."""
        adapted = [self._fields.adapt(message) for message in messages]
        if any(message.get("role") in SYSTEM_ROLES for message in adapted):
            adapted = self._system_messages.adapt(adapted)
        if tools or any(map(uses_tools, adapted)):
            adapted = self._fallback.write(adapted, tools)
            tools = tools if self.shows_tools else None
            adapted = [self._arguments.adapt(message) for message in adapted]
            adapted, tools = self._requirements.adapt(adapted, tools)
        return self._with_content(adapted, tools)

    def _with_content(
        self, messages: Sequence[Message], tools: Tools | None
    ) -> tuple[list[Message], list[Any] | None]:
        # Without tools None, not an empty list: templates test `tools is not none`.
        return [self._content.adapt(each) for each in messages], list(tools) if tools else None

    @cached_property
    def _system_messages(self) -> SystemMessages:
        return system_messages.probe(self._rendered)

    @cached_property
    def _fallback(self) -> ToolFallback:
        return tool_fallback.probe(self._rendered)

    @cached_property
    def _arguments(self) -> ArgumentForms:
        return forms.probe_arguments(
            lambda messages, tools: self._render(
                *self._with_content(messages, tools), add_generation_prompt=False
            )
        )

    @cached_property
    def _requirements(self) -> ToolRequirements:
        def render(messages: Sequence[Message], tools: Tools | None) -> str:
            return self._rendered([self._arguments.adapt(each) for each in messages], tools)

        return requirements.probe(render) if self.shows_tools else requirements.NONE

    def _rendered(self, messages: Sequence[Message], tools: Tools | None) -> str:
        return self._render(*self._with_content(messages, tools), add_generation_prompt=True)
