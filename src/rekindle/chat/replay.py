"""Replies that come back: recognised however a client writes them down, and put back as they were.

A client parses a reply's calls and writes them again in another order, with other blanks, and
leaves out what the model wrote for itself. What was said is the same; its bytes are not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from blake3 import blake3

from rekindle.chat.arguments import parse
from rekindle.chat.content import Message
from rekindle.chat.escaping import CLOSE, OPEN, unmark

CALL, SAID = "call:", "said:"  # a reply by the id of a call, or by all that was said up to it
REASONING = ("reasoning_content", "reasoning", "thinking")
ARGUMENTS_BACK, REASONING_BACK = "arguments", "reasoning"  # what can be put back


class Keys:
    """The keys that the replies of a conversation may be known by."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self.known: dict[int, list[str]] = {}  # by the place of a reply
        self._chain = Chain()
        for index, message in enumerate(messages):
            digest = self._chain.add(canonical(_said(message)))
            if message.get("role") == "assistant":
                self.known[index] = [*_ids(message), SAID + digest]

    def after(self, reply: Message) -> list[str]:
        """Those of one more reply."""
        return [*_ids(reply), SAID + self._chain.copy().add(canonical(_said(reply)))]


def same(sent: Message, delivered: Message) -> bool:
    """Whether a message says what was delivered; it may leave the reasoning out."""
    thought = _thought(sent)
    return _said(sent) == _said(delivered) and thought in ("", _thought(delivered))


def restored(
    sent: Message, delivered: Message, *, reasoning: bool = True
) -> tuple[Message, list[str]]:
    """A message with calls, its arguments and its reasoning as they were; and what that changed."""
    calls, was = list(_calls(sent)), list(_calls(delivered))
    done = []
    if list(map(_in_order, calls)) != list(map(_in_order, was)):
        calls = [_with_arguments(*pair) for pair in zip(calls, map(_written, was), strict=True)]
        done.append(ARGUMENTS_BACK)
    message = {**sent, "tool_calls": calls}
    if reasoning and _thought(delivered) and not _thought(sent):
        message["reasoning_content"] = delivered["reasoning_content"]
        done.append(REASONING_BACK)
    return message, done


def shows(body: bytes, delivered: Message) -> bool:
    """Whether a reply's place in a prompt shows all of it: a template may leave out reasoning, and
    may write what follows the first end token of a reply as another one."""
    text = unmark(body).decode(errors="replace")
    content, thought = _text(delivered), _thought(delivered)
    at = text.rfind(content)
    if at < 0 or thought not in text[:at] + "\0" + text[at + len(content) :]:
        return False
    at = 0
    for name in map(_name, _calls(delivered)):
        at = text.find(name, at)
        if at < 0:
            return False
        at += len(name)
    return True


class Ends:
    """Where replies end in marked bytes: at an end token that the template wrote."""

    def __init__(self, texts: Iterable[str]) -> None:
        ends = b"|".join(re.escape(text.encode()) for text in sorted(texts) if text) or rb"(?!)"
        self._pattern = re.compile(OPEN + b"[^" + CLOSE + b"]*" + CLOSE + b"|(" + ends + b")")

    def after(self, marked: bytes, at: int) -> int | None:
        """The first one from `at` on."""
        found = (match for match in self._pattern.finditer(marked, at) if match[1])
        return next((match.start() for match in found), None)


def canonical(value: Any) -> bytes:
    """One form for one value, in ASCII whatever it holds."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


class Chain:
    """The hash of each beginning of a list, as it grows."""

    def __init__(self) -> None:
        self._hasher = blake3()

    def add(self, part: bytes) -> str:
        # Framed by its length: ("ab", "c") and ("a", "bc") never meet.
        self._hasher.update(len(part).to_bytes(8, "big") + part)
        return self._hasher.hexdigest()

    def copy(self) -> Chain:
        other = Chain()
        other._hasher = self._hasher.copy()
        return other


def calls_said(message: Message) -> list[list[Any]]:
    """Name and arguments of each call, whatever its id and however its JSON is written."""
    return [[_name(call), _value(_written(call))] for call in _calls(message)]


def _said(message: Message) -> list[Any]:
    return [message.get("role"), _text(message), canonical(calls_said(message)).decode()]


def _ids(message: Message) -> Iterator[str]:
    ids = (call.get("id") for call in _calls(message) if isinstance(call, Mapping))
    return (CALL + id for id in ids if isinstance(id, str) and id)


def _calls(message: Message) -> Sequence[Any]:
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list | tuple) else ()


def _function(call: Any) -> Mapping[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    return function if isinstance(function, Mapping) else {}


def _name(call: Any) -> str:
    return str(_function(call).get("name", ""))


def _written(call: Any) -> Any:
    return _function(call).get("arguments", "")


def _in_order(call: Any) -> str:
    """A call's arguments as a template would print them."""
    arguments = _written(call)
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = parse(arguments or "{}")
    return json.dumps(arguments)


def _with_arguments(call: Any, arguments: Any) -> Any:
    return {**call, "function": {**_function(call), "arguments": arguments}}


def _value(arguments: Any) -> Any:
    """Arguments as a value; what is no JSON is told apart from a JSON string."""
    if isinstance(arguments, str):
        try:
            arguments = parse(arguments or "{}")
        except ValueError:
            return {"text": arguments}
    return [_number(arguments)]


def _number(value: Any) -> Any:
    """JSON knows one kind of number: JavaScript sends 1.0 back as 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {name: _number(each) for name, each in value.items()}
    return [_number(each) for each in value] if isinstance(value, list) else value


def _text(message: Message) -> str:
    """What is written in a message's content, without the blanks around it."""
    content = message.get("content")
    if isinstance(content, list):
        texts = (part.get("text") for part in content if isinstance(part, Mapping))
        content = "\n".join(text for text in texts if isinstance(text, str))
    return content.strip() if isinstance(content, str) else ""


def _thought(message: Message) -> str:
    thought = next((message[name] for name in REASONING if message.get(name)), "")
    return thought.strip() if isinstance(thought, str) else ""
