"""A model's chat template: messages in, text out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Template
from jinja2.meta import find_undeclared_variables

from rekindle.chat.capabilities.template import TemplateCapabilities
from rekindle.chat.messages import Message
from rekindle.chat.sandbox import Sandbox
from rekindle.errors import BadRequest, TemplateFailed

RENDER_LIMIT_S = 10.0
OWN_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})
#: Options of reasoning that clients send to every model; a template that reads none ignores them.
COMMON_KWARGS = frozenset(
    {"enable_thinking", "thinking", "thinking_budget", "preserve_thinking", "reasoning_effort"}
)


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
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._template = self._compile(source)
        read = find_undeclared_variables(self._sandbox.parse(source)) | COMMON_KWARGS
        self._kwargs = read - OWN_VARIABLES - self._sandbox.globals.keys()
        self._capabilities = TemplateCapabilities(source, self._run)

    @property
    def shows_tools(self) -> bool:
        """Whether it shows tools itself; else they are written into a message, in Hermes's form."""
        return self._capabilities.shows_tools

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> str:
        """The text of a conversation, adapted to what the template can render."""
        self.check(kwargs)
        adapted = self._capabilities.adapt(messages, tools)
        return self._run(*adapted, add_generation_prompt=add_generation_prompt, **kwargs)

    def check(self, kwargs: Mapping[str, Any]) -> None:
        """Refuse a client's kwargs that are none of what the template reads of its own accord."""
        for name in kwargs:
            if name not in self._kwargs:
                raise BadRequest(
                    f"chat_template_kwargs may not set '{name[:80]}': this model's template takes "
                    f"{', '.join(sorted(self._kwargs))}.",
                    param="chat_template_kwargs",
                )

    def _compile(self, source: str) -> Template:
        try:
            return self._sandbox.from_string(source)
        except Exception as error:  # a template can make Jinja or Python's compiler raise anything
            raise _failed(error) from error

    def _run(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, /, **variables: Any
    ) -> str:
        variables = {**self._tokens, **variables, "messages": messages, "tools": tools}
        try:
            return self._sandbox.run(self._template, variables)
        except Exception as error:  # a template can raise anything: it is a program
            raise _failed(error) from error


def _failed(error: Exception) -> TemplateFailed:
    reason = str(error) or type(error).__name__
    return TemplateFailed(f"The model's chat template failed: {reason}")
