"""Validates OpenAI's chat and text completion requests. Unknown fields are dropped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from rekindle.api.base.completions import NAMES, CompletionsBase, Progress, TopLogprobs
from rekindle.api.base.fields import (
    MAX_ITEMS,
    WHOLE,
    FreeObject,
    FunctionName,
    Metadata,
    PrefillProgress,
    PromptInput,
    StrictModel,
    Text,
    TokenLimit,
    as_prompts,
    at_most,
    limit_depth,
    takes,
)
from rekindle.api.base.known_fields import FieldTable
from rekindle.api.base.messages import Messages, Resize
from rekindle.api.base.tools import (
    MAX_TOOLS,
    ChatTools,
    CustomTool,
    Function,
    Tool,
    ToolSelection,
    refuse_duplicates,
)
from rekindle.api.openai.known_fields import CHAT_FIELDS, COMPLETION_FIELDS
from rekindle.errors import BadRequest, Unsupported


class FunctionNamed(StrictModel):
    name: FunctionName


class NamedTool(StrictModel):
    type: Literal["function"]
    function: FunctionNamed

    @property
    def name(self) -> str:
        return self.function.name


class NamedCustomTool(StrictModel):
    type: Literal["custom"]
    custom: FunctionNamed

    @property
    def name(self) -> str:
        return self.custom.name


class AllowedTools(StrictModel):
    mode: Literal["auto", "required"]
    tools: list[NamedTool | NamedCustomTool] = Field(
        min_length=1, max_length=MAX_TOOLS, fail_fast=True
    )


class AllowedChoice(StrictModel):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool | NamedCustomTool | AllowedChoice,
    takes(
        '"none", "auto", "required", {"type": "function", "function": {"name": …}}, '
        '{"type": "custom", "custom": {"name": …}}, or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": …, "tools": […]}}'
    ),
]


def _distinct(functions: list[Function]) -> list[Function]:
    refuse_duplicates((each.name for each in functions), "function")
    return functions


Functions = Annotated[
    list[Function],
    Field(fail_fast=True),
    AfterValidator(_distinct),
    BeforeValidator(limit_depth),
    at_most(MAX_TOOLS),
]
FunctionChoice = Annotated[
    Literal["none", "auto"] | FunctionNamed, takes('"none", "auto" or {"name": …}')
]


def select_tools(
    choice: ToolChoice | None, tools: Sequence[Tool | CustomTool] | None
) -> ToolSelection:
    """Resolve `tool_choice`. Raises BadRequest if a function is not in `tools`."""
    match choice:
        case NamedTool() | NamedCustomTool():
            selection = ToolSelection("required", frozenset([choice.name]))
        case AllowedChoice(allowed_tools=allowed):
            names = frozenset(tool.name for tool in allowed.tools)
            selection = ToolSelection(allowed.mode, names)
        case "required" if not tools:
            raise BadRequest('`tool_choice` "required" needs `tools`.', param="tool_choice")
        case _:
            return ToolSelection(choice or "auto")
    offered = {tool.name for tool in tools or ()}
    for name in selection.names or ():
        if name not in offered:
            raise BadRequest(
                f"`tool_choice` names the function {name!r}, which is not among `tools`.",
                param="tool_choice",
            )
    return selection


def _modern(messages: Any) -> Any:
    """Write calls and results of OpenAI's older form as tool calls. A result answers the last call.

    The names of fields differ and there are no ids, so the ids count the messages.
    """
    if not isinstance(messages, list):
        return messages
    found, last_id = [], ""
    for place, message in enumerate(messages):
        if isinstance(message, dict) and isinstance(message.get("function_call"), dict):
            last_id = f"call_{place}"
            call = {"id": last_id, "type": "function", "function": message["function_call"]}
            rest = {name: value for name, value in message.items() if name != "function_call"}
            message = {**rest, "tool_calls": [call]}
        elif isinstance(message, dict) and message.get("role") == "function":
            if not last_id:
                raise BadRequest(
                    "A message of the role 'function' needs a message with a `function_call` "
                    "before it.",
                    param="messages",
                )
            message = {**message, "role": "tool", "tool_call_id": last_id}
        found.append(message)
    return found


class ChatRequest(CompletionsBase):
    """POST /v1/chat/completions."""

    field_table: ClassVar[FieldTable] = CHAT_FIELDS

    messages: Annotated[Messages, BeforeValidator(_modern), at_most(MAX_ITEMS)] = Field(
        min_length=1, max_length=MAX_ITEMS
    )
    max_completion_tokens: TokenLimit | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    chat_template_kwargs: FreeObject | None = None
    reasoning_effort: str | None = Field(None, max_length=32)
    add_generation_prompt: bool | None = Field(
        None, description="False: the prompt ends with the last message"
    )
    continue_final_message: bool | None = Field(
        None, description="The response continues the last message, which must be the assistant's"
    )
    prefill_progress: PrefillProgress | None = None
    resize: Resize | None = Field(None, description="The size that every image is scaled to")
    tools: ChatTools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    store: bool | None = Field(None, description="Store the answer, under its id")
    metadata: Metadata | None = Field(None, description="Names and values of a stored answer")
    functions: Functions | None = Field(None, description="OpenAI's older form of `tools`")
    function_call: FunctionChoice | None = Field(
        None, description="OpenAI's older form of `tool_choice`"
    )

    @model_validator(mode="after")
    def _functions_are_tools(self) -> ChatRequest:
        """May run twice: FastAPI validates a request again that is validated already."""
        if not self.functions:
            return self
        tools: list[Tool | CustomTool] = [
            Tool(type="function", function=each) for each in self.functions
        ]
        choice: Any = self.function_call
        if isinstance(choice, FunctionNamed):
            choice = NamedTool(type="function", function=choice)
        if self.tools not in (None, [], tools) or self.tool_choice not in (None, choice):
            raise BadRequest("Send `tools` or `functions`, not both.", param="functions")
        self.tools, self.tool_choice, self.parallel_tool_calls = tools, choice, False
        return self

    @property
    def calls_functions(self) -> bool:
        return bool(self.functions)

    @property
    def custom_tools(self) -> dict[str, CustomTool]:
        return {tool.name: tool for tool in self.tools or () if isinstance(tool, CustomTool)}

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise Unsupported("`top_logprobs` needs `logprobs: true`", param="top_logprobs")
        return self

    @model_validator(mode="after")
    def _final_message_can_be_continued(self) -> ChatRequest:
        if self.continue_final_message and self.add_generation_prompt:
            raise BadRequest(
                "`continue_final_message` and `add_generation_prompt` cannot both be true.",
                param="continue_final_message",
            )
        if self.continue_final_message and not self.ends_with_reply:
            raise BadRequest(
                "`continue_final_message` needs a last message of the assistant that has text and "
                "no tool calls.",
                param="continue_final_message",
            )
        return self

    @model_validator(mode="after")
    def _tool_choice_and_format_agree(self) -> ChatRequest:
        structure = self.structure
        self.selection.check_format(structure, structure.param if structure else "")
        return self

    @property
    def selection(self) -> ToolSelection:
        """Raises BadRequest if `tool_choice` names a function that is not in `tools`."""
        return select_tools(self.tool_choice, self.tools)

    @property
    def progress(self) -> Progress | None:
        if not (self.stream and self.prefill_progress):
            return super().progress
        return "comments" if self.prefill_progress == "comments" else "chunks"

    @property
    def ends_with_reply(self) -> bool:
        """Whether the last message is a text of the assistant, which a reply can continue."""
        last = self.messages[-1]
        return last.role == "assistant" and last.content is not None and not last.tool_calls

    @property
    def message_ids(self) -> list[str]:
        """Ids of messages whose state may be reused, newest first. Empty without `use_kv_cache`."""
        if not self.use_kv_cache:
            return []
        ids = (message.message_id for message in reversed(self.messages))
        return [message_id for message_id in ids if message_id is not None]

    @property
    def may_be_named(self) -> bool:
        """Whether the request does not name the conversation that it continues."""
        names = (getattr(self, name) for name in NAMES)
        return not self.message_ids and all(name is None for name in names)

    @property
    def wants_message_id(self) -> bool:
        return bool(self.use_kv_cache)


class CompletionRequest(CompletionsBase):
    """POST /v1/completions."""

    field_table: ClassVar[FieldTable] = COMPLETION_FIELDS

    prompt: PromptInput
    logprobs: TopLogprobs | None = None
    echo: bool | None = Field(None, description="The text of the response begins with the prompt")
    suffix: Text | None = Field(
        None, description="Text after the response, for models that can fill in the middle"
    )
    best_of: Annotated[int, Field(ge=1, le=32), WHOLE] | None = Field(
        None, description="Generate this many responses and return the `n` most likely ones"
    )

    @property
    def choices(self) -> int:
        """How many answers each prompt gets, of which `n` are returned."""
        return max(self.n or 1, self.best_of or 1)

    @model_validator(mode="after")
    def _ranks_whole_answers(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise BadRequest("`best_of` takes at least as many as `n`.", param="best_of")
        if self.stream and self.choices > (self.n or 1):
            raise Unsupported(
                "the best answers are known at their end: remove `best_of` or `stream`",
                param="best_of",
            )
        return self

    @model_validator(mode="after")
    def _echoes_text(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise Unsupported(
                "log probabilities of the prompt are not computed: remove `echo` or `logprobs`",
                param="echo",
            )
        if self.suffix and not all(isinstance(each, str) for each in self.prompts):
            raise Unsupported("`suffix` needs a prompt of text", param="suffix")
        return self

    @model_validator(mode="after")
    def _bounded_turns(self) -> CompletionRequest:
        if len(self.prompts) * self.choices > 128:
            raise Unsupported(
                "one request may ask for at most 128 answers (prompts times `n` or `best_of`)",
                param="prompt",
            )
        return self

    @model_validator(mode="after")
    def _one_prompt_for_a_name(self) -> CompletionRequest:
        if len(self.prompts) > 1:
            for field in (*NAMES, "return_cache_key"):
                value = getattr(self, field)
                if value is not None and value is not False:  # session 0 is a name
                    raise Unsupported(
                        f"a name belongs to one prompt: send one, or remove `{field}`", param=field
                    )
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        return as_prompts(self.prompt)
