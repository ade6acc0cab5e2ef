"""Defines the request fields that several dialects share, each with one sentence per error."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from rekindle.errors import BadRequest
from rekindle.protocol.requests import depth_exceeds, levels
from rekindle.protocol.settings import Normaliser

MAX_ITEMS = 20_000  # messages, or content parts, in one request
MAX_INPUTS = 2048  # of a request for embeddings or scores
MAX_STOPS = 16
MAX_STOP_TOKENS = 256
MAX_ID_CHARACTERS = 256
MAX_TOKENS = 10_000_000
MAX_CHARACTERS = 16 << 20  # of a prompt; four million tokens rarely have more
NO_LIMIT = -1  # a number of tokens, as in llama.cpp's API
INT64_LIMIT = 1 << 63


class StrictModel(BaseModel):
    """Validates types strictly and ignores unknown fields."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())


def explained(describe: Callable[[ValidationError], str]) -> WrapValidator:
    """Report one error for a union or a list. Pydantic would report one for each branch."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            raise ValueError(describe(error)) from None

    return WrapValidator(check)


def takes(what: str) -> WrapValidator:
    return explained(lambda _error: f"takes {what}")


def at_most(count: int, what: str = "items") -> BeforeValidator:
    """Limit the length of a list before its items are validated, which takes time for each."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > count:
            raise ValueError(f"takes at most {count} {what}")
        return value

    return BeforeValidator(check)


def _tool_name(max_characters: int) -> BeforeValidator:
    pattern = re.compile(rf"[a-zA-Z0-9_.-]{{1,{max_characters}}}")
    what = f"a name of 1 to {max_characters} letters, digits, dots, dashes and underscores"

    def check(value: Any) -> Any:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise ValueError(f"takes {what}")
        return value

    return BeforeValidator(check)


def _as_whole(number: Any) -> Any:
    """Accept 8.0 as 8: JSON has one kind of number."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _positive(limit: int) -> int:
    if limit < 1 and limit != NO_LIMIT:
        raise ValueError(f"takes a number from 1 up, or {NO_LIMIT} for no limit")
    return limit


def limit_depth(value: Any) -> Any:
    """Refuse free-form JSON that is nested too deep. A thousand levels would exhaust the stack."""
    if depth_exceeds(value, max_depth := 64):
        raise ValueError(f"may be nested at most {max_depth} deep")
    return value


def count_characters(value: Any) -> int:
    """Count the characters of all strings in JSON, field names included."""
    return sum(_own_characters(each) for level in levels(value) for each in level)


def _own_characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    return sum(map(len, value)) if isinstance(value, dict) else 0


def limit_text(values: Any) -> Any:
    """Refuse a text, or a list of texts, that is longer than any prompt can be."""
    texts = values if isinstance(values, list) else [values]
    found = sum(len(text) for text in texts if isinstance(text, str))
    if found > MAX_CHARACTERS:
        raise ValueError(f"may have at most {MAX_CHARACTERS} characters of text, not {found}")
    return values


def limit_inputs(inputs: Any) -> Any:
    """Count the inputs before they are validated. A list of token ids is a single input."""
    is_list = isinstance(inputs, list) and not isinstance(next(iter(inputs), None), int)
    if is_list and len(inputs) > MAX_INPUTS:
        raise ValueError(f"takes at most {MAX_INPUTS} inputs, not {len(inputs)}")
    return inputs


def as_prompts(value: Any) -> list[str | list[int]]:
    """Convert a `PromptInput` to a list. A single text or token list becomes a list of one."""
    is_one = isinstance(value, str) or (value and isinstance(value[0], int))
    return [value] if is_one else value


def refuse_empty(inputs: Any) -> Any:
    """Refuse a `PromptInput` without any prompt, and an empty list of tokens in it."""
    if inputs == [] or (isinstance(inputs, list) and [] in inputs):
        raise ValueError("takes at least one input, and at least one token in each list of tokens")
    return inputs


WHOLE = BeforeValidator(_as_whole)  # goes last: in front of the bounds it would hide them in docs
Count = Annotated[int, Field(ge=1, le=MAX_TOKENS), WHOLE]
# An id may have any characters. It is compared and hashed, and never becomes part of a path.
Id = Annotated[
    str,
    Field(min_length=1, max_length=MAX_ID_CHARACTERS),
    takes(f"a string of 1 to {MAX_ID_CHARACTERS} characters"),
]
FunctionName = Annotated[str, _tool_name(64)]  # in OpenAI's chat
ToolName = Annotated[str, _tool_name(128)]
Text = Annotated[str, BeforeValidator(limit_text)]
SessionNumber = Annotated[int, Field(gt=-INT64_LIMIT, lt=INT64_LIMIT)]
TokenLimit = Annotated[
    int,
    Field(le=MAX_TOKENS, json_schema_extra={"minimum": NO_LIMIT, "not": {"const": 0}}),
    AfterValidator(_positive),
    WHOLE,
]
StopText = Annotated[str, Field(min_length=1, max_length=1024)]
Stop = Annotated[
    StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)],
    takes(f"a string of 1 to 1024 characters, or a list of at most {MAX_STOPS} such strings"),
]
StopTokens = Annotated[
    list[int],
    Field(max_length=MAX_STOP_TOKENS, fail_fast=True),
    takes(f"a list of at most {MAX_STOP_TOKENS} token ids"),
]
Tokens = Annotated[list[int], Field(fail_fast=True)]
PromptInput = Annotated[
    str
    | Annotated[list[str], Field(fail_fast=True)]
    | Tokens
    | Annotated[list[Tokens], Field(fail_fast=True)],
    takes("a string, a list of strings, a list of token ids, or a list of such lists"),
    AfterValidator(refuse_empty),
    BeforeValidator(limit_text),
]
KvBits = Annotated[Literal[4, 8], WHOLE]
KvGroupSize = Annotated[
    int,
    Field(gt=0, multiple_of=8, le=MAX_TOKENS),
    takes("a positive number that 8 divides"),
    WHOLE,
]
KvStart = Annotated[int, Field(ge=0, le=MAX_TOKENS), WHOLE]
CacheRetention = Literal["in_memory", "in-memory", "24h"]
FreeObject = Annotated[dict[str, Any], Field(max_length=64), AfterValidator(limit_depth)]
PRIORITIES = {"low": -5, "normal": 0, "high": 5}
Priority = Annotated[
    int,
    Field(ge=-10, le=10),
    BeforeValidator(
        lambda value: PRIORITIES.get(value, value) if isinstance(value, str) else value
    ),
    takes('a whole number from -10 to 10, where higher goes first, or "low", "normal" or "high"'),
]
Normalise = Annotated[
    bool | Annotated[list[Normaliser], Field(max_length=len(get_args(Normaliser)))],
    takes(f"true, false or a list of {', '.join(get_args(Normaliser))}"),
]
PrefillProgress = Annotated[bool | Literal["comments"], takes('true, false or "comments"')]


def stop_list(stop: str | list[str] | None) -> list[str]:
    return [stop] if isinstance(stop, str) else list(stop or ())


@dataclass(slots=True)
class TextBudget:
    """Limits how much text the messages of one request may become.

    The size of the body does not limit it. A reference to a tool and compressed reasoning take a
    few bytes each and may expand to a long text.
    """

    left_characters: int = MAX_CHARACTERS
    param: str = "messages"  # the request field that holds the messages, for the error

    def take(self, text: str) -> str:
        """Count a text that becomes part of a message, and return it."""
        self.spend(len(text))
        return text

    def spend(self, characters: int) -> None:
        self.left_characters -= characters
        if self.left_characters < 0:
            raise BadRequest(
                f"`{self.param}` may expand to at most {MAX_CHARACTERS} characters of text, "
                "including referenced tools and packed reasoning: send less.",
                param=self.param,
            )


#: What a field takes, by the type of pydantic's error.
TAKES = {
    "float_type": "a number",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "literal_error": "{expected}",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "a number from {ge} up",
    "less_than": "a number below {lt}",
    "less_than_equal": "a number up to {le}",
    "too_long": "at most {max_length} items",
    "too_short": "at least {min_length} item",
    "string_too_long": "at most {max_length} characters",
    "string_too_short": "at least {min_length} character",
}
JSON_NAMES = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a decimal number",
    type(None): "null",
}


def _pairs(metadata: dict[str, str]) -> dict[str, str]:
    if len(metadata) > 16 or any(
        len(name) > 64 or len(value) > 512 for name, value in metadata.items()
    ):
        raise ValueError("takes at most 16 names of 64 characters, with values of 512 characters")
    return metadata


Metadata = Annotated[
    dict[str, str], takes("an object whose values are strings"), AfterValidator(_pairs)
]


def explain(errors: Sequence[Mapping[str, Any]]) -> BadRequest:
    """Describe the first of pydantic's errors, with the field's path as the client wrote it."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return BadRequest(f"The body is not valid JSON: {first['ctx']['error']}.")
    path = [str(part) for part in first["loc"]]
    if path and path[0] in ("body", "query"):  # where FastAPI found the value
        del path[0]
    where = f"`{'.'.join(path)}`" if path else "The body"
    return BadRequest(f"{where} {fault(first)}.", param=path[0] if path else None)


def fault(error: Mapping[str, Any]) -> str:
    """Say what is wrong with a field; the sentence continues after the field's name."""
    kind = error["type"]
    context = error.get("ctx", {})
    if kind == "missing":
        return "is missing"
    if kind == "value_error":
        return str(context["error"])
    if kind not in TAKES:
        return str(error["msg"])
    takes = "takes " + TAKES[kind].format_map({name: _as_whole(context[name]) for name in context})
    if kind.endswith("_type") and (name := JSON_NAMES.get(type(error["input"]))):
        return f"{takes}, not {name}"
    return takes


def explain_items(what: str, otherwise: str) -> WrapValidator:
    """Report one error about the first wrong item of a list, called `what`, or else `otherwise`."""

    def describe(error: ValidationError) -> str:
        for each in error.errors():
            match each["loc"]:
                case (_, int() as place, *field):
                    named = f"`{field[-1]}` " if field else ""
                    return f"{what} {place}: {named}{fault(each)}"
        return otherwise

    return explained(describe)
