"""Defines a chat message in OpenAI's form, which chat and cache endpoints take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from rekindle.api.base.custom_tools import custom_arguments
from rekindle.api.base.fields import (
    MAX_ITEMS,
    WHOLE,
    Id,
    StrictModel,
    explained,
    fault,
    limit_depth,
    limit_text,
    takes,
)
from rekindle.errors import Unsupported
from rekindle.media.jobs import LIMITS, FrameSampling, Sizing
from rekindle.media.loader import MediaSource
from rekindle.protocol.requests import IMAGE, TEXT

MAX_SIDE = 2048  # of an image as the model gets it, in pixels
VIDEO = "video"  # type of a part, until the video's frames are known
DOCUMENT = "document"  # type of a part, until its text is known
MEDIA_PARTS = '`"type": "image_url"`, `"type": "video_url"` or `"type": "file"`'

Detail = Literal["auto", "low", "high"]
Side = Annotated[int, Field(ge=1, le=MAX_SIDE), WHOLE]
Resize = Annotated[
    list[Side],
    Field(min_length=1, max_length=2),
    takes(f"one side or [width, height] in pixels, each from 1 to {MAX_SIDE}"),
]

NOT_SERVED = ("input_audio", "input_image")  # types of content parts
# The fields that a message of each role needs.
NEEDED = {
    "system": ("content",),
    "developer": ("content",),
    "user": ("content",),
    "assistant": (),
    "tool": ("content", "tool_call_id"),
}
CONTENT = f'takes a string, or a list of parts: `"type": "text"` with a `text`, {MEDIA_PARTS}'
LEGACY = {"function_call": "use `tool_calls`", "audio": "send text"}


class ImageUrl(StrictModel):
    url: str
    detail: Detail | None = None


class ImagePart(StrictModel):
    """`image_url` is an http(s) or `data:` URL."""

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
            url=given.url, sizing=_sizing(resize, 512 if low else MAX_SIDE), where=where
        )


class VideoUrl(StrictModel):
    url: str


class VideoPart(StrictModel):
    """A video is sampled at `fps` frames per second, up to `max_frames` frames."""

    type: Literal["video", "video_url"]
    video_url: Annotated[str | VideoUrl, takes("a URL, or an object with a `url`")]
    fps: float | None = Field(None, gt=0, le=30)
    max_frames: Annotated[int, Field(ge=1, le=LIMITS.images), WHOLE] | None = None

    def rendered(self) -> dict[str, Any]:
        return {"type": VIDEO}

    def source(self, where: str, resize: list[int] | None) -> MediaSource:
        url = self.video_url if isinstance(self.video_url, str) else self.video_url.url
        sampling = FrameSampling(fps=self.fps or 1.0, max_frames=self.max_frames or 16)
        return MediaSource(url=url, sizing=_sizing(resize, 768), sampling=sampling, where=where)


def as_url(data: str) -> str:
    """A `data:` URL. Some clients leave its beginning out."""
    return data if data[:5].lower() == "data:" else f"data:;base64,{data}"


class FileContent(StrictModel):
    file_data: str | None = Field(None, description="A PDF or a text, as a `data:` URL")
    file_url: str | None = Field(None, description="An http(s) URL of a PDF or a text")
    filename: str | None = Field(None, max_length=512)
    file_id: str | None = None

    @property
    def url(self) -> str:
        return as_url(self.file_data) if self.file_data is not None else self.file_url or ""

    @model_validator(mode="after")
    def _has_content(self) -> FileContent:
        if self.file_id is not None and not self.url:
            raise Unsupported(
                "uploaded files are not supported: send the file as `file_data`, a `data:` URL",
                param="messages",
            )
        if not self.url:
            raise ValueError("needs `file_data`, a `data:` URL with a PDF or a text")
        return self


class FilePart(StrictModel):
    """A PDF or a text. The model reads its text after its name."""

    type: Literal["file"]
    file: FileContent

    def rendered(self) -> dict[str, Any]:
        return {"type": DOCUMENT, "name": self.file.filename}

    def source(self, where: str, resize: list[int] | None) -> MediaSource:
        return MediaSource(url=self.file.url, is_document=True, where=where)


def file_part(url: str, name: str | None = None) -> FilePart:
    """Make a part out of fields that are already validated."""
    content = FileContent.model_construct(file_url=url, filename=name)
    return FilePart.model_construct(type="file", file=content)


def _sizing(resize: list[int] | None, longest: int) -> Sizing:
    """One number stands for both sides. `resize` wins over `detail`."""
    return Sizing(longest, (resize[0], resize[-1]) if resize else None)


class TextPart(StrictModel):
    type: Literal["text"]
    text: str

    def rendered(self) -> dict[str, Any]:
        return {"type": TEXT, "text": self.text}


def _content_fault(error: ValidationError) -> str:
    """Name the wrong field of an image or video, or say what content is in general."""
    for each in error.errors():
        match each["loc"]:
            case (
                _,
                int() as place,
                "image" | "image_url" | "video" | "video_url" | "file",
                field,
                *_,
            ):
                return f"part {place}: `{field}` {fault(each)}"
    return CONTENT


MediaPart = ImagePart | VideoPart | FilePart
Part = Annotated[TextPart | MediaPart, Field(discriminator="type")]
Content = Annotated[str | Annotated[list[Part], Field(fail_fast=True)], explained(_content_fault)]
Arguments = Annotated[
    str | dict[str, Any], takes("a string of JSON, or an object"), AfterValidator(limit_depth)
]


class CalledFunction(StrictModel):
    name: str
    arguments: Arguments

    @model_validator(mode="before")
    @classmethod
    def _has_arguments(cls, data: Any) -> Any:
        return {"arguments": "{}", **_without_nulls(data)} if isinstance(data, dict) else data


class ToolCall(StrictModel):
    """A call of an earlier reply. Fields that clients add, such as `index`, are dropped."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        plain, custom = _without_nulls(data), data.get("custom")
        if plain.get("type") != "custom" or not isinstance(custom, dict):
            return plain
        if not isinstance(custom.get("input"), str):
            raise ValueError("needs a text as the `input` of its `custom` tool")
        called = {"name": custom.get("name"), "arguments": custom_arguments(custom["input"])}
        return {**plain, "type": "function", "function": called}


class Message(StrictModel):
    """One message. It has the fields that chat templates read, and drops all others."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    message_id: Id | None = None
    name: str | None = None
    thinking: str | None = None

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
            raise ValueError("takes only text as content, as every assistant message does")
        return self

    @property
    def media(self) -> list[tuple[int, MediaPart]]:
        """The images, videos and files, each with its position in the content."""
        parts = self.content if isinstance(self.content, list) else []
        return [(at, part) for at, part in enumerate(parts) if not isinstance(part, TextPart)]

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Describe one form for each role, with the fields that it needs."""
        message = handler.resolve_ref_schema(handler(schema))
        properties = message.pop("properties")
        forms = [_form(role, needed, properties) for role, needed in NEEDED.items()]
        return {"title": cls.__name__, "description": message["description"], "oneOf": forms}

    def rendered(self) -> dict[str, Any]:
        """What the template reads: the message as sent, without its id and without media."""
        if not isinstance(self.content, list):
            return self.model_dump(exclude_unset=True, exclude={"message_id"})
        fields = self.model_dump(exclude_unset=True, exclude={"message_id", "content"})
        return {**fields, "content": [part.rendered() for part in self.content]}


def limit_messages(messages: Any) -> Any:
    """Count messages and parts before they are validated, which takes time for each."""
    if not isinstance(messages, list):
        return messages
    if len(messages) > MAX_ITEMS:
        raise ValueError(f"takes at most {MAX_ITEMS} items")
    fields = [each for each in messages if isinstance(each, dict)]
    contents = [each.get("content") for each in fields]
    parts = _parts(contents)
    found = len(parts) + len(_flat([each.get("tool_calls") for each in fields]))
    if found > MAX_ITEMS:
        raise ValueError(
            f"may have at most {MAX_ITEMS} content parts and tool calls together, not {found}"
        )
    limit_text(contents + [part.get("text") for part in parts if isinstance(part, dict)])
    return messages


Messages = Annotated[list[Message], Field(fail_fast=True), BeforeValidator(limit_messages)]


def plain_message(role: str, **fields: Any) -> Message:
    """Make a message out of fields that are already validated."""
    return Message.model_construct(role=role, **fields)


def reply_message(text: str, reasoning: str, calls: Sequence[ToolCall]) -> Message:
    """Make an earlier reply. A reply that has only calls has no content."""
    fields: dict[str, Any] = {"content": text or (None if calls else "")}
    if reasoning:
        fields["reasoning_content"] = reasoning
    if calls:
        fields["tool_calls"] = list(calls)
    return plain_message("assistant", **fields)


def tool_call(call_id: str, name: str, arguments: str | dict[str, Any]) -> ToolCall:
    """Make a call out of fields that are already validated."""
    function = CalledFunction.model_construct(name=name, arguments=arguments)
    return ToolCall.model_construct(id=call_id, type="function", function=function)


def rendered(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [message.rendered() for message in messages]


def _form(role: str, needed: tuple[str, ...], properties: dict[str, Any]) -> dict[str, Any]:
    """A message of one role, for the OpenAPI document. Needed fields are not null."""
    own = {}
    for name in needed:
        types = [each for each in properties[name]["anyOf"] if each != {"type": "null"}]
        own[name] = {**properties[name], "anyOf": types}
    return {
        "type": "object",
        "properties": {**properties, "role": {"const": role, "type": "string"}, **own},
        "required": ["role", *needed],
        "additionalProperties": True,
    }


def _flat(lists: list[Any]) -> list[Any]:
    return [item for each in lists if isinstance(each, list) for item in each]


def _parts(contents: list[Any]) -> list[Any]:
    """All parts, including nested ones: in Anthropic's form a tool result is a part with parts."""
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
            "messages of the role 'function' are not supported: send `tools`, and each tool result "
            "in a message of the role 'tool'",
            param="messages",
        )
    for name, instead in LEGACY.items():
        if data.get(name) is not None:
            raise Unsupported(
                f"`{name}` of a message is not supported: {instead}", param="messages"
            )


def _known_fields(data: dict[str, Any]) -> dict[str, Any]:
    """Drop empty fields: templates test whether a field is defined."""
    fields = {name: value for name, value in data.items() if name == "content" or value is not None}
    for name in ("name", "thinking"):  # some clients send an object, which no template reads
        if not isinstance(fields.get(name, ""), str):
            del fields[name]
    if fields.get("tool_calls") == []:
        del fields["tool_calls"]
    if "reasoning" in fields:
        reasoning = fields.pop("reasoning")
        fields["reasoning_content"] = fields.get("reasoning_content") or reasoning
    return fields


def _without_nulls(data: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in data.items() if value is not None}
