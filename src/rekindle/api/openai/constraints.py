"""What a reply's text has to be: OpenAI's, vLLM's and llama.cpp's fields, all of them enforced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from rekindle.api.base.fields import FunctionName, shallow, takes
from rekindle.api.base.tools import Tool
from rekindle.errors import BadRequest, Unsupported
from rekindle.protocol.requests import StructuredOutput, ToolUse

# ----------------------------------------------------------------------
# `response_format`: what a reply's text has to be.

Schema = Annotated[
    dict[str, Any] | bool, takes("a JSON schema, which is an object"), AfterValidator(shallow)
]


class JsonSchema(BaseModel):
    model_config = ConfigDict(strict=True, protected_namespaces=())

    name: FunctionName
    schema_: Schema | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None  # the schema is enforced either way


class ResponseFormat(BaseModel):
    """OpenAI's three forms, and the schema that some clients send with `json_object`."""

    model_config = ConfigDict(strict=True, protected_namespaces=())

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Schema | None = Field(None, alias="schema")

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError('of type "json_schema" needs `json_schema`, an object')
        return self

    @property
    def structure(self) -> StructuredOutput | None:
        """As the runtime takes it; None for plain text."""
        match self.type:
            case "text":
                return None
            case "json_object":
                return StructuredOutput(schema=self.schema_)
        assert self.json_schema is not None
        return StructuredOutput(schema=self.json_schema.schema_)


MOST_GRAMMAR_CHARACTERS = 65_536
MOST_REGEX_CHARACTERS = 16_384
MOST_CHOICES = 1_000
MOST_CHOICE_CHARACTERS = 65_536  # of all choices together
#: Fields, and what of a StructuredOutput each of them is.
FIELDS = {
    "grammar": "grammar",
    "json_schema": "schema",
    "guided_json": "schema",
    "guided_regex": "regex",
    "guided_choice": "choices",
    "guided_grammar": "grammar",
}
PARTS = {"json": "schema", "regex": "regex", "choice": "choices", "grammar": "grammar"}
NO_EFFECT = ("disable_fallback", "backend", "_backend")  # there is one backend
TAKES = (
    "`structured_outputs` takes an object with one of `json`, `regex`, `choice`, `grammar` and "
    "`json_object`"
)


def _parsed(schema: Any) -> Any:
    """vLLM takes a schema as a string as well."""
    if not isinstance(schema, str):
        return schema
    try:
        return orjson.loads(schema)  # by the rules that bodies obey
    except orjson.JSONDecodeError:
        return schema


def _short(choices: list[str]) -> list[str]:
    if sum(map(len, choices)) > MOST_CHOICE_CHARACTERS:
        raise ValueError(f"takes at most {MOST_CHOICE_CHARACTERS} characters in all")
    return choices


def _none_if_empty(grammar: Any) -> Any:
    """llama.cpp's clients send an empty grammar for none."""
    return None if grammar == "" else grammar


SchemaOrText = Annotated[Schema, BeforeValidator(_parsed)]
GrammarText = Annotated[str, Field(min_length=1, max_length=MOST_GRAMMAR_CHARACTERS)]
Regex = Annotated[str, Field(min_length=1, max_length=MOST_REGEX_CHARACTERS)]
Choices = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    Field(min_length=1, max_length=MOST_CHOICES, fail_fast=True),
    AfterValidator(_short),
]


class StructuredOutputs(BaseModel):
    """What a reply has to be: one of these."""

    model_config = ConfigDict(strict=True, protected_namespaces=())

    json_: SchemaOrText | None = Field(None, alias="json")
    regex: Regex | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_the_unknown(cls, data: Any) -> Any:
        for name, value in data.items() if isinstance(data, dict) else ():
            known = name in PARTS or name in NO_EFFECT or name == "json_object"
            if not known and value not in (None, False):
                raise Unsupported(f"{TAKES}, not `{name[:80]}`", param="structured_outputs")
        return data

    @model_validator(mode="after")
    def _asks_for_something(self) -> StructuredOutputs:
        if not self.structures:
            raise BadRequest(f"{TAKES}.", param="structured_outputs")
        return self

    @property
    def structures(self) -> dict[str, StructuredOutput]:
        """What is asked for, by the field that asks."""
        values = {name: getattr(self, "json_" if name == "json" else name) for name in PARTS}
        found = {
            f"structured_outputs.{name}": StructuredOutput(
                **{PARTS[name]: value}, param="structured_outputs"
            )
            for name, value in values.items()
            if value is not None
        }
        if self.json_object:
            found["structured_outputs.json_object"] = StructuredOutput(param="structured_outputs")
        return found


class StructuredFields(BaseModel):
    """The fields of a request that say what its reply has to be."""

    response_format: ResponseFormat | None = None
    grammar: Annotated[GrammarText | None, BeforeValidator(_none_if_empty)] = Field(
        None, description="llama.cpp's: GBNF, or Lark, that the reply follows"
    )
    json_schema: Schema | None = Field(None, description="llama.cpp's: the reply is such JSON")
    guided_json: SchemaOrText | None = Field(None, description="vLLM's: the reply is such JSON")
    guided_regex: Regex | None = Field(None, description="vLLM's: the whole reply matches it")
    guided_choice: Choices | None = Field(None, description="vLLM's: the reply is one of these")
    guided_grammar: GrammarText | None = Field(
        None, description="vLLM's: GBNF, or Lark, that the reply follows"
    )
    structured_outputs: StructuredOutputs | None = Field(
        None, description="vLLM's: what the reply has to be"
    )

    @model_validator(mode="after")
    def _one_structure(self) -> StructuredFields:
        if len(asking := list(self._structures)) > 1:
            named = " and ".join(f"`{name}`" for name in asking)
            raise BadRequest(
                f"A reply is held to one thing, not to {named}: leave out all but one.",
                param=asking[1].partition(".")[0],
            )
        return self

    @property
    def structure(self) -> StructuredOutput | None:
        """As the runtime takes it; None for plain text."""
        return next(iter(self._structures.values()), None)

    @property
    def _structures(self) -> dict[str, StructuredOutput]:
        found = {
            name: StructuredOutput(**{kind: value}, param=name)
            for name, kind in FIELDS.items()
            if (value := getattr(self, name)) is not None
        }
        if self.response_format and (structure := self.response_format.structure):
            found["response_format"] = structure
        return found | (self.structured_outputs.structures if self.structured_outputs else {})


# ----------------------------------------------------------------------
# `tool_choice`: which of a request's tools its reply may call, or has to.


class _Form(BaseModel):
    model_config = ConfigDict(strict=True)


class FunctionNamed(_Form):
    name: FunctionName


class NamedTool(_Form):
    type: Literal["function"]
    function: FunctionNamed


class AllowedTools(_Form):
    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, fail_fast=True)


class AllowedChoice(_Form):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool | AllowedChoice,
    takes(
        '"none", "auto", "required", {"type": "function", "function": {"name": …}}, or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": …, "tools": […]}}'
    ),
]


def check(choice: ToolChoice | None, tools: Sequence[Tool] | None) -> None:
    """Refuse a choice among functions that the request does not define."""
    if choice == "required" and not tools:
        raise BadRequest('`tool_choice` "required" needs `tools`.', param="tool_choice")
    offered = {tool.function.name for tool in tools or ()}
    for name in _names(choice):
        if name not in offered:
            raise BadRequest(
                f"`tool_choice` names the function {name!r}, which is not among `tools`.",
                param="tool_choice",
            )


def tool_use(choice: ToolChoice | None, *, parallel: bool) -> ToolUse:
    """The choice as the runtime takes it."""
    match choice:
        case None:
            return ToolUse(parallel=parallel)
        case NamedTool():
            return ToolUse(choice="required", name=choice.function.name, parallel=parallel)
        case AllowedChoice():
            name = _only(choice)
            return ToolUse(choice=choice.allowed_tools.mode, name=name, parallel=parallel)
    return ToolUse(choice=choice, parallel=parallel)


def offered(choice: ToolChoice | None, tools: Sequence[Tool] | None) -> list[Tool]:
    """The tools that the prompt describes.

    Tools that are not allowed are left out, which changes the prompt. A single tool that has to be
    called is enforced by name instead, and the prompt stays the same.
    """
    if not isinstance(choice, AllowedChoice) or _only(choice):
        return list(tools or ())
    allowed = set(_names(choice))
    return [tool for tool in tools or () if tool.function.name in allowed]


def forces_call(choice: ToolChoice | None) -> bool:
    return tool_use(choice, parallel=True).choice == "required"


def _names(choice: ToolChoice | None) -> list[str]:
    match choice:
        case NamedTool():
            return [choice.function.name]
        case AllowedChoice():
            return [tool.function.name for tool in choice.allowed_tools.tools]
    return []


def _only(choice: AllowedChoice) -> str | None:
    """The one function that has to be called, where there is one."""
    names = set(_names(choice))
    single = len(names) == 1 and choice.allowed_tools.mode == "required"
    return names.pop() if single else None
