"""Requests as Ollama's clients send them: known fields are checked, unknown ones ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from rekindle.api.base.fields import (
    MOST_TOKENS,
    WHOLE,
    Seed,
    Stop,
    Tokens,
    bounded_text,
    shallow,
    takes,
)
from rekindle.api.base.messages import MOST_MESSAGES, Arguments, bounded
from rekindle.api.base.tools import Tools
from rekindle.errors import Unsupported
from rekindle.protocol.requests import StructuredOutput

MOST_IMAGES = 64  # of one message

Text = Annotated[str, BeforeValidator(bounded_text)]
Format = Annotated[
    Literal["", "json"] | dict[str, Any],
    takes('"json", or a JSON schema, which is an object'),
    AfterValidator(shallow),
]
Think = Annotated[
    bool | Literal["low", "medium", "high"], takes('true, false, "low", "medium" or "high"')
]
KeepAlive = Annotated[str | float, takes('a duration: seconds, or a text like "5m"')]
Count = Annotated[int, Field(ge=-2, le=MOST_TOKENS), WHOLE]


class _Form(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())


class Options(_Form):
    """How tokens are chosen; None: as the server is configured. What concerns the loading of a
    model (`num_ctx`, `num_gpu`, …) was decided when the server was started."""

    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: Annotated[int, Field(ge=-1, le=MOST_TOKENS), WHOLE] | None = None
    min_p: float | None = Field(None, ge=0, le=1)
    repeat_penalty: float | None = Field(None, gt=0, le=100)
    repeat_last_n: Annotated[int, Field(ge=-1, le=MOST_TOKENS), WHOLE] | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: Seed | None = None
    num_predict: Count | None = None
    stop: Stop | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())


class RequestBase(_Form):
    """What /api/chat and /api/generate have in common."""

    model: str | None = None
    stream: bool | None = None
    format: Format | None = None
    options: Options | None = None
    think: Think | None = None
    keep_alive: KeepAlive | None = None

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
        """Nothing where a client says nothing: then the prompt is that of other dialects."""
        if self.think is None:
            return {}
        if isinstance(self.think, str):
            return {"enable_thinking": True, "reasoning_effort": self.think}
        return {"enable_thinking": self.think}

    @property
    def unloads(self) -> bool:
        """Whether a request without a prompt asks for the model to be unloaded."""
        return self.keep_alive in (0, "0", "0s", "0m")


class CalledFunction(_Form):
    name: str
    arguments: Arguments = Field(default_factory=dict)


class ToolCall(_Form):
    function: CalledFunction


Images = Annotated[list[Text], Field(max_length=MOST_IMAGES, fail_fast=True)]


class OllamaMessage(_Form):
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    images: Images | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_name: str | None = None

    @model_validator(mode="after")
    def _shown_by_others(self) -> OllamaMessage:
        if self.images and self.role == "assistant":
            raise ValueError("takes text alone, as the assistant's do: leave out `images`")
        return self


OllamaMessages = Annotated[
    list[OllamaMessage],
    Field(max_length=MOST_MESSAGES, fail_fast=True),
    BeforeValidator(bounded),
]


class OllamaChatRequest(RequestBase):
    """POST /api/chat; without messages it asks whether the model is there."""

    messages: OllamaMessages = Field(default_factory=list)
    tools: Tools | None = None


class OllamaGenerateRequest(RequestBase):
    """POST /api/generate; without a prompt it asks whether the model is there."""

    prompt: Text = ""
    system: Text | None = None
    images: Images | None = None
    context: Tokens | None = Field(None, description="That of an earlier answer, to go on from")
    raw: bool | None = Field(None, description="The prompt as it is, without a template")
    suffix: str | None = None
    template: str | None = None

    @model_validator(mode="after")
    def _served(self) -> OllamaGenerateRequest:
        for name, instead in (
            ("suffix", "filling in the middle is not supported: remove"),
            ("template", "a template of your own is not taken, the model has one: remove"),
        ):
            if getattr(self, name):
                raise Unsupported(f"{instead} `{name}`", param=name)
        if self.images and (self.context or self.raw):
            raise Unsupported(
                "pictures go with a conversation: leave `context` and `raw` out, or use /api/chat",
                param="images",
            )
        return self


class OllamaEmbedRequest(_Form):
    """POST /api/embed, and its older form /api/embeddings with `prompt`."""

    model: str | None = None
    input: Annotated[
        Text | Annotated[list[Text], Field(fail_fast=True)], takes("a string, or a list of strings")
    ] = Field(default_factory=list)
    prompt: Text | None = None
    truncate: bool | None = Field(None, description="False: an input that is too long is refused")
    dimensions: Annotated[int, Field(ge=1, le=MOST_TOKENS), WHOLE] | None = None
    keep_alive: KeepAlive | None = None

    @property
    def inputs(self) -> list[str]:
        if self.prompt is not None:
            return [self.prompt]
        return [self.input] if isinstance(self.input, str) else self.input


class ModelRequest(_Form):
    """What names a model; older clients say `name`."""

    model: str | None = None
    name: str | None = None
    stream: bool | None = None

    @property
    def named(self) -> str | None:
        return self.model or self.name
