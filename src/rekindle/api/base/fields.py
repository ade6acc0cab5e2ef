"""Types of request fields that several endpoints use, each with one error sentence."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from rekindle.errors import BadRequest
from rekindle.protocol.nesting import depth_exceeds, levels
from rekindle.protocol.settings import Normaliser

MOST_STOPS = 16
MOST_STOP_CHARACTERS = 1024
MOST_BIASES = 1024
MOST_BIAS = 100
MOST_DIGITS = 10  # of a token id
MOST_ID_CHARACTERS = 256
MOST_PRIORITY = 10
PRIORITIES = {"low": -5, "normal": 0, "high": 5}
NUMBER_LIMIT = 1 << 63  # of a signed 64-bit number
MOST_TOKENS = 10_000_000
NO_LIMIT = -1  # as a number of tokens, in llama.cpp's API as well
MOST_CHARACTERS = 16 << 20  # of a prompt: as many as four million tokens have, or more
MOST_DEPTH = 64  # of JSON that is passed on as it is; a thousand levels would exhaust the stack


def takes(what: str) -> WrapValidator:
    """One error for a whole union, where pydantic reports one for each of its branches."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("takes", "takes {what}", {"what": what}) from None

    return WrapValidator(check)


def _named(most: int) -> WrapValidator:
    """A name of so many characters at most, as tools have it."""
    pattern = re.compile(rf"[a-zA-Z0-9_.-]{{1,{most}}}")
    what = f"a name of 1 to {most} letters, digits, dots, dashes and underscores"

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise PydanticCustomError("takes", "takes {what}", {"what": what})
        return handler(value)

    return WrapValidator(check)


FunctionName = Annotated[str, _named(64)]  # in OpenAI's chat
ToolName = Annotated[str, _named(128)]


def _few(value: Any) -> Any:
    """Counted before the values are checked: a million wrong values are one error."""
    if isinstance(value, dict) and len(value) > MOST_BIASES:
        raise ValueError(f"takes at most {MOST_BIASES} tokens")
    return value


def _check_biases(biases: dict[str, float]) -> dict[str, float]:
    for token, bias in biases.items():
        if not (token.isascii() and token.isdecimal() and len(token) <= MOST_DIGITS):
            raise ValueError(f"takes token ids as keys, not {token[:32]!r}")
        if not -MOST_BIAS <= bias <= MOST_BIAS:
            raise ValueError(f"takes biases from -{MOST_BIAS} to {MOST_BIAS}")
    return biases


def _as_number(priority: Any) -> Any:
    return PRIORITIES.get(priority, priority) if isinstance(priority, str) else priority


def _as_whole(number: Any) -> Any:
    """JSON has one kind of number: 8.0 is 8."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _positive(limit: int) -> int:
    if limit < 1 and limit != NO_LIMIT:
        raise ValueError(f"takes a number from 1 up, or {NO_LIMIT} for no limit")
    return limit


def shallow(value: Any) -> Any:
    """Refuse JSON of the client's own choosing that is nested too deep."""
    if depth_exceeds(value, MOST_DEPTH):
        raise ValueError(f"may be nested at most {MOST_DEPTH} deep")
    return value


def characters(value: Any) -> int:
    """The text in JSON, the names of its fields included."""
    return sum(_own_characters(each) for level in levels(value) for each in level)


def bounded_text(values: Any) -> Any:
    """Refuse a list of more text, or a text, than any prompt can be made of."""
    texts = values if isinstance(values, list) else [values]
    found = sum(len(text) for text in texts if isinstance(text, str))
    if found > MOST_CHARACTERS:
        raise ValueError(f"may have at most {MOST_CHARACTERS} characters of text, not {found}")
    return values


def _own_characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    return sum(map(len, value)) if isinstance(value, dict) else 0


# Any characters are allowed: an id is compared and hashed, and is never part of a path.
Id = Annotated[
    str,
    Field(min_length=1, max_length=MOST_ID_CHARACTERS),
    takes(f"a string of 1 to {MOST_ID_CHARACTERS} characters"),
]
SessionNumber = Annotated[int, Field(gt=-NUMBER_LIMIT, lt=NUMBER_LIMIT)]
WHOLE = BeforeValidator(_as_whole)  # behind the bounds, which would not be documented else
Seed = Annotated[int, Field(ge=-NUMBER_LIMIT, lt=NUMBER_LIMIT), WHOLE]
TokenLimit = Annotated[
    int,
    Field(le=MOST_TOKENS, json_schema_extra={"minimum": NO_LIMIT, "not": {"const": 0}}),
    AfterValidator(_positive),
    WHOLE,
]
StopText = Annotated[str, Field(min_length=1, max_length=MOST_STOP_CHARACTERS)]
Stop = Annotated[
    StopText | Annotated[list[StopText], Field(max_length=MOST_STOPS)],
    takes(
        f"a string of 1 to {MOST_STOP_CHARACTERS} characters, or a list of at most {MOST_STOPS} "
        "such strings"
    ),
]
LogitBias = Annotated[
    dict[str, float],
    Field(max_length=MOST_BIASES),
    AfterValidator(_check_biases),
    BeforeValidator(_few),
]
Texts = Annotated[list[str], Field(fail_fast=True)]
Tokens = Annotated[list[int], Field(fail_fast=True)]
PromptInput = Annotated[
    str | Texts | Tokens | Annotated[list[Tokens], Field(fail_fast=True)],
    takes("a string, a list of strings, a list of token ids, or a list of such lists"),
    BeforeValidator(bounded_text),
]


def as_prompts(value: Any) -> list[str | list[int]]:
    """A PromptInput as a list: one text, or one list of token ids, is a list of one."""
    is_one = isinstance(value, str) or (value and isinstance(value[0], int))
    return [value] if is_one else value


KvBits = Annotated[Literal[4, 8], WHOLE]
KvGroupSize = Annotated[
    int,
    Field(gt=0, multiple_of=8, le=MOST_TOKENS),
    takes("a positive number that 8 divides"),
    WHOLE,
]
KvStart = Annotated[int, Field(ge=0, le=MOST_TOKENS), WHOLE]
FreeObject = Annotated[dict[str, Any], Field(max_length=64), AfterValidator(shallow)]
Priority = Annotated[
    int,
    Field(ge=-MOST_PRIORITY, le=MOST_PRIORITY),
    BeforeValidator(_as_number),
    takes(
        f"a whole number from -{MOST_PRIORITY} to {MOST_PRIORITY}, higher going first, "
        'or "low", "normal" or "high"'
    ),
]
Normalise = Annotated[
    bool | Annotated[list[Normaliser], Field(max_length=len(get_args(Normaliser)))],
    takes(f"true, false or a list of {', '.join(get_args(Normaliser))}"),
]
PrefillProgress = Annotated[bool | Literal["comments"], takes('true, false or "comments"')]


# ----------------------------------------------------------------------
# How much text the messages of one request may become.


class TextAllowance:
    """Of one request: a few bytes of it may stand for much, as those of a reference to a tool and
    of a packed text do."""

    def __init__(self, characters: int = MOST_CHARACTERS, *, param: str = "messages") -> None:
        """`param`: the request's field that has the messages."""
        self._param = param
        self._left = characters

    def take(self, text: str) -> str:
        """A text that becomes part of a message."""
        self.spend(len(text))
        return text

    def spend(self, characters: int) -> None:
        self._left -= characters
        if self._left < 0:
            raise BadRequest(
                f"`{self._param}` may become at most {MOST_CHARACTERS} characters of text, with "
                "the tools that are referred to and the reasoning that is packed in it: send less.",
                param=self._param,
            )


# ----------------------------------------------------------------------
# A validation error as one sentence that names the field and what it takes.

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
SOURCES = ("body", "query")  # where FastAPI found the value
WRONG_TYPE = {name for name in TAKES if name.endswith("_type")}
JSON_NAMES = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a decimal number",
    type(None): "null",
}


def explain(errors: Sequence[Mapping[str, Any]]) -> BadRequest:
    """The first of pydantic's errors; the field's path is spelled as the client wrote it."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return BadRequest(f"The body is not valid JSON: {first['ctx']['error']}.")
    path = [str(part) for part in first["loc"]]
    if path and path[0] in SOURCES:
        del path[0]
    where = f"`{'.'.join(path)}`" if path else "The body"
    return BadRequest(f"{where} {fault(first)}.", param=path[0] if path else None)


def fault(error: Mapping[str, Any]) -> str:
    """What is wrong with a field, behind its name."""
    kind = error["type"]
    context = error.get("ctx", {})
    if kind == "missing":
        return "is missing"
    if kind == "value_error":
        return str(context["error"])
    if kind not in TAKES:
        return str(error["msg"])
    takes = "takes " + TAKES[kind].format_map({name: _plain(context[name]) for name in context})
    if kind in WRONG_TYPE and (name := JSON_NAMES.get(type(error["input"]))):
        return f"{takes}, not {name}"
    return takes


def fault_among(error: ValidationError, what: str, otherwise: str) -> str:
    """One sentence about the first item of a list that is wrong, called `what`, or `otherwise`."""
    for each in error.errors():
        match each["loc"]:
            case (_, int() as place, *field) if field:
                return f"{what} {place}: `{field[-1]}` {fault(each)}"
            case (_, int() as place):
                return f"{what} {place}: {fault(each)}"
    return otherwise


def _plain(value: Any) -> Any:
    """0.0 as 0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
