"""Defines the items of a conversation in the Responses API."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    ValidationInfo,
    field_validator,
)

from rekindle.api.base.fields import (
    MAX_ID_CHARACTERS,
    MAX_ITEMS,
    StrictModel,
    explain_items,
    limit_depth,
    limit_text,
)
from rekindle.api.base.messages import FilePart as MessageFile
from rekindle.api.base.messages import ImagePart as MessageImage
from rekindle.api.base.messages import TextPart as MessageText
from rekindle.api.base.messages import as_url, file_part
from rekindle.errors import Unsupported

NOT_SERVED = ("input_audio", "computer_screenshot")
TAKES = (
    "takes a string, or a list of parts: `input_text`, `output_text`, `input_image` or `input_file`"
)


class Part(StrictModel):
    # With `mode: explicit`, a request without one is not cached.
    prompt_cache_breakpoint: Annotated[
        dict[str, Any] | bool | None, BeforeValidator(limit_depth)
    ] = None


class TextPart(Part):
    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str


class RefusalPart(Part):
    type: Literal["refusal"]
    refusal: str


class ImagePart(Part):
    type: Literal["input_image"]
    image_url: str | None = None
    file_id: str | None = None
    detail: Literal["auto", "low", "high", "original"] | None = None


class FilePart(Part):
    """A PDF or a text: a `data:` URL in `file_data`, or an http(s) URL in `file_url`."""

    type: Literal["input_file"]
    file_data: str | None = None
    file_url: str | None = None
    filename: str | None = Field(None, max_length=512)
    file_id: str | None = None
    detail: str | None = Field(None, max_length=64)

    @property
    def url(self) -> str:
        return as_url(self.file_data) if self.file_data else self.file_url or ""


ContentPart = Annotated[TextPart | RefusalPart | ImagePart | FilePart, Field(discriminator="type")]


def _refuse_unserved(value: Any) -> Any:
    for part in value if isinstance(value, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in NOT_SERVED:
            raise Unsupported(
                f"content parts of type {kind!r} are not supported: send `input_text`, "
                "`input_image` or `input_file`",
                param="input",
            )
        if kind == "input_file" and not (part.get("file_data") or part.get("file_url")):
            raise Unsupported(
                "uploaded files are not supported: send the file as `file_data`, a `data:` URL, or "
                "its http(s) URL as `file_url`",
                param="input",
            )
        if kind == "input_image" and not part.get("image_url"):
            raise Unsupported(
                "uploaded files are not supported: send the http(s) or `data:` URL of an image as "
                "`image_url`",
                param="input",
            )
    return value


def refuse_images(content: Any) -> Any:
    """Refuse images and files where a model wrote the content."""
    sent = content if isinstance(content, list) else []
    if any(isinstance(part, ImagePart | FilePart) for part in sent):
        raise ValueError(
            "takes only text, and no `input_image` or `input_file`: send these as the user"
        )
    return content


Parts = Annotated[list[ContentPart], Field(fail_fast=True)]
TextParts = Annotated[Parts, AfterValidator(refuse_images)]
Content = Annotated[str | Parts, explain_items("part", TAKES), BeforeValidator(_refuse_unserved)]


def text_of(content: Any) -> str:
    """Join the texts of the parts without a separator, as a reply was written."""
    if isinstance(content, str):
        return content
    texts = (part.refusal if isinstance(part, RefusalPart) else part.text for part in content or ())
    return "".join(texts)


def for_template(content: Any) -> str | list[MessageText | MessageImage | MessageFile]:
    """Convert content to that of a chat message. A single text becomes a string."""
    if isinstance(content, str):
        return content
    parts = [_for_template(part) for part in content or ()]
    match parts:
        case []:
            return ""
        case [MessageText() as only]:
            return only.text
    return parts


def _for_template(
    part: TextPart | RefusalPart | ImagePart | FilePart,
) -> MessageText | MessageImage | MessageFile:
    if isinstance(part, FilePart):
        return file_part(part.url, part.filename)
    if isinstance(part, ImagePart):
        detail = part.detail if part.detail in ("auto", "low", "high") else None
        return MessageImage.model_construct(
            type="image_url", image_url=part.image_url, detail=detail
        )
    text = part.refusal if isinstance(part, RefusalPart) else part.text
    return MessageText.model_construct(type="text", text=text)


ID_BYTES = 16  # random bytes in the ids of items, responses and conversations
#: Prefixes of item ids, by type.
PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "compaction": "cmp",
}
#: Types of items that only OpenAI's servers use.
OF_SERVER = (
    *("compaction_trigger", "additional_tools", "tool_search_output"),
    *("configuration_update", "program", "program_output"),
)

ItemId = Annotated[str, Field(max_length=MAX_ID_CHARACTERS)]


class Item(StrictModel):
    id: ItemId | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageItem(Item):
    """`type` may be left out."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    phase: str | None = Field(None, max_length=64)

    @field_validator("content")
    @classmethod
    def _is_what_the_role_sends(cls, content: Any, info: ValidationInfo) -> Any:
        return refuse_images(content) if info.data.get("role") == "assistant" else content


class FunctionCall(Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str = "{}"


class CustomToolCall(Item):
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str = ""


class CallOutput(Item):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Content


class ReasoningItem(Item):
    """Reasoning of a model here, shown or packed. That of other providers is ignored."""

    type: Literal["reasoning"]
    summary: TextParts = Field(default_factory=list)
    content: TextParts | None = None
    encrypted_content: str | None = None


class CompactionItem(Item):
    """The summary of an earlier part of the conversation, packed by /v1/responses/compact."""

    type: Literal["compaction"]
    encrypted_content: str


class ItemReference(StrictModel):
    """Refers to an item that is stored here."""

    type: Literal["item_reference"]
    id: ItemId


class UnservedItem(StrictModel):
    """Left out of the prompt."""

    type: str


def is_of_server(kind: str) -> bool:
    """Whether only OpenAI's servers use items of this type."""
    is_call = kind.endswith(("_call", "_call_output")) or kind.startswith("mcp_")
    return (is_call or kind in OF_SERVER) and kind not in PREFIXES


def _kind(item: Any) -> str | None:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    if kind is None:
        return "message"
    if not isinstance(kind, str):
        return None
    if is_of_server(kind):
        return "unserved"
    return "function_call_output" if kind == "custom_tool_call_output" else kind


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[CustomToolCall, Tag("custom_tool_call")]
    | Annotated[CallOutput, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[CompactionItem, Tag("compaction")]
    | Annotated[ItemReference, Tag("item_reference")]
    | Annotated[UnservedItem, Tag("unserved")],
    Discriminator(
        _kind,
        custom_error_type="item_type",
        custom_error_message=(
            "takes items of the types message, reasoning, function_call, function_call_output, "
            "custom_tool_call, custom_tool_call_output, compaction and item_reference"
        ),
    ),
]


def limit_items(items: Any) -> Any:
    """Count items and parts before they are validated, which takes time for each."""
    if not isinstance(items, list):
        return items
    if len(items) > MAX_ITEMS:
        raise ValueError(f"takes at most {MAX_ITEMS} items")
    fields = [value for item in items if isinstance(item, dict) for value in item.values()]
    parts = [part for value in fields if isinstance(value, list) for part in value]
    if len(parts) > MAX_ITEMS:
        raise ValueError(f"may have at most {MAX_ITEMS} content parts, not {len(parts)}")
    texts = [*fields, *(part.get("text") for part in parts if isinstance(part, dict))]
    limit_text(texts)
    return items


InputItems = Annotated[list[InputItem], Field(fail_fast=True), BeforeValidator(limit_items)]
stored_items: TypeAdapter[list[Any]] = TypeAdapter(list[InputItem])


def new_id(kind: str) -> str:
    return f"{PREFIXES[kind]}_{secrets.token_hex(ID_BYTES)}"


def identified(items: Iterable[Item], taken: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Convert items to JSON as they are stored, each with an id that is not in `taken`."""
    known = set(taken)
    return [_identified(item, known) for item in items]


def _identified(item: Item, known: set[str]) -> dict[str, Any]:
    fields = item.model_dump(exclude_none=True)
    if "id" not in fields or fields["id"] in known:
        fields["id"] = new_id(fields["type"])
    known.add(fields["id"])
    if fields["type"] == "message":
        fields["content"] = _parts(fields["role"], fields["content"])
    return {**fields, "status": fields.get("status", "completed")}


def _parts(role: str, content: Any) -> list[dict[str, Any]]:
    """Convert content to a list, as the API shows it."""
    if isinstance(content, str):
        kind = "output_text" if role == "assistant" else "input_text"
        content = [{"type": kind, "text": content}]
    return [
        {**part, "annotations": []} if part["type"] == "output_text" else part for part in content
    ]
