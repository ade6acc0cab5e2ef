"""Where a template takes system messages, and the nearest to them where it takes none.

Agents send them in mid-conversation. Templates differ: some render them where they are, some leave
them out or show them elsewhere, some fail. A message is never moved: at the top it would make the
prompt of every turn a new one (docs/decisions/0038-system-messages.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby

from rekindle.chat.capabilities.forms import NEEDLE, Render, attempt, text_only
from rekindle.chat.messages import SYSTEM_ROLES, Message

BETWEEN = "\n\n"  # two texts that become one message
_FIRST, _REPLY, _LAST = "probe-first", "probe-reply", "probe-last"


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


_SYSTEM = {"role": "system", "content": NEEDLE}
_LEADING = [_SYSTEM, _user(_LAST)]


class Form(Enum):
    """What a system message after the first message becomes."""

    AS_SENT = "a system message"
    USER = "a user message of its own"
    MERGED = "a part of the user message beside it"


@dataclass(frozen=True, slots=True)
class SystemMessages:
    """What a template takes."""

    leading: bool  # one at the beginning, if only to leave it out
    later: Form

    def adapt(self, messages: Sequence[Message]) -> list[Message]:
        """The conversation with its system messages in a form that the template renders."""
        is_first = bool(messages) and _is_system(messages[0])
        if not any(map(_is_system, messages[is_first:])):
            return list(messages) if self.leading or not is_first else _merged(messages)
        if self.later is Form.AS_SENT and self.leading:
            return list(messages)
        first, rest = _split(messages) if self.leading else ([], messages)
        if self.later is Form.MERGED or not self.leading:
            return [*first, *_merged(rest)]
        return [*first, *map(_as_user, rest)]


def probe(render: Render) -> SystemMessages:
    """What `render` shows in its place."""
    alone, with_system = (attempt(render, each) for each in ([_user(_LAST)], _LEADING))
    leading = with_system is not None or alone is None
    forms = (form for form in Form if _works(render, SystemMessages(leading=True, later=form)))
    return SystemMessages(leading, next(forms, Form.AS_SENT))


def _works(render: Render, tried: SystemMessages) -> bool:
    """Whether it shows a message before the last and one after it, each in its place."""
    begun = [_user(_FIRST), {"role": "assistant", "content": _REPLY}]
    before = attempt(render, tried.adapt([*begun, _SYSTEM, _user(_LAST)])) or ""
    after = attempt(render, tried.adapt([*begun, _user(_LAST), _SYSTEM])) or ""
    return _in_order(before, _REPLY, NEEDLE, _LAST) and _in_order(after, _REPLY, _LAST, NEEDLE)


def _in_order(text: str, *words: str) -> bool:
    places = [text.find(word) for word in words]
    return places[0] >= 0 and places == sorted(places)


def _split(messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """The system messages at the beginning as one, and the rest."""
    count = next((at for at, each in enumerate(messages) if not _is_system(each)), len(messages))
    if count < 2:
        return list(messages[:count]), list(messages[count:])
    return [{**messages[0], "content": _text(messages[:count])}], list(messages[count:])


def _merged(messages: Sequence[Message]) -> list[Message]:
    """Neighbouring messages of the system and of a user as one of the user's."""
    merged: list[Message] = []
    for is_input, group in groupby(messages, lambda each: _is_system(each) or _is_user(each)):
        run = list(group)
        if is_input and any(map(_is_system, run)):
            run = [{"role": "user", "content": _text(run)}]
        merged += run
    return merged


def _as_user(message: Message) -> Message:
    return {**message, "role": "user"} if _is_system(message) else message


def _text(messages: Iterable[Message]) -> str:
    return BETWEEN.join(text_only(each.get("content")) for each in messages)


def _is_system(message: Message) -> bool:
    return message.get("role") in SYSTEM_ROLES


def _is_user(message: Message) -> bool:
    return message.get("role") == "user"
