"""A message of a conversation, as chat requests and the cache's own endpoints take it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from rekindle.api.openai.fields import Id, shallow, takes
from rekindle.errors import Unsupported

MEDIA = ("image", "image_url", "video", "video_url", "input_audio", "file")
# What clients send back of a reply, and what says nothing to a model.
ANSWERS_ONLY = ("refusal", "annotations", "parsed")
LEGACY = {"function_call": "use `tool_calls`", "audio": "send text"}


class TextPart(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["text"]
    text: str


Content = Annotated[
    str | Annotated[list[TextPart], Field(fail_fast=True)],
    takes('a string, or a list of parts with `"type": "text"` and a `text`'),
]
Arguments = Annotated[
    str | dict[str, Any], takes("a string of JSON, or an object"), AfterValidator(shallow)
]


class CalledFunction(BaseModel):
    model_config = ConfigDict(strict=True)

    name: str
    arguments: Arguments

    @model_validator(mode="before")
    @classmethod
    def _has_arguments(cls, data: Any) -> Any:
        return {"arguments": "{}", **_without_nulls(data)} if isinstance(data, dict) else data


class ToolCall(BaseModel):
    """A call of an earlier reply; what clients add to it (`index`, …) is left out."""

    model_config = ConfigDict(strict=True)

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, data: Any) -> Any:
        return _without_nulls(data) if isinstance(data, dict) else data


class Message(BaseModel):
    """One message; fields the template may know are passed on as they are."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    message_id: Id | None = None

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        _refuse_media(data.get("content"))
        _refuse_legacy(data)
        return _said(data)

    @model_validator(mode="after")
    def _has_what_its_role_needs(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"needs `content`, as every {self.role} message does")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("needs `tool_call_id`, as every tool message does")
        shallow(self.model_extra)
        return self

    def rendered(self) -> dict[str, Any]:
        """What the template sees: the message as it was sent, without its id."""
        return self.model_dump(exclude_unset=True, exclude={"message_id"})


Messages = Annotated[list[Message], Field(fail_fast=True)]


def rendered(messages: list[Message]) -> list[dict[str, Any]]:
    return [message.rendered() for message in messages]


def _refuse_media(content: Any) -> None:
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in MEDIA:
            raise Unsupported(
                f"content parts of type {kind!r} are not supported: send text", param="messages"
            )


def _refuse_legacy(data: dict[str, Any]) -> None:
    if data.get("role") == "function":
        raise Unsupported(
            "messages of the role 'function' are not supported: send `tools`, and what a tool "
            "returned in a message of the role 'tool'",
            param="messages",
        )
    for name, instead in LEGACY.items():
        if data.get(name) is not None:
            raise Unsupported(
                f"`{name}` of a message is not supported: {instead}", param="messages"
            )


def _said(data: dict[str, Any]) -> dict[str, Any]:
    """Without what says nothing: a template that asks whether a field is there would be misled."""
    told = {
        name: value
        for name, value in data.items()
        if name == "content" or (value is not None and name not in ANSWERS_ONLY)
    }
    if told.get("tool_calls") == []:
        del told["tool_calls"]
    if "reasoning" in told:
        reasoning = told.pop("reasoning")
        told["reasoning_content"] = told.get("reasoning_content") or reasoning
    return told


def _without_nulls(data: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in data.items() if value is not None}
