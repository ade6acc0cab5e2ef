"""`response_format`: what a reply's text has to be."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from rekindle.api.fields import FunctionName, shallow, takes
from rekindle.protocol.requests import StructuredOutput

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
