"""A message of a conversation in OpenAI's form, as chat and cache endpoints take it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from rekindle.api.base.fields import WHOLE, Id, bounded_text, fault, shallow, takes
from rekindle.errors import Unsupported
from rekindle.media.jobs import LIMITS, Sizing
from rekindle.media.loader import FrameSampling, MediaSource
from rekindle.protocol.media import IMAGE, TEXT

# ----------------------------------------------------------------------
# Pictures and videos as parts of a message's content, in OpenAI's form and in a plain one.

MOST_SIDE = 2048  # of a picture as the model gets it, in pixels
LOW_SIDE = 512  # with `detail: low`
FRAME_SIDE = 768  # of a frame of a video
MOST_FPS = 30.0
FPS = 1.0
FRAMES = 16
VIDEO = "video"  # in messages, until its frames are known
MEDIA_PARTS = '`"type": "image_url"` or `"type": "video_url"`'

Detail = Literal["auto", "low", "high"]
Side = Annotated[int, Field(ge=1, le=MOST_SIDE), WHOLE]
Resize = Annotated[
    list[Side],
    Field(min_length=1, max_length=2),
    takes(f"one side or [width, height] in pixels, each from 1 to {MOST_SIDE}"),
]


class ImageUrl(BaseModel):
    model_config = ConfigDict(strict=True)

    url: str
    detail: Detail | None = None


class ImagePart(BaseModel):
    """`image_url` is an http(s) or `data:` URL."""

    model_config = ConfigDict(strict=True)

    type: Literal["image", "image_url"]
    image_url: Annotated[
        str | ImageUrl, takes("a URL, or an object with a `url` and a `detail`: auto, low or high")
    ]
    detail: Detail | None = None

    def rendered(self) -> dict[str, Any]:
        return {"type": IMAGE}

    def source(self, where: str, resize: list[int] | None) -> MediaSource:
        given = ImageUrl(url=self.image_url) if isinstance(self.image_url, str) else self.image_url
        low = (given.detail or self.detail) == "low"
        return MediaSource(
            url=given.url, sizing=_sizing(resize, LOW_SIDE if low else MOST_SIDE), where=where
        )


class VideoUrl(BaseModel):
    model_config = ConfigDict(strict=True)

    url: str


class VideoPart(BaseModel):
    """Frames at equal distances: `fps` for each second, but not more than `max_frames`."""

    model_config = ConfigDict(strict=True)

    type: Literal["video", "video_url"]
    video_url: Annotated[str | VideoUrl, takes("a URL, or an object with a `url`")]
    fps: float | None = Field(None, gt=0, le=MOST_FPS)
    max_frames: Annotated[int, Field(ge=1, le=LIMITS.images), WHOLE] | None = None

    def rendered(self) -> dict[str, Any]:
        return {"type": VIDEO}

    def source(self, where: str, resize: list[int] | None) -> MediaSource:
        url = self.video_url if isinstance(self.video_url, str) else self.video_url.url
        sampling = FrameSampling(fps=self.fps or FPS, max_frames=self.max_frames or FRAMES)
        return MediaSource(
            url=url, sizing=_sizing(resize, FRAME_SIDE), sampling=sampling, where=where
        )


def _sizing(resize: list[int] | None, longest: int) -> Sizing:
    """One number is both sides; `resize` wins over `detail`."""
    return Sizing(longest, (resize[0], resize[-1]) if resize else None)


MOST_MESSAGES = 20_000
MOST_PARTS = 20_000  # of content, and calls, in all messages together
NOT_SERVED = ("input_audio", "file", "input_image")  # types of content parts
# Fields of replies that clients send back with them, and that no template reads.
REPLY_ONLY = ("refusal", "annotations", "parsed")
# The fields that a message needs beside its role.
NEEDED = {
    "system": ("content",),
    "developer": ("content",),
    "user": ("content",),
    "assistant": (),
    "tool": ("content", "tool_call_id"),
}
CONTENT = f'takes a string, or a list of parts: `"type": "text"` with a `text`, {MEDIA_PARTS}'
LEGACY = {"function_call": "use `tool_calls`", "audio": "send text"}


class TextPart(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["text"]
    text: str

    def rendered(self) -> dict[str, Any]:
        return {"type": TEXT, "text": self.text}


def _explained(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """One sentence: about the field of a picture or video that is wrong, or about all it takes."""
    try:
        return handler(value)
    except ValidationError as error:
        for each in error.errors():
            match each["loc"]:
                case (_, int() as place, "image" | "image_url" | "video" | "video_url", field, *_):
                    raise ValueError(f"part {place}: `{field}` {fault(each)}") from None
        raise ValueError(CONTENT) from None


Part = Annotated[TextPart | ImagePart | VideoPart, Field(discriminator="type")]
Content = Annotated[
    str | Annotated[list[Part], Field(fail_fast=True)],
    WrapValidator(_explained),
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
    """A call of an earlier reply; fields that clients add (`index`, …) are dropped."""

    model_config = ConfigDict(strict=True)

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, data: Any) -> Any:
        return _without_nulls(data) if isinstance(data, dict) else data


class Message(BaseModel):
    """One message; unknown fields are passed on, the template may read them."""

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
        _refuse_parts(data.get("content"))
        _refuse_legacy(data)
        return _known_fields(data)

    @model_validator(mode="after")
    def _has_fields_of_its_role(self) -> Message:
        for name in NEEDED[self.role]:
            if getattr(self, name) is None:
                raise ValueError(f"needs `{name}`, as every {self.role} message does")
        if self.role == "assistant" and self.media:
            raise ValueError("takes text alone as content, as every assistant message does")
        if self.model_extra:
            shallow(self.model_extra)
        return self

    @property
    def media(self) -> list[tuple[int, ImagePart | VideoPart]]:
        """The pictures and videos, each with its place in the content."""
        parts = self.content if isinstance(self.content, list) else []
        return [(at, part) for at, part in enumerate(parts) if not isinstance(part, TextPart)]

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """A form for each role, with the fields that it needs."""
        message = handler.resolve_ref_schema(handler(schema))
        properties = message.pop("properties")
        forms = [_form(role, needed, properties) for role, needed in NEEDED.items()]
        return {
            "title": message["title"],
            "description": message["description"],
            "oneOf": forms,
        }

    def rendered(self) -> dict[str, Any]:
        """What the template reads: the message as it was sent, without its id; where a picture
        or a video is, only that there is one."""
        if not isinstance(self.content, list):
            return self.model_dump(exclude_unset=True, exclude={"message_id"})
        fields = self.model_dump(exclude_unset=True, exclude={"message_id", "content"})
        return {**fields, "content": [part.rendered() for part in self.content]}


def bounded(messages: Any) -> Any:
    """Counted before the messages themselves are checked, which takes its time for each."""
    if not isinstance(messages, list):
        return messages
    if len(messages) > MOST_MESSAGES:
        raise ValueError(f"takes at most {MOST_MESSAGES} items")
    fields = [each for each in messages if isinstance(each, dict)]
    contents = [each.get("content") for each in fields]
    parts = _parts(contents)
    found = len(parts) + len(_flat([each.get("tool_calls") for each in fields]))
    if found > MOST_PARTS:
        raise ValueError(
            f"may have at most {MOST_PARTS} content parts and tool calls together, not {found}"
        )
    bounded_text(contents + [part.get("text") for part in parts if isinstance(part, dict)])
    return messages


Messages = Annotated[list[Message], Field(fail_fast=True), BeforeValidator(bounded)]


def rendered(messages: list[Message]) -> list[dict[str, Any]]:
    return [message.rendered() for message in messages]


def _form(role: str, needed: tuple[str, ...], properties: dict[str, Any]) -> dict[str, Any]:
    """A message of one role, for the OpenAPI document; what it needs is not null."""
    own = {name: {**properties[name], "anyOf": _not_null(properties[name])} for name in needed}
    return {
        "type": "object",
        "properties": {**properties, "role": {"const": role, "type": "string"}, **own},
        "required": ["role", *needed],
        "additionalProperties": True,
    }


def _not_null(schema: dict[str, Any]) -> list[Any]:
    return [each for each in schema["anyOf"] if each != {"type": "null"}]


def _flat(lists: list[Any]) -> list[Any]:
    return [item for each in lists if isinstance(each, list) for item in each]


def _parts(contents: list[Any]) -> list[Any]:
    """With those inside of others: what a tool returned is such a part in Anthropic's form."""
    parts, within = list[Any](), _flat(contents)
    while within:
        parts += within
        within = _flat([part.get("content") for part in within if isinstance(part, dict)])
    return parts


def _refuse_parts(content: Any) -> None:
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in NOT_SERVED:
            raise Unsupported(
                f"content parts of type {kind!r} are not supported: send `text`, {MEDIA_PARTS}",
                param="messages",
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


def _known_fields(data: dict[str, Any]) -> dict[str, Any]:
    """Without empty fields: a template that tests whether a field is defined would be misled."""
    fields = {
        name: value
        for name, value in data.items()
        if name == "content" or (value is not None and name not in REPLY_ONLY)
    }
    if fields.get("tool_calls") == []:
        del fields["tool_calls"]
    if "reasoning" in fields:
        reasoning = fields.pop("reasoning")
        fields["reasoning_content"] = fields.get("reasoning_content") or reasoning
    return fields


def _without_nulls(data: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in data.items() if value is not None}
