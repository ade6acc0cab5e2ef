"""Validates the request fields that constrain the text of a reply: its format, or a grammar."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, model_validator

from rekindle.api.base.fields import FunctionName, StrictModel, limit_depth, takes
from rekindle.errors import BadRequest, Unsupported
from rekindle.protocol.requests import StructuredOutput

Schema = Annotated[
    dict[str, Any] | bool, takes("a JSON schema, which is an object"), AfterValidator(limit_depth)
]


class JsonSchema(StrictModel):
    name: FunctionName | None = None  # OpenAI requires it, and other servers do not
    schema_: Schema | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None  # the schema is enforced either way


class ResponseFormat(StrictModel):
    """OpenAI's three formats. Some clients send a schema with `json_object`."""

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
        """The constraint for the runtime, or None for plain text."""
        if self.type == "text":
            return None
        given = self.json_schema if self.type == "json_schema" else None
        return StructuredOutput(schema=given.schema_ if given else self.schema_)


MAX_GRAMMAR_CHARACTERS = 65_536  # and of all choices together
#: Request fields, and the field of StructuredOutput that each of them sets.
FIELDS = {
    "grammar": "grammar",
    "json_schema": "schema",
    "guided_json": "schema",
    "guided_regex": "regex",
    "guided_choice": "choices",
    "guided_grammar": "grammar",
}
PARTS = {"json": "schema", "regex": "regex", "choice": "choices", "grammar": "grammar"}
NO_EFFECT = ("disable_fallback", "backend", "_backend")  # there is only one backend
TAKES = (
    "`structured_outputs` takes an object with one of `json`, `regex`, `choice`, `grammar` and "
    "`json_object`"
)


def _parsed(schema: Any) -> Any:
    """Parse a schema that is a string, which vLLM accepts too."""
    if not isinstance(schema, str):
        return schema
    try:
        return orjson.loads(schema)
    except orjson.JSONDecodeError:
        return schema


def _short(choices: list[str]) -> list[str]:
    if sum(map(len, choices)) > MAX_GRAMMAR_CHARACTERS:
        raise ValueError(f"takes at most {MAX_GRAMMAR_CHARACTERS} characters in all")
    return choices


EMPTY_IS_NONE = BeforeValidator(lambda text: None if text == "" else text)  # as in llama.cpp
SchemaOrText = Annotated[Schema, BeforeValidator(_parsed)]
GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]
Regex = Annotated[str, Field(min_length=1, max_length=16_384)]
Choices = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    Field(min_length=1, max_length=1_000, fail_fast=True),
    AfterValidator(_short),
]


class StructuredOutputs(StrictModel):
    """vLLM's constraints. Exactly one is given."""

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
        found, param = {}, "structured_outputs"
        for name, kind in PARTS.items():
            if (value := getattr(self, "json_" if name == "json" else name)) is not None:
                found[f"{param}.{name}"] = StructuredOutput(**{kind: value}, param=param)
        if self.json_object:
            found[f"{param}.json_object"] = StructuredOutput(param=param)
        return found


class StructuredFields(BaseModel):
    """The request fields that constrain the text of a reply. At most one is given."""

    response_format: ResponseFormat | None = None
    grammar: Annotated[GrammarText | None, EMPTY_IS_NONE] = Field(
        None, description="llama.cpp: a GBNF or Lark grammar for the response"
    )
    json_schema: Schema | None = Field(
        None, description="llama.cpp: a JSON schema for the response"
    )
    guided_json: SchemaOrText | None = Field(
        None, description="vLLM: a JSON schema for the response"
    )
    guided_regex: Regex | None = Field(
        None, description="vLLM: a regular expression for the response"
    )
    guided_choice: Choices | None = Field(
        None, description="vLLM: the response is one of these texts"
    )
    guided_grammar: GrammarText | None = Field(
        None, description="vLLM: a GBNF or Lark grammar for the response"
    )
    structured_outputs: StructuredOutputs | None = Field(
        None, description="vLLM: one of the constraints above"
    )

    @model_validator(mode="after")
    def _one_structure(self) -> StructuredFields:
        if len(asking := list(self._structures)) > 1:
            named = " and ".join(f"`{name}`" for name in asking)
            raise BadRequest(
                f"A reply can have one constraint, not {named}: leave out all but one.",
                param=asking[1].partition(".")[0],
            )
        return self

    @property
    def structure(self) -> StructuredOutput | None:
        """The constraint for the runtime, or None for plain text."""
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
