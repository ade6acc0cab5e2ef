"""A message of a conversation, as chat requests and the cache's own endpoints take it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rekindle.api.fields import Id, shallow, takes
from rekindle.errors import Unsupported


class TextPart(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["text"]
    text: str


Content = Annotated[
    str | Annotated[list[TextPart], Field(fail_fast=True)],
    takes('a string, or a list of parts with `"type": "text"` and a `text`'),
]


class Message(BaseModel):
    """One message; fields the template may know are passed on as they are."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    message_id: Id | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_media(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("content"), list):
            for part in data["content"]:
                kind = part.get("type") if isinstance(part, dict) else None
                if kind in ("image", "image_url", "video", "video_url", "input_audio", "file"):
                    raise Unsupported(
                        f"content parts of type {kind!r} are not supported: send text",
                        param="messages",
                    )
        return data

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"needs `content`, as every {self.role} message does")
        shallow(self.model_extra)
        return self

    def rendered(self) -> dict[str, Any]:
        """What the template sees: the message as it was sent, without its id."""
        return self.model_dump(exclude_unset=True, exclude={"message_id"})


Messages = Annotated[list[Message], Field(fail_fast=True)]


def rendered(messages: list[Message]) -> list[dict[str, Any]]:
    return [message.rendered() for message in messages]
