"""What a reply's text has to be: OpenAI's, vLLM's and llama.cpp's fields, all of them enforced."""

from __future__ import annotations

from typing import Annotated, Any

import orjson
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from rekindle.api.openai.response_format import ResponseFormat, Schema
from rekindle.errors import BadRequest, Unsupported
from rekindle.protocol.requests import StructuredOutput

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
