"""A model's chat template: messages in, text out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from jinja2 import Template

from rekindle.chat import arguments
from rekindle.chat import fallback_tools as toolless
from rekindle.chat import requirements as demands
from rekindle.chat.arguments import ArgumentForms
from rekindle.chat.content import Message, probe
from rekindle.chat.fallback_tools import Toolless, uses_tools
from rekindle.chat.requirements import Demands
from rekindle.chat.sandbox import Sandbox
from rekindle.errors import BadRequest, TemplateFailed

RENDER_LIMIT_S = 10.0
DEVELOPER = "developer"
REASONING = ("reasoning_content", "reasoning", "thinking")  # what templates call it
OWN_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})


class ChatTemplate:
    """Renders conversations within bounds; whatever goes wrong in it is a TemplateFailed."""

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        time_limit_s: float = RENDER_LIMIT_S,
    ) -> None:
        self._sandbox = Sandbox(time_limit_s=time_limit_s)
        self._reserved = OWN_VARIABLES | self._sandbox.globals.keys()
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._template = self._compile(source)
        self._knows_developers = DEVELOPER in source
        self._reasoning = _reasoning_field(source)
        self._forms = probe(lambda messages: self._run(messages, add_generation_prompt=True))

    @property
    def shows_tools(self) -> bool:
        """Whether it tells of tools itself; else they are written out in Hermes's form."""
        return self._toolless.tools

    @cached_property
    def _toolless(self) -> Toolless:
        return toolless.probe(
            lambda messages, tools: self._fitted(messages, tools, add_generation_prompt=True)
        )

    @cached_property
    def _arguments(self) -> ArgumentForms:
        return arguments.probe(
            lambda messages: self._fitted(messages, [toolless.TOOL], add_generation_prompt=False)
        )

    @cached_property
    def _demands(self) -> Demands:
        def render(messages: Sequence[Message], tools: Sequence[Any] | None) -> str:
            fitting = [self._arguments.fit(message) for message in messages]
            return self._fitted(fitting, tools, add_generation_prompt=True)

        return demands.probe(render) if self.shows_tools else demands.NONE

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> str:
        """The text of a conversation, each message's content in a form the template takes."""
        self.check(kwargs)
        told = [self._addressed(message) for message in messages]
        if tools or any(map(uses_tools, told)):
            told = self._toolless.write(told, tools)
            tools = tools if self.shows_tools else None
            told = [self._arguments.fit(message) for message in told]
            told, tools = self._demands.fit(told, tools)
        return self._fitted(told, tools, add_generation_prompt=add_generation_prompt, **kwargs)

    def _fitted(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, /, **variables: Any
    ) -> str:
        return self._run(
            [self._forms.fit(message) for message in messages],
            tools=list(tools) if tools else None,  # templates ask `tools is not none`
            **variables,
        )

    def _addressed(self, message: Message) -> Message:
        """OpenAI's names for the system role and for reasoning, in the words the template knows."""
        if message.get("role") == DEVELOPER and not self._knows_developers:
            return {**message, "role": "system"}
        thought = next((message[name] for name in REASONING if message.get(name)), None)
        if thought is None or self._reasoning is None or self._reasoning in message:
            return message
        if message.get("tool_calls") and message.get("content"):
            return message  # gpt-oss refuses both at once
        return {**message, self._reasoning: thought}

    def check(self, kwargs: Mapping[str, Any]) -> None:
        """Refuse a client's kwargs that would replace what the server or Jinja gives."""
        for name in kwargs:
            if name in self._reserved:
                raise BadRequest(
                    f"chat_template_kwargs may not set '{name}'.", param="chat_template_kwargs"
                )

    def _compile(self, source: str) -> Template:
        try:
            return self._sandbox.from_string(source)
        except Exception as error:  # a template can make Jinja or Python's compiler raise anything
            raise _failed(error) from error

    def _run(self, messages: Sequence[Message], /, **variables: Any) -> str:
        variables = {"tools": None, **self._tokens, **variables, "messages": messages}
        try:
            return self._sandbox.run(self._template, variables)
        except Exception as error:  # a template can raise anything: it is a program
            raise _failed(error) from error


def _reasoning_field(source: str) -> str | None:
    """What the template reads a reply's reasoning from, as far as its source tells."""
    reads = (name for name in REASONING if re.search(rf"""[.'"]{name}\b""", source))
    return next(reads, None)


def _failed(error: Exception) -> TemplateFailed:
    reason = str(error) or type(error).__name__
    return TemplateFailed(f"The model's chat template failed: {reason}")
