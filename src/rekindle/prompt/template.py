"""A model's chat template: messages in, text out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Template

from rekindle.errors import BadRequest, TemplateFailed
from rekindle.prompt.content import Message, probe
from rekindle.prompt.sandbox import Sandbox

RENDER_LIMIT_S = 10.0
DEVELOPER = "developer"
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
        self._forms = probe(lambda messages: self._run(messages, add_generation_prompt=True))

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
        return self._run(
            [self._forms.fit(self._addressed(message)) for message in messages],
            add_generation_prompt=add_generation_prompt,
            tools=list(tools) if tools else None,  # templates ask `tools is not none`
            **kwargs,
        )

    def _addressed(self, message: Message) -> Message:
        """OpenAI's newer name for the system role, in the word the template knows."""
        if message.get("role") == DEVELOPER and not self._knows_developers:
            return {**message, "role": "system"}
        return message

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


def _failed(error: Exception) -> TemplateFailed:
    reason = str(error) or type(error).__name__
    return TemplateFailed(f"The model's chat template failed: {reason}")
