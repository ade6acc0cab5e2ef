"""Validates Ollama's requests. Unknown fields are dropped."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator

from rekindle.api.base.fields import (
    MAX_ID_CHARACTERS,
    MAX_ITEMS,
    MAX_TOKENS,
    WHOLE,
    Count,
    Stop,
    StrictModel,
    Text,
    Tokens,
    limit_depth,
    limit_inputs,
    limit_text,
    takes,
)
from rekindle.api.base.known_fields import FieldTable, Ignored, KnownFields, Refused
from rekindle.api.base.messages import Arguments, limit_messages
from rekindle.api.base.sampling import RepeatLastN, SamplingFields
from rekindle.api.base.tools import Tools
from rekindle.errors import Unsupported
from rekindle.protocol.requests import StructuredOutput
from rekindle.protocol.settings import parse_duration

#: Ollama's names of sampling parameters, where they differ.
SAMPLING_ALIASES = {
    "repetition_penalty": "repeat_penalty",
    "repetition_context_size": "repeat_last_n",
}

Format = Annotated[
    Literal["", "json"] | dict[str, Any],
    takes('"json", or a JSON schema, which is an object'),
    AfterValidator(limit_depth),
]
Think = Annotated[
    bool | Literal["low", "medium", "high"], takes('true, false, "low", "medium" or "high"')
]
#: Seconds. Less than 0 means: for ever.
KeepAlive = Annotated[
    float, BeforeValidator(parse_duration), takes('a duration: seconds, or a text like "5m"')
]
MIROSTAT = "Mirostat is not supported: use `min_p` or `typical_p` instead of"
LOADED = "the server loads its models when it starts"
FIELD_TABLE: FieldTable = {
    "template": Refused("the model's own chat template is always used: remove", ("",)),
    "options.mirostat": Refused(MIROSTAT, (0,)),
    "options.mirostat_tau": Refused(MIROSTAT, (0,), switch="options.mirostat"),
    "options.mirostat_eta": Refused(MIROSTAT, (0,), switch="options.mirostat"),
    "options.tfs_z": Refused("tail-free sampling is not supported: remove", (1,)),
    "options.penalize_newline": Refused("penalties include line breaks: remove", (True,)),
    "truncate": Ignored("a prompt that is too long is refused", (False,)),
    "shift": Ignored("a reply ends where the context ends", (False,)),
    "options.num_keep": Ignored("a context is never shifted"),
    "options.draft_num_predict": Ignored("speculation does not change a reply"),
    **{
        f"options.{name}": Ignored(LOADED)
        for name in (
            "num_ctx",
            "num_batch",
            "num_gpu",
            "main_gpu",
            "num_thread",
            "use_mmap",
            "use_mlock",
            "low_vram",
            "numa",
            "f16_kv",
            "vocab_only",
            "logits_all",
            "embedding_only",
        )
    },
}


class Options(SamplingFields):
    """Sampling parameters. `FIELD_TABLE` has those that are refused or ignored."""

    model_config = ConfigDict(
        strict=True, extra="ignore", alias_generator=lambda name: SAMPLING_ALIASES.get(name, name)
    )

    repetition_context_size: RepeatLastN | None = None
    num_predict: Annotated[int, Field(ge=-2, le=MAX_TOKENS), WHOLE] | None = None
    stop: Stop | None = None


class RequestBase(KnownFields, StrictModel):
    """What /api/chat and /api/generate have in common."""

    field_table: ClassVar[FieldTable] = FIELD_TABLE

    model: str | None = None
    stream: bool | None = None
    format: Format | None = None
    options: Options | None = None
    think: Think | None = None
    keep_alive: KeepAlive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise Unsupported("`top_logprobs` needs `logprobs: true`", param="top_logprobs")
        return self

    @property
    def streams(self) -> bool:
        return self.stream is not False

    @property
    def chosen(self) -> Options:
        return self.options or Options.model_validate({})

    @property
    def structure(self) -> StructuredOutput | None:
        if not self.format:
            return None
        schema = self.format if isinstance(self.format, dict) else None
        return StructuredOutput(schema=schema, param="format")

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Set only what the client sets, so that the prompt equals that of other dialects."""
        if self.think is None:
            return {}
        if isinstance(self.think, str):
            return {"enable_thinking": True, "reasoning_effort": self.think}
        return {"enable_thinking": self.think}

    @property
    def unloads(self) -> bool:
        """Whether a request without a prompt asks to unload the model."""
        return self.keep_alive == 0


class CalledFunction(StrictModel):
    name: str
    arguments: Arguments = Field(default_factory=dict)


CallId = Annotated[str, Field(max_length=MAX_ID_CHARACTERS)]


class ToolCall(StrictModel):
    id: CallId | None = None
    function: CalledFunction


Images = Annotated[list[Text], Field(max_length=64, fail_fast=True)]


class OllamaMessage(StrictModel):
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    images: Images | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_name: str | None = None
    tool_call_id: CallId | None = None

    @model_validator(mode="after")
    def _assistant_has_no_images(self) -> OllamaMessage:
        if self.images and self.role == "assistant":
            raise ValueError("takes only text from the assistant: leave out `images`")
        return self


OllamaMessages = Annotated[
    list[OllamaMessage],
    Field(max_length=MAX_ITEMS, fail_fast=True),
    BeforeValidator(limit_messages),
]


class OllamaChatRequest(RequestBase):
    """POST /api/chat. Without messages it loads or unloads the model."""

    messages: OllamaMessages = Field(default_factory=list)
    tools: Tools | None = None


class OllamaGenerateRequest(RequestBase):
    """POST /api/generate. Without a prompt it loads or unloads the model."""

    prompt: Text = ""
    system: Text | None = None
    images: Images | None = None
    context: Tokens | None = Field(None, description="Tokens of an earlier response to continue")
    raw: bool | None = Field(None, description="Use the prompt without a template")
    suffix: Text | None = Field(
        None, description="Text behind the answer, for models that can fill in the middle"
    )

    @model_validator(mode="after")
    def _a_gap_has_no_conversation(self) -> OllamaGenerateRequest:
        if self.suffix and (self.images or self.context):
            raise Unsupported(
                "`suffix` asks for the text of a gap: leave `images` and `context` out",
                param="suffix",
            )
        return self

    @model_validator(mode="after")
    def _images_have_a_conversation(self) -> OllamaGenerateRequest:
        if self.images and (self.context or self.raw):
            raise Unsupported(
                "images need a conversation: leave `context` and `raw` out, or use /api/chat",
                param="images",
            )
        return self


class OllamaEmbedRequest(StrictModel):
    """POST /api/embed, and the older /api/embeddings with `prompt`."""

    model: str | None = None
    input: Annotated[
        str | Annotated[list[str], Field(fail_fast=True)],
        takes("a string, or a list of strings"),
        BeforeValidator(limit_text),
        BeforeValidator(limit_inputs),
    ] = Field(default_factory=list)
    prompt: Text | None = None
    truncate: bool | None = Field(None, description="False: refuse an input that is too long")
    dimensions: Count | None = None
    keep_alive: KeepAlive | None = None

    @property
    def inputs(self) -> list[str]:
        if self.prompt is not None:
            return [self.prompt]
        return [self.input] if isinstance(self.input, str) else self.input


class ModelRequest(StrictModel):
    """Names a model. Older clients send `name`."""

    model: str | None = None
    name: str | None = None
    stream: bool | None = None

    @property
    def named(self) -> str | None:
        return self.model or self.name
