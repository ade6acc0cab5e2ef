"""Parts of content, as items of the Responses API have them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from rekindle.api.fields import shallow
from rekindle.api.media_parts import ImagePart as MessageImage
from rekindle.api.message import TextPart as MessageText
from rekindle.api.validation import fault_among
from rekindle.errors import Unsupported

NOT_SERVED = ("input_file", "input_audio", "computer_screenshot")
TAKES = "takes a string, or a list of parts: `input_text`, `output_text` or `input_image`"


class Part(BaseModel):
    model_config = ConfigDict(strict=True)

    # A mark for a cache that keeps what it is told to keep; here all of it is kept.
    prompt_cache_breakpoint: Annotated[dict[str, Any] | bool | None, BeforeValidator(shallow)] = (
        None
    )


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


ContentPart = Annotated[TextPart | RefusalPart | ImagePart, Field(discriminator="type")]


def _explained(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """One sentence about the first part that is wrong, or about what content takes."""
    _refuse_unserved(value)
    try:
        return handler(value)
    except ValidationError as error:
        raise ValueError(fault_among(error, "part", TAKES)) from None


def _refuse_unserved(value: Any) -> None:
    for part in value if isinstance(value, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in NOT_SERVED:
            raise Unsupported(
                f"content parts of type {kind!r} are not supported: send `input_text` or "
                "`input_image`",
                param="input",
            )
        if kind == "input_image" and not part.get("image_url"):
            raise Unsupported(
                "there are no uploaded files here: send a picture's http(s) or `data:` URL as "
                "`image_url`",
                param="input",
            )


def without_pictures(content: Any) -> Any:
    """What a model writes is text."""
    if isinstance(content, list) and any(isinstance(part, ImagePart) for part in content):
        raise ValueError("takes text here, and no `input_image`: send pictures as the user's")
    return content


Parts = Annotated[list[ContentPart], Field(fail_fast=True)]
TextParts = Annotated[Parts, AfterValidator(without_pictures)]
Content = Annotated[str | Parts, WrapValidator(_explained)]


def is_marked(content: Any) -> bool:
    """Whether a part has a breakpoint."""
    parts = content if isinstance(content, list) else []
    return any(part.prompt_cache_breakpoint for part in parts)


def text_of(content: Any) -> str:
    """What the parts say, nothing between them, as a reply was written."""
    if isinstance(content, str):
        return content
    texts = (part.refusal if isinstance(part, RefusalPart) else part.text for part in content or ())
    return "".join(texts)


def for_template(content: Any) -> str | list[MessageText | MessageImage]:
    """As a message of a chat has it: a text alone is the same as a list of it."""
    if isinstance(content, str):
        return content
    parts = [_for_template(part) for part in content or ()]
    match parts:
        case []:
            return ""
        case [MessageText() as only]:
            return only.text
    return parts


def _for_template(part: TextPart | RefusalPart | ImagePart) -> MessageText | MessageImage:
    if isinstance(part, ImagePart):
        detail = part.detail if part.detail in ("auto", "low", "high") else None
        return MessageImage.model_construct(
            type="image_url", image_url=part.image_url, detail=detail
        )
    text = part.refusal if isinstance(part, RefusalPart) else part.text
    return MessageText.model_construct(type="text", text=text)
