"""Validates Responses requests. Unknown fields are dropped."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from rekindle.api.base.fields import (
    WHOLE,
    CacheRetention,
    Count,
    Id,
    Metadata,
    Normalise,
    StrictModel,
    Text,
    fault,
    limit_depth,
    takes,
)
from rekindle.api.base.known_fields import (
    COMPLETIONS_ONLY,
    LLAMA_SERVER,
    VLLM,
    FieldTable,
    Ignored,
    KnownFields,
    Refused,
    output_form,
)
from rekindle.api.base.sampling import SamplingFields
from rekindle.api.base.tools import ToolSelection
from rekindle.api.responses.items import InputItems
from rekindle.api.responses.tools import MAX_TOOLS, Form, Toolbox, Tools
from rekindle.errors import BadRequest
from rekindle.protocol.requests import StructuredOutput

FORMAT = "text.format"
EMPTY: tuple[Any, ...] = (False, [], {})
LIMIT = "use `max_output_tokens` instead of"
FIELD_TABLE: FieldTable = {
    **VLLM,
    **LLAMA_SERVER,
    **COMPLETIONS_ONLY,
    **output_form(FORMAT),
    "max_tokens": Refused(LIMIT),
    "max_completion_tokens": Refused(LIMIT),
    "n_predict": Refused(LIMIT),
    "stop": Refused(
        "the Responses API has no stop strings: use /v1/chat/completions, or remove", ([],)
    ),
    "prompt": Refused(
        "there are no stored prompts: send `instructions` and `input` instead of", EMPTY
    ),
    "moderation": Refused("moderation is not supported: remove", EMPTY),
    "context_management": Refused("conversations are not compacted: send less, or remove", EMPTY),
    "service_tier": Ignored("there is one tier"),
    "stream_options.include_obfuscation": Ignored("events are not padded", (False,)),
    "text.verbosity": Ignored("templates have no such setting", ("medium",)),
    "reasoning.summary": Ignored("reasoning is returned as it is"),
    "reasoning.generate_summary": Ignored("reasoning is returned as it is"),
}
#: Values of `include` that add something to a response. The others are ignored.
INCLUDED = ("reasoning.encrypted_content", "message.output_text.logprobs")
Lifetime = Literal["30m", "12h"]  # of cached state


def _one_tool(kind: str) -> str:
    """Refuse the type of `AllowedTools`. Without this check, a wrong type would pass for a hosted
    tool."""
    if kind == "allowed_tools":
        raise ValueError("is not the type of a tool")
    return kind


class NamedTool(Form):
    """One tool. If its type is neither `function` nor `custom`, it runs on OpenAI's servers."""

    type: Annotated[str, Field(max_length=128), AfterValidator(_one_tool)]
    name: str | None = None
    namespace: str | None = None

    @property
    def is_clients(self) -> bool:
        return self.type in ("function", "custom")


class AllowedTools(Form):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | AllowedTools | NamedTool,
    takes(
        '"none", "auto", "required", {"type": "function", "name": …}, {"type": "custom", '
        '"name": …} or {"type": "allowed_tools", "mode": …, "tools": […]}'
    ),
    BeforeValidator(limit_depth),
]


def select_tools(choice: ToolChoice | None, toolbox: Toolbox) -> ToolSelection:
    """Resolve `tool_choice`. A choice of an ignored tool has no effect."""
    match choice:
        case "none":
            return ToolSelection("none")
        case "required" if toolbox.offered:
            return ToolSelection("required")
        case "required" if not toolbox.ignored:
            raise BadRequest('`tool_choice` "required" needs `tools`.', param="tool_choice")
        case NamedTool() if choice.is_clients:
            return ToolSelection("required", frozenset([_found(choice, toolbox)]))
        case AllowedTools():
            allowed = frozenset(_found(tool, toolbox) for tool in choice.tools if tool.is_clients)
            return ToolSelection(choice.mode if allowed else "none", allowed)
    return ToolSelection()


def _found(choice: NamedTool, toolbox: Toolbox) -> str:
    name = toolbox.resolve(choice.name or "", choice.namespace)
    if name not in toolbox.offered:
        raise BadRequest(
            f"`tool_choice` names the tool {(choice.name or '')[:128]!r}, which is not among "
            "`tools`.",
            param="tool_choice",
        )
    return name


class Reasoning(StrictModel):
    effort: str | None = Field(None, max_length=32)
    summary: str | None = Field(None, max_length=32)


class TextFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, max_length=64)
    schema_: Annotated[dict[str, Any], BeforeValidator(limit_depth)] | None = Field(
        None, alias="schema"
    )
    description: str | None = None
    strict: bool | None = None  # the schema is enforced either way

    @model_validator(mode="after")
    def _has_its_schema(self) -> TextFormat:
        if self.type == "json_schema" and self.schema_ is None:
            raise ValueError('of type "json_schema" needs `schema`, an object')
        return self


class TextConfig(StrictModel):
    format: TextFormat | None = None
    verbosity: str | None = Field(None, max_length=32)


class PromptCacheOptions(StrictModel):
    mode: Literal["implicit", "explicit"] = "implicit"
    ttl: Lifetime | None = None
    prewarm: bool = False
    comparison_response_id: Id | None = None


class ConversationId(StrictModel):
    id: Id


def _explained(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """Report one error: about the first wrong item, or about input in general."""
    try:
        return handler(value)
    except ValidationError as error:
        for each in error.errors():
            match each["loc"]:
                case (_, int() as place, _, *field) if field:
                    name = ".".join(map(str, field))
                    raise ValueError(f"item {place}: `{name}` {fault(each)}") from None
                case (_, int() as place, *_):
                    raise ValueError(f"item {place}: {fault(each)}") from None
                case (_,) if each["type"] == "value_error":
                    raise ValueError(fault(each)) from None
        raise ValueError("takes a string, or a list of items") from None


Input = Annotated[Text | InputItems, WrapValidator(_explained)]


class PromptFields(StrictModel):
    """The fields that make up the prompt."""

    model: str | None = None
    input: Input | None = None
    instructions: Text | None = None
    previous_response_id: Id | None = None
    conversation: (
        Annotated[Id | ConversationId, takes("an id, or an object with an `id`")] | None
    ) = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None
    normalise: Normalise | None = Field(
        None, description="Whether to remove volatile parts of the prompt, or which ones"
    )

    @model_validator(mode="after")
    def _is_a_prompt(self) -> PromptFields:
        if self.previous_response_id is not None and self.conversation is not None:
            raise BadRequest(
                "`previous_response_id` and `conversation` exclude each other: send one of them.",
                param="previous_response_id",
            )
        parts = (self.input, self.instructions, self.previous_response_id, self.conversation)
        if all(part is None for part in parts):
            raise BadRequest(
                "A prompt needs `input`, `instructions`, `previous_response_id` or `conversation`.",
                param="input",
            )
        return self

    @property
    def reply_tokens(self) -> int | None:
        """Number of reply tokens that have to fit after the prompt, or None if that is unknown."""
        return None

    @property
    def conversation_id(self) -> str | None:
        given = self.conversation
        return given.id if isinstance(given, ConversationId) else given

    @property
    def structure(self) -> StructuredOutput | None:
        form = self.text.format if self.text else None
        if form is None or form.type == "text":
            return None
        return StructuredOutput(schema=form.schema_, param=FORMAT)


class InputTokensRequest(PromptFields):
    """POST /v1/responses/input_tokens."""


class ResponsesRequest(KnownFields, PromptFields, SamplingFields):
    """POST /v1/responses."""

    field_table: ClassVar[FieldTable] = FIELD_TABLE

    stream: bool | None = None
    store: bool | None = Field(None, description="Whether to store the response; true by default")
    background: bool | None = Field(
        None, description="Whether to return immediately and compute the response in the background"
    )
    include: Annotated[list[str], Field(max_length=32)] | None = None
    generate: bool | None = Field(
        None, description="false: only prepare the prompt, like `prompt_cache_options.prewarm`"
    )
    max_output_tokens: Count | None = None
    max_tool_calls: Count | None = Field(None, description="Further calls are left out")
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    metadata: Metadata | None = None
    user: str | None = Field(None, max_length=512)
    safety_identifier: str | None = Field(None, max_length=512)
    session_id: Id | None = Field(None, description="A name of the conversation")
    use_kv_cache: bool | None = None
    cache_exact: bool | None = None
    prompt_cache_key: Id | None = None
    prompt_cache_retention: CacheRetention | None = None
    prompt_cache_options: PromptCacheOptions | None = None

    @model_validator(mode="after")
    def _is_stored_if_in_background(self) -> ResponsesRequest:
        if self.background and not self.is_stored:
            raise BadRequest(
                "A response with `background: true` is stored until it is read: leave out "
                "`store: false`.",
                param="store",
            )
        return self

    @property
    def ignored_fields(self) -> list[str]:
        other = (each for each in self.include or () if each not in INCLUDED)
        return [*super().ignored_fields, *(f"include.{each}" for each in other)]

    @property
    def reply_tokens(self) -> int | None:
        return self.max_output_tokens

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    @property
    def prewarms(self) -> bool:
        options = self.prompt_cache_options
        return self.generate is False or (options is not None and options.prewarm)

    @property
    def seals_reasoning(self) -> bool:
        """Whether reasoning comes packed, so that the client can send it back."""
        return INCLUDED[0] in (self.include or ())

    @property
    def logprobs(self) -> int | None:
        """Number of alternatives for each token, or None for no log probabilities."""
        wanted = INCLUDED[1] in (self.include or ()) or self.top_logprobs
        return (self.top_logprobs or 0) if wanted else None
