"""Requests of the Responses API: known fields are checked, unknown ones ignored."""

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
    model_validator,
)

from rekindle.api.base.fields import (
    MOST_TOKENS,
    WHOLE,
    Id,
    Normalise,
    Seed,
    bounded_text,
    fault,
    shallow,
    takes,
)
from rekindle.api.responses.items import InputItems
from rekindle.api.responses.tools import MOST_TOOLS, Toolbox, Tools
from rekindle.errors import BadRequest, Unsupported
from rekindle.protocol.requests import StructuredOutput, ToolUse

# ----------------------------------------------------------------------
# `tool_choice` of the Responses API: which tools a reply may call, or has to.

PARAM = "tool_choice"


class _ToolChoiceForm(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class NamedTool(_ToolChoiceForm):
    """One tool; of another type than `function` and `custom` it is one of OpenAI's own."""

    type: str = Field(max_length=128)
    name: str | None = None
    namespace: str | None = None

    @property
    def is_ours(self) -> bool:
        return self.type in ("function", "custom")


class AllowedTools(_ToolChoiceForm):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=MOST_TOOLS, fail_fast=True)


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | AllowedTools | NamedTool,
    takes(
        '"none", "auto", "required", {"type": "function", "name": …}, {"type": "custom", '
        '"name": …} or {"type": "allowed_tools", "mode": …, "tools": […]}'
    ),
    BeforeValidator(shallow),
]


def shown_tools(choice: ToolChoice | None, toolbox: Toolbox) -> list[dict[str, Any]]:
    """The tools that the prompt describes: tools that are not allowed are left out. A single one
    that has to be called is enforced by its name, and the prompt stays the same."""
    if isinstance(choice, AllowedTools) and _single(choice, toolbox) is None:
        return toolbox.shown(_allowed(choice, toolbox))
    return toolbox.shown()


def tool_use(choice: ToolChoice | None, toolbox: Toolbox, *, parallel: bool) -> ToolUse:
    """The choice as the runtime takes it; one of a tool that is ignored is no choice."""
    match choice:
        case "none":
            return ToolUse(choice="none")
        case "required" if toolbox.offered:
            return ToolUse(choice="required", parallel=parallel)
        case "required" if not toolbox.ignored:
            raise BadRequest('`tool_choice` "required" needs `tools`.', param=PARAM)
        case NamedTool() if choice.is_ours:
            return ToolUse(choice="required", name=_found(choice, toolbox), parallel=parallel)
        case AllowedTools() if _allowed(choice, toolbox):
            name = _single(choice, toolbox)
            return ToolUse(choice=choice.mode, name=name, parallel=parallel)
        case AllowedTools():
            return ToolUse(choice="none")
    return ToolUse(parallel=parallel)


def forces_call(choice: ToolChoice | None, toolbox: Toolbox) -> bool:
    return tool_use(choice, toolbox, parallel=True).choice == "required"


def _allowed(choice: AllowedTools, toolbox: Toolbox) -> set[str]:
    return {_found(tool, toolbox) for tool in choice.tools if tool.is_ours}


def _single(choice: AllowedTools, toolbox: Toolbox) -> str | None:
    """The one tool that has to be called, where there is one."""
    names = _allowed(choice, toolbox)
    return names.pop() if len(names) == 1 and choice.mode == "required" else None


def _found(choice: NamedTool, toolbox: Toolbox) -> str:
    name = toolbox.resolve(choice.name or "", choice.namespace)
    if name not in toolbox.offered:
        raise BadRequest(
            f"`tool_choice` names the tool {(choice.name or '')[:128]!r}, which is not among "
            "`tools`.",
            param=PARAM,
        )
    return name


MOST_PAIRS = 16
MOST_NAME_CHARACTERS = 512  # of whom a client asks for
FORMAT = "text.format"
# Fields that ask for what is not to be had here: refused, never ignored.
NOT_SERVED = {
    "background": "responses are not computed in the background: remove, or stream, with",
    "prompt": "there are no stored prompts: send `instructions` and `input` instead of",
    "moderation": "nothing is moderated here: remove",
    "context_management": "conversations are not compacted: send less, or remove",
}
HARMLESS: tuple[Any, ...] = (None, False, [], {})


class _Form(BaseModel):
    model_config = ConfigDict(strict=True, protected_namespaces=())


class Reasoning(_Form):
    effort: str | None = Field(None, max_length=32)
    summary: str | None = Field(None, max_length=32)


class TextFormat(_Form):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, max_length=64)
    schema_: Annotated[dict[str, Any], BeforeValidator(shallow)] | None = Field(
        None, alias="schema"
    )
    description: str | None = None
    strict: bool | None = None  # the schema is enforced either way

    @model_validator(mode="after")
    def _has_its_schema(self) -> TextFormat:
        if self.type == "json_schema" and self.schema_ is None:
            raise ValueError('of type "json_schema" needs `schema`, an object')
        return self


class TextConfig(_Form):
    format: TextFormat | None = None
    verbosity: str | None = Field(None, max_length=32)

    @property
    def structure(self) -> StructuredOutput | None:
        if self.format is None or self.format.type == "text":
            return None
        return StructuredOutput(schema=self.format.schema_, param=FORMAT)


class PromptCacheOptions(_Form):
    mode: Literal["implicit", "explicit"] = "implicit"
    ttl: Literal["30m", "12h"] | None = None
    prewarm: bool = False
    comparison_response_id: Id | None = None


class ConversationId(_Form):
    id: Id


def _pairs(metadata: dict[str, str]) -> dict[str, str]:
    if len(metadata) > MOST_PAIRS or any(
        len(name) > 64 or len(value) > 512 for name, value in metadata.items()
    ):
        raise ValueError(
            f"takes at most {MOST_PAIRS} names of 64 characters, with values of 512 characters"
        )
    return metadata


Metadata = Annotated[
    dict[str, str], takes("an object whose values are strings"), AfterValidator(_pairs)
]
Text = Annotated[str, BeforeValidator(bounded_text)]


def _explained(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """One sentence about the first item that is wrong, or about what input takes."""
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


class PromptFields(_Form):
    """What a prompt is made of."""

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
        None, description="Whether volatile headers are taken out, or which"
    )

    @model_validator(mode="after")
    def _is_a_prompt(self) -> PromptFields:
        if self.previous_response_id is not None and self.conversation is not None:
            raise BadRequest(
                "`previous_response_id` and `conversation` both say what came before: send one.",
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
    def conversation_id(self) -> str | None:
        given = self.conversation
        return given.id if isinstance(given, ConversationId) else given

    @property
    def structure(self) -> StructuredOutput | None:
        return self.text.structure if self.text else None

    @property
    def reserved_tokens(self) -> int:
        """That the context has to hold beside the prompt."""
        return 1


class InputTokensRequest(PromptFields):
    """POST /v1/responses/input_tokens."""


class ResponsesRequest(PromptFields):
    """POST /v1/responses."""

    stream: bool | None = None
    store: bool | None = Field(None, description="Whether it can be asked for later: the default")
    include: Annotated[list[str], Field(max_length=32)] | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS), WHOLE] | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    seed: Seed | None = None
    metadata: Metadata | None = None
    user: str | None = Field(None, max_length=MOST_NAME_CHARACTERS)
    safety_identifier: str | None = Field(None, max_length=MOST_NAME_CHARACTERS)
    session_id: Id | None = Field(None, description="Names the conversation's state")
    use_kv_cache: bool | None = None
    cache_exact: bool | None = None
    prompt_cache_key: Id | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    prompt_cache_options: PromptCacheOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unserved_fields(cls, data: Any) -> Any:
        for name, instead in NOT_SERVED.items() if isinstance(data, dict) else ():
            if data.get(name) not in HARMLESS:
                raise Unsupported(f"{instead} `{name}`", param=name)
        return data

    @property
    def reserved_tokens(self) -> int:
        return self.max_output_tokens or 1

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    @property
    def prewarms(self) -> bool:
        """Whether the prompt alone is computed."""
        return self.prompt_cache_options is not None and self.prompt_cache_options.prewarm

    @property
    def seals_reasoning(self) -> bool:
        """Whether reasoning comes with what lets it be sent back."""
        return "reasoning.encrypted_content" in (self.include or ())

    @property
    def logprobs(self) -> int | None:
        """How many alternatives each token is shown with; None: no logprobs."""
        wanted = "message.output_text.logprobs" in (self.include or ()) or self.top_logprobs
        return (self.top_logprobs or 0) if wanted else None
