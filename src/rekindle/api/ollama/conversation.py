"""Messages of Ollama's API as those that templates read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import ValidationError

from rekindle.api.message import Message
from rekindle.api.ollama.schema import OllamaGenerateRequest, OllamaMessage
from rekindle.api.validation import explain

CALL_ID_DIGITS = 9  # Mistral's templates refuse any other length


def messages_of(sent: Sequence[OllamaMessage]) -> list[Message]:
    """Ollama's calls have no ids, and results follow in the order of the calls: so each gets its
    number, which is the same in every later turn."""
    called = _ids()
    answered = _ids()
    try:
        return [_message(each, called, answered) for each in sent]
    except ValidationError as error:  # of what our own messages cannot be
        raise explain(error.errors()) from None


def prompt_messages(body: OllamaGenerateRequest) -> list[Message]:
    """The conversation that a prompt of /api/generate begins."""
    system = [_plain("system", body.system)] if body.system else []
    user = OllamaMessage(role="user", content=body.prompt, images=body.images)
    return [*system, *messages_of([user])]


def user_message(text: str) -> Message:
    return _plain("user", text)


def reply_message(text: str) -> Message:
    return _plain("assistant", text)


def _plain(role: str, text: str) -> Message:
    return Message.model_validate({"role": role, "content": text})


def _ids() -> Iterator[str]:
    return (f"{number:0{CALL_ID_DIGITS}d}" for number in range(10**CALL_ID_DIGITS))


def _message(sent: OllamaMessage, called: Iterator[str], answered: Iterator[str]) -> Message:
    fields: dict[str, Any] = {"role": sent.role, "content": _content(sent)}
    if sent.thinking:
        fields["reasoning_content"] = sent.thinking
    if sent.tool_calls:
        fields["tool_calls"] = [
            {"id": next(called), "type": "function", "function": call.function.model_dump()}
            for call in sent.tool_calls
        ]
    if sent.role == "tool":
        fields["tool_call_id"] = next(answered)
        if sent.tool_name:
            fields["name"] = sent.tool_name
    return Message.model_validate(fields)


def _content(sent: OllamaMessage) -> str | list[dict[str, Any]]:
    """Pictures come before the text, as Ollama shows them to a model."""
    if not sent.images:
        return sent.content
    pictures = [{"type": "image_url", "image_url": _url(image)} for image in sent.images]
    return [*pictures, {"type": "text", "text": sent.content}]


def _url(image: str) -> str:
    """Ollama sends the Base64 alone; which kind of picture it is, its bytes tell."""
    return image if image.startswith("data:") else f"data:image/png;base64,{image}"
