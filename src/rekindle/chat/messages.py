"""Reads and compares chat messages in every form that clients send.

Content is a string, a list of parts or absent. Reasoning has several field names. The arguments of
a tool call are an object or a string of JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any, NoReturn

from rekindle.chat.escaping import unescape
from rekindle.errors import BadRequest, TemplateFailed
from rekindle.protocol.requests import IMAGE, count_images, depth_exceeds

Message = Mapping[str, Any]

DEVELOPER = "developer"
SYSTEM_ROLES = ("system", DEVELOPER)
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")  # in order of preference
ARGUMENTS_RESTORED, REASONING_RESTORED = "arguments", "reasoning"
SURROGATE_ESCAPE = "\\ud"  # the beginning of a surrogate's JSON escape


def is_system(message: Message) -> bool:
    return message.get("role") in SYSTEM_ROLES


def is_result(message: Message) -> bool:
    return message.get("role") == "tool"


def content_text(content: Any, separator: str = "\n") -> str:
    """The text of a message's content, with the text parts of a list joined."""
    if isinstance(content, list):
        texts = (part.get("text") for part in content if isinstance(part, Mapping))
        return separator.join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""


def text_only(content: Any) -> str:
    """Content as one text. Raises TemplateFailed for a part that is not text."""
    if not isinstance(content, list):
        return "" if content is None else str(content)
    for part in content:
        match part:
            case {"type": "text", "text": str()}:
                continue
            case {"type": str(kind)}:
                raise TemplateFailed(
                    f"This model's chat template accepts text only, not content of type '{kind}'."
                )
        raise TemplateFailed("Each content part needs a type, and a text part needs a text.")
    return content_text(content)


def with_text_after(message: Message, text: str) -> Message:
    return {**message, "content": content_text(message.get("content")) + text}


def reasoning(message: Message) -> Any:
    """The first reasoning field that is not empty, as the client sent it, or None."""
    return next((message[name] for name in REASONING_FIELDS if message.get(name)), None)


def reasoning_text(message: Message) -> str:
    text = reasoning(message)
    return text.strip() if isinstance(text, str) else ""


def is_picture(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == IMAGE


def picture_text(digest: str) -> str:
    return f"[image {digest}]"


def picture_digests(content: Any) -> list[str]:
    parts = content if isinstance(content, list) else []
    return [part["digest"] for part in parts if is_picture(part) and "digest" in part]


def with_digests(
    messages: Sequence[dict[str, Any]], digests: Sequence[str]
) -> list[dict[str, Any]]:
    """The messages with each image part replaced by the digest of its picture."""
    count = count_images(list(messages))
    if count != len(digests):
        raise BadRequest(
            f"The messages have {count} image parts, but the request has {len(digests)} pictures.",
            param="messages",
        )
    left = iter(digests)

    def named(content: Any) -> Any:
        if not isinstance(content, list):
            return content
        return [{"type": IMAGE, "digest": next(left)} if is_picture(p) else p for p in content]

    return [
        {**message, "content": named(message["content"])} if "content" in message else message
        for message in messages
    ]


def with_pictures_as_text(
    messages: Sequence[Message], place: Callable[[str], str]
) -> list[Message]:
    """The messages with every content that has pictures as one text.

    `place` converts the text of a picture into a placeholder. No template ever sees a picture, so
    every template works with pictures.
    """
    return [
        {**message, "content": _joined_parts(message["content"], place)}
        if picture_digests(message.get("content"))
        else message
        for message in messages
    ]


def _joined_parts(content: Sequence[Any], place: Callable[[str], str]) -> str:
    """Texts are separated by a line feed. A picture has no separator on either side."""
    texts: list[str] = []
    for are_pictures, parts in groupby(content, is_picture):
        if are_pictures:
            texts += [place(picture_text(part["digest"])) for part in parts]
        else:
            texts.append(text_only(list(parts)))
    return "".join(texts)


def tool_calls(message: Message) -> Sequence[Any]:
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list | tuple) else ()


def called_function(call: Any) -> Mapping[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    return function if isinstance(function, Mapping) else {}


def call_name(call: Any) -> str:
    return str(called_function(call).get("name", ""))


def call_values(message: Message) -> list[list[Any]]:
    """Name and arguments of each call, independent of its id and of how its JSON is formatted."""
    return [
        [call_name(call), _argument_value(called_function(call).get("arguments", ""))]
        for call in tool_calls(message)
    ]


def _argument_value(arguments: Any) -> Any:
    """A list with the JSON value, or an object for text that is not JSON."""
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments if arguments.strip() else "{}")
        except ValueError:
            return {"text": arguments}
    return [_converted(arguments, _whole_number)]


def _whole_number(value: Any) -> Any:
    """JSON has one kind of number, and JavaScript clients send 1.0 back as 1."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _converted(value: Any, convert: Callable[[Any], Any]) -> Any:
    """A copy of a JSON value with its keys and its scalars converted."""
    if isinstance(value, Mapping):
        return {convert(name): _converted(each, convert) for name, each in value.items()}
    if isinstance(value, list):
        return [_converted(each, convert) for each in value]
    return convert(value)


def with_parsed_arguments(message: Message) -> Message:
    """Parses the arguments of calls. Call it before escaping: JSON can escape a control token."""
    return with_arguments(message, as_object)


def with_arguments(message: Message, convert: Callable[[Any], Any]) -> Message:

    def converted_call(call: Any) -> Any:
        function = called_function(call)
        if "arguments" not in function:
            return call
        return {**call, "function": {**function, "arguments": convert(function["arguments"])}}

    calls = message.get("tool_calls")
    if not isinstance(calls, list | tuple):
        return message
    return {**message, "tool_calls": [converted_call(call) for call in calls]}


def as_object(arguments: Any) -> Any:
    """The JSON object in a string, {} for an empty string, and anything else unchanged."""
    if not isinstance(arguments, str):
        return arguments
    if not arguments.strip():
        return {}
    try:
        value = parse_json(arguments)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def same_message(sent: Message, original: Message) -> bool:
    """Whether role, text and calls are equal. The client may have dropped the reasoning."""

    def compared(message: Message) -> tuple[Any, str, bytes]:
        return message.get("role"), _stripped_text(message), canonical(call_values(message))

    is_same_reasoning = reasoning_text(sent) in ("", reasoning_text(original))
    return is_same_reasoning and compared(sent) == compared(original)


def restored(
    sent: Message, original: Message, *, reasoning: bool = True
) -> tuple[Message, list[str]]:
    """A sent message with the arguments and the reasoning of the original, and what changed.

    A client parses the calls and serialises them again. The meaning stays, the bytes differ.
    """
    changes = []
    calls, originals = list(tool_calls(sent)), list(tool_calls(original))
    if list(map(_printed_arguments, calls)) != list(map(_printed_arguments, originals)):
        arguments = [called_function(each).get("arguments", "") for each in originals]
        calls = [
            {**call, "function": {**called_function(call), "arguments": each}}
            for call, each in zip(calls, arguments, strict=True)
        ]
        changes.append(ARGUMENTS_RESTORED)
    message = {**sent, "tool_calls": calls}
    if reasoning and reasoning_text(original) and not reasoning_text(sent):
        message["reasoning_content"] = original["reasoning_content"]
        changes.append(REASONING_RESTORED)
    return message, changes


def _printed_arguments(call: Any) -> str:
    """A call's arguments as a template would print them."""
    arguments = called_function(call).get("arguments", "")
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = parse_json(arguments.strip() or "{}")
    return json.dumps(arguments)


def shows_whole(escaped: bytes, message: Message) -> bool:
    """Whether escaped bytes of a prompt contain the whole message.

    A template may omit the reasoning. It may also render the text after an end token inside the
    message as a message of its own.
    """
    rendered = unescape(escaped).decode(errors="replace")
    content, thoughts = _stripped_text(message), reasoning_text(message)
    at = rendered.rfind(content)
    if at < 0 or thoughts not in rendered[:at] + "\0" + rendered[at + len(content) :]:
        return False
    at = 0
    for name in map(call_name, tool_calls(message)):
        at = rendered.find(name, at)
        if at < 0:
            return False
        at += len(name)
    return True


def _stripped_text(message: Message) -> str:
    return content_text(message.get("content")).strip()


def canonical(value: Any) -> bytes:
    """JSON that is equal for equal values, in ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def dump_json(value: Any) -> str:
    """JSON as models write it."""
    return json.dumps(value, ensure_ascii=False)


def parse_json(text: str, depth_limit: int = 50) -> Any:
    """A JSON value that survives a round trip unchanged. Raises ValueError for anything else."""
    try:
        value = json.loads(text, parse_constant=refuse_constant, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    if depth_exceeds(value, depth_limit):
        raise ValueError("it is nested too deep")
    if SURROGATE_ESCAPE not in text.lower():
        return value
    return _converted(
        value, lambda each: without_surrogates(each) if isinstance(each, str) else each
    )


def refuse_constant(name: str) -> NoReturn:
    """For `json.loads`, which accepts NaN and Infinity by default."""
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number is too large")
    return number


def without_surrogates(text: str) -> str:
    """Joins surrogate pairs and replaces lone surrogates, because UTF-8 can encode neither."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
