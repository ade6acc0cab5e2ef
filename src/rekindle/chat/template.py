"""A model's chat template: messages in, text out."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from time import monotonic
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, LoopControlExtension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rekindle.chat.capabilities.template import TemplateCapabilities
from rekindle.chat.messages import Message
from rekindle.errors import BadRequest, TemplateFailed

# ----------------------------------------------------------------------
# Where a model's chat template runs: it cannot reach out, run for ever, or grow without end.
#
# A template is part of a model file and is not trusted. Time is read at every loop turn and call
# rather than by a timer thread that interrupts: an interruption could arrive after the render.

SIZE_LIMIT = 16 << 20  # characters of output, and of any text a template builds on the way
NUMBER_LIMIT_BITS = 4096
DICT_ATTRIBUTES = frozenset(dir(dict))


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja as chat templates expect it, with an end to every render."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, *, time_limit_s: float) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            # Folding constants would run parts of the template while it compiles, off the clock.
            optimized=False,
            extensions=[LoopControlExtension, GenerationMarker],
        )
        self.code_generator_class = BoundedCode
        self.filters["tojson"] = to_json
        self.globals.pop("lipsum")
        self.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
        self._time_limit_s = time_limit_s
        self._clock = threading.local()  # renders of one template may run in several threads

    def run(self, template: Template, variables: Mapping[str, Any]) -> str:
        """The template's text, or the error it met; within the limits either way."""
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
        """What a macro or a `set` block printed, as one text."""
        self._check_size(sum(map(len, pieces)))
        return "".join(pieces)

    def _check_size(self, size: int) -> None:
        if size > SIZE_LIMIT:
            raise TemplateFailed(f"it built more than {SIZE_LIMIT} characters")

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
        """As Jinja does it; most of what templates read are fields of messages, which have no such
        attribute: those are found without trying it first."""
        if type(obj) is dict and attribute in obj and attribute not in DICT_ATTRIBUTES:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is str and type(right) is str:  # nearly always
            self._check_size(len(left) + len(right))
            return left + right
        self._check_growth(operator, left, right)
        return self.bounded(super().call_binop(context, operator, left, right))

    def _check_growth(self, operator: str, left: Any, right: Any) -> None:
        """Refuse a huge product beforehand: it is one native step, which no clock can stop."""
        match operator, left, right:
            case "*", (str() | list() | tuple()) as items, int(times):
                self._check_size(len(items) * times)
            case "*", int(times), (str() | list() | tuple()) as items:
                self._check_size(len(items) * times)
            case "*", int(), int():
                _check_bits(left.bit_length() + right.bit_length())
            case "**", int(), int():
                _check_bits(left.bit_length() * right)


class BoundedCode(CodeGenerator):
    """Compiles the checks of time and size into the template."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        tick = nodes.ExprStmt(nodes.EnvironmentAttribute("tick"), lineno=node.lineno)
        node.body.insert(0, tick)
        super().visit_For(node, frame)

    def visit_EnvironmentAttribute(self, node: nodes.EnvironmentAttribute, frame: Frame) -> None:
        super().visit_EnvironmentAttribute(node, frame)
        self.write("()")  # a call node would go through the sandbox's checks of what it may call

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.bounded(")
        super().visit_Concat(node, frame)
        self.write(")")


class GenerationMarker(Extension):
    """`{% generation %}` marks what a model is trained to write; it prints its body as it is."""

    tags = {"generation"}  # noqa: RUF012  # Jinja declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def _check_bits(bits: int) -> None:
    if bits > NUMBER_LIMIT_BITS:
        raise TemplateFailed(f"it computed a number of more than {NUMBER_LIMIT_BITS} bits")


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on it: Jinja's own filter escapes for HTML and sorts keys."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


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
