"""Renders conversations with a model's chat template, in a sandbox."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from time import monotonic
from types import MappingProxyType
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, LoopControlExtension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rekindle.chat.capabilities.messages import (
    ArgumentForms,
    ContentForms,
    FieldNames,
    SystemMessages,
    Tools,
)
from rekindle.chat.capabilities.tools import ToolFallback, ToolRequirements
from rekindle.chat.messages import Message, is_result, is_system
from rekindle.errors import BadRequest, TemplateFailed

OWN_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})
# Reasoning options that clients send to every model. A template that reads none ignores them.
COMMON_KWARGS = frozenset(
    {"enable_thinking", "thinking", "thinking_budget", "preserve_thinking", "reasoning_effort"}
)
NO_DEFAULTS: Mapping[str, Any] = MappingProxyType({})
MAX_CHARACTERS = 16 << 20  # of the output, and of any text that a template builds
MAX_NUMBER_BITS = 4096
DICT_ATTRIBUTES = frozenset(dir(dict))


class ChatTemplate:
    """Renders conversations within limits. Every failure is a TemplateFailed.

    Capabilities are found by rendering probes. Those of tools are probed when tools are first used.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        defaults: Mapping[str, Any] = NO_DEFAULTS,
        time_limit_s: float = 10.0,
    ) -> None:
        """`defaults` are kwargs that a request may change. Those that the template does not read
        are dropped, and `unread_defaults` names them."""
        self._sandbox = Sandbox(time_limit_s=time_limit_s)
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = self._sandbox.from_string(source)
        except Exception as error:  # a template can make Jinja or Python's compiler raise anything
            raise _failed(error) from error
        read = find_undeclared_variables(self._sandbox.parse(source)) | COMMON_KWARGS
        self._kwargs = read - OWN_VARIABLES - self._sandbox.globals.keys()
        self._defaults = {name: defaults[name] for name in defaults if name in self._kwargs}
        self.unread_defaults = sorted(defaults.keys() - self._kwargs)
        self._fields = FieldNames.of(source)
        self._content = ContentForms.probe(
            lambda messages, tools: self._run(messages, tools, add_generation_prompt=True)
        )

    @property
    def shows_tools(self) -> bool:
        """Whether the template shows tools itself. Otherwise they are written into a message."""
        return self._fallback.shows_tools

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Tools | None = None,
        **kwargs: Any,
    ) -> str:
        """The text of a conversation, which is first adapted to what the template accepts."""
        self.check(kwargs)
        messages = [self._fields.adapt(message) for message in messages]
        if any(map(is_system, messages)):
            messages = self._system_messages.adapt(messages)
        if tools or any(each.get("tool_calls") or is_result(each) for each in messages):
            messages, tools = self._with_tools(messages, tools)
        return self._rendered(messages, tools, add_generation_prompt, **kwargs)

    def check(self, kwargs: Mapping[str, Any]) -> None:
        """Refuses kwargs of a client that are not options of the template."""
        for name in kwargs:
            if name not in self._kwargs:
                raise BadRequest(
                    f"chat_template_kwargs may not set '{name[:80]}': this model's template takes "
                    f"{', '.join(sorted(self._kwargs))}.",
                    param="chat_template_kwargs",
                )

    def _with_tools(
        self, messages: Sequence[Message], tools: Tools | None
    ) -> tuple[Sequence[Message], Tools | None]:
        messages = self._fallback.adapt(messages, tools)
        messages = [self._arguments.adapt(message) for message in messages]
        return self._requirements.adapt(messages, tools if self.shows_tools else None)

    @cached_property
    def _system_messages(self) -> SystemMessages:
        return SystemMessages.probe(self._rendered)

    @cached_property
    def _fallback(self) -> ToolFallback:
        return ToolFallback.probe(self._rendered)

    @cached_property
    def _arguments(self) -> ArgumentForms:
        return ArgumentForms.probe(
            lambda messages, tools: self._rendered(messages, tools, add_generation_prompt=False)
        )

    @cached_property
    def _requirements(self) -> ToolRequirements:
        def render(messages: Sequence[Message], tools: Tools | None) -> str:
            return self._rendered([self._arguments.adapt(each) for each in messages], tools)

        return ToolRequirements.probe(render) if self.shows_tools else ToolRequirements()

    def _rendered(
        self,
        messages: Sequence[Message],
        tools: Tools | None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """Renders messages with their content in a form that the template accepts."""
        adapted = [self._content.adapt(each) for each in messages]
        # Without tools None, not an empty list, because templates test `tools is not none`.
        shown = list(tools) if tools else None
        return self._run(adapted, shown, add_generation_prompt=add_generation_prompt, **kwargs)

    def _run(self, messages: Sequence[Message], tools: Tools | None, /, **variables: Any) -> str:
        variables = {**self._tokens, **self._defaults, **variables}
        variables |= {"messages": messages, "tools": tools}
        try:
            return self._sandbox.run(self._template, variables)
        except Exception as error:  # a template is a program and can raise anything
            raise _failed(error) from error


def _failed(error: Exception) -> TemplateFailed:
    reason = str(error) or type(error).__name__
    return TemplateFailed(f"The model's chat template failed: {reason}")


class Sandbox(ImmutableSandboxedEnvironment):
    """Runs templates as Jinja does, within limits of time and size.

    A template is part of a model file and is not trusted. Every loop iteration and call reads the
    clock. A timer thread was rejected, because it could interrupt after the render.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, *, time_limit_s: float) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            # Constant folding would run parts of the template at compile time, without a limit.
            optimized=False,
            extensions=[LoopControlExtension, GenerationMarker],
        )
        self.code_generator_class = BoundedCode
        self.filters["tojson"] = to_json
        self.globals.pop("lipsum")
        self.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
        self._time_limit_s = time_limit_s
        self._clock = threading.local()  # several threads may render one template

    def run(self, template: Template, variables: Mapping[str, Any]) -> str:
        self._clock.end = monotonic() + self._time_limit_s
        pieces, size = [], 0
        for piece in template.generate(variables):
            self.tick()
            size += len(piece)
            self._check_size(size)
            pieces.append(piece)
        return "".join(pieces)

    def tick(self) -> None:
        if monotonic() > self._clock.end:
            raise TemplateFailed(f"it ran for more than {self._time_limit_s:g} s")

    def bounded(self, value: Any) -> Any:
        if isinstance(value, str | list | tuple):
            self._check_size(len(value))
        return value

    def concat(self, pieces: list[str]) -> str:  # type: ignore[override]  # "".join in Jinja
        """Joins the output of a macro or a `set` block."""
        self._check_size(sum(map(len, pieces)))
        return "".join(pieces)

    def _check_size(self, size: int) -> None:
        if size > MAX_CHARACTERS:
            raise TemplateFailed(f"it built more than {MAX_CHARACTERS} characters")

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.tick()
        return super().call(context, function, *args, **kwargs)

    def call_filter(self, *args: Any, **kwargs: Any) -> Any:
        self.tick()
        return super().call_filter(*args, **kwargs)

    def call_test(self, *args: Any, **kwargs: Any) -> Any:
        self.tick()
        return super().call_test(*args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        # Most reads are fields of messages. This finds them without Jinja's attribute lookup.
        if type(obj) is dict and attribute in obj and attribute not in DICT_ATTRIBUTES:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is str and type(right) is str:  # the common case
            self._check_size(len(left) + len(right))
            return left + right
        self._check_growth(operator, left, right)
        return self.bounded(super().call_binop(context, operator, left, right))

    def _check_growth(self, operator: str, left: Any, right: Any) -> None:
        """Refuses a huge product in advance. It is one native operation that no clock can stop."""
        bits = 0
        match operator, left, right:
            case "*", (str() | list() | tuple()) as items, int(times):
                self._check_size(len(items) * times)
            case "*", int(times), (str() | list() | tuple()) as items:
                self._check_size(len(items) * times)
            case "*", int(), int():
                bits = left.bit_length() + right.bit_length()
            case "**", int(), int():
                bits = left.bit_length() * right
        if bits > MAX_NUMBER_BITS:
            raise TemplateFailed(f"it computed a number of more than {MAX_NUMBER_BITS} bits")


class BoundedCode(CodeGenerator):
    """Compiles the checks of time and size into the template."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        tick = nodes.ExprStmt(nodes.EnvironmentAttribute("tick"), lineno=node.lineno)
        node.body.insert(0, tick)
        super().visit_For(node, frame)

    def visit_EnvironmentAttribute(self, node: nodes.EnvironmentAttribute, frame: Frame) -> None:
        super().visit_EnvironmentAttribute(node, frame)
        self.write("()")  # a call node would pass through the sandbox's own checks of calls

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.bounded(")
        super().visit_Concat(node, frame)
        self.write(")")


class GenerationMarker(Extension):
    """Prints the body of `{% generation %}`, which marks the text that a model is trained on."""

    tags = {"generation"}  # noqa: RUF012  # Jinja declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as in training data. Jinja's own filter escapes for HTML and sorts keys."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
