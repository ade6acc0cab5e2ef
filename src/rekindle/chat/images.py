"""Pictures in messages: parts that name one by its digest, and their place in a rendered prompt.

A template never sees a picture. It renders a placeholder, which no user can write (escaping.py), as
it renders text; the picture's tokens take its place. So every template works, whether it knows of
pictures or not, and what a model has around a picture is what its projector says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rekindle.chat.capabilities.forms import text_only
from rekindle.chat.escaping import spans_from
from rekindle.chat.messages import Message
from rekindle.errors import BadRequest
from rekindle.protocol.media import IMAGE, count_images
from rekindle.tokens import Tokens

SEPARATOR = "\n"  # between two texts; next to a picture there is nothing


def picture_text(digest: str) -> str:
    """What stands for a picture in the text of a prompt."""
    return f"[image {digest}]"


def is_picture(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == IMAGE


def with_digests(
    messages: Sequence[dict[str, Any]], digests: Sequence[str]
) -> list[dict[str, Any]]:
    """The messages with each image part named by the digest of its picture."""
    left = iter(digests)

    def named(content: Any) -> Any:
        if not isinstance(content, list):
            return content
        return [{"type": IMAGE, "digest": next(left)} if is_picture(p) else p for p in content]

    parts = count_images(list(messages))
    if parts != len(digests):
        raise BadRequest(
            f"The messages have {parts} image parts, the request {len(digests)} pictures.",
            param="messages",
        )
    return [
        {**message, "content": named(message["content"])} if "content" in message else message
        for message in messages
    ]


def digests_of(content: Any) -> list[str]:
    """The pictures of one message's content."""
    parts = content if isinstance(content, list) else []
    return [part["digest"] for part in parts if is_picture(part) and "digest" in part]


def flattened(messages: Sequence[Message], place: Callable[[str], str]) -> list[Message]:
    """The messages whose content holds pictures with that content as one text, in which `place`
    says what stands for the picture of a digest."""
    return [
        {**message, "content": _flat(message["content"], place)}
        if digests_of(message.get("content"))
        else message
        for message in messages
    ]


def _flat(content: Sequence[Any], place: Callable[[str], str]) -> str:
    texts: list[str] = []
    was_text = False
    for part in content:
        if is_picture(part):
            texts.append(place(part["digest"]))
        else:
            texts += [SEPARATOR] if was_text else []
            texts.append(text_only([part]))
        was_text = not is_picture(part)
    return "".join(texts)


def extents(tokens: Tokens, pictures: Sequence[Tokens]) -> Iterator[tuple[int, int]]:
    """First token and end of each picture in a prompt, with what the model has around it."""
    spans = iter(tokens.media)
    for picture in pictures:
        first, *_ = (next(spans) for _ in picture.media)
        start = first.start - picture.media[0].start
        yield start, start + len(picture)


def pictures_in(
    tokens: Tokens, escaped: bytes, pictures: Mapping[str, Tokens]
) -> list[tuple[str, tuple[int, int]]]:
    """The pictures of a prompt by the texts that stand for them, each with its first token and its
    end."""
    if not tokens.media:
        return []
    named = [span.text for span in spans_from(escaped, 0) if span.picture]
    return list(zip(named, extents(tokens, [pictures[text] for text in named]), strict=True))
