"""Defines the requests of the front to a runtime, and the images that travel with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from blake3 import blake3
from msgspec import Struct, structs

from rekindle.protocol.settings import Normalise, RuntimeSettings

TEXT = "text"
IMAGE = "image"
CHANNELS = 3  # red, green and blue, one byte each


class Picture(Struct, frozen=True):
    """A picture as the runtime gets it: decoded, upright, on a white background, resized."""

    width: int
    height: int
    pixels: bytes  # RGB, 8 bits per channel, row by row
    digest: bytes  # equal pictures have equal digests


def picture(width: int, height: int, pixels: bytes) -> Picture:
    if len(pixels) != width * height * CHANNELS:
        raise ValueError(f"a picture of {width} x {height} cannot have {len(pixels)} bytes")
    return Picture(width, height, pixels, picture_digest(width, height, pixels))


def picture_digest(width: int, height: int, pixels: bytes) -> bytes:
    """Hash the size and the pixels (BLAKE3), so that 2 x 8 pixels differ from 4 x 4."""
    size = width.to_bytes(4, "little") + height.to_bytes(4, "little")
    return blake3(size).update(pixels).digest()


def count_images(messages: list[dict[str, Any]]) -> int:
    """Count the image parts. The n-th part stands for the n-th picture of the request."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return sum(part.get("type") == IMAGE for part in parts if isinstance(part, dict))


#: Environment variable with the name of an engine module outside this package.
ENGINE_MODULE = "REKINDLE_ENGINE_MODULE"


class LoadModel(Struct, tag=True, kw_only=True):
    """The first message: the model to load and its settings."""

    path: str
    mmproj: str | None = None  # file of the vision projector
    adapter: str | None = None  # LoRA adapter: a GGUF file, or a folder for MLX
    name: str = ""  # of a model that shares its files with another one
    memory_bytes: int | None = None  # the free memory counts as this much at most
    requires_vision: bool = True  # False: without a usable projector, load it text-only
    is_embedder: bool = False  # load it for vectors or scores instead of text
    served: list[str] = []  # `files` of all models of this server; they share the budgets
    settings: RuntimeSettings

    @property
    def files(self) -> str:
        """Identifies the model. The same weights with a projector or adapter are another model."""
        parts = (self.path, self.mmproj, self.adapter, self.name)
        return " ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the sampler chooses tokens. A `temperature` of 0 is greedy."""

    temperature: float = 0.7
    top_p: float = 0.9
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    repetition_context_size: int = 20
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0  # 0: no DRY penalty
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1  # -1: the whole context
    dry_sequence_breakers: Sequence[str] = ("\n", ":", '"', "*")
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    text_bias: Sequence[tuple[str, float]] = ()  # for every token of a text
    bad_words: Sequence[str] = ()
    min_tokens: int = 0  # the reply cannot end before it has this many tokens
    seed: int | None = None
    top_logprobs: int | None = None  # None: no logprobs; 0: only the sampled token's
    # Set by the runtime, which knows the vocabulary.
    dry_breakers: Sequence[Sequence[int]] = ()  # tokens of `dry_sequence_breakers`
    bad_words_tokens: Sequence[Sequence[int]] = ()
    end_tokens: Sequence[int] = ()  # banned up to `min_tokens`

    @property
    def has_penalties(self) -> bool:
        """Whether the logit of a token depends on the tokens before it."""
        return bool(
            self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.dry_multiplier
        )


class Names(Struct, kw_only=True):
    """The names in a request: of the state to reuse, and of the state that the turn leaves."""

    cache_key: str | None = None
    return_cache_key: bool = False
    session_id: str | None = None
    session_number: int | None = None  # `kv_cache_session_id`
    message_ids: list[str] = []  # newest first
    wants_message_id: bool = False
    message_id: str | None = None  # id for the reply; None: generate one
    prompt_cache_key: str | None = None
    by_fingerprint: bool = False  # `--force-cache`: name the conversation by its content
    entry_key: str | None = None  # cache key for the new entry
    ttl_s: float | None = None  # None: the default for this kind of name
    in_memory: bool = False  # never written to disk
    pin_s: float | None = None  # pin the entry for this time, if the budget for pins allows it


class Prepare(Struct, kw_only=True):
    """Compute the prompt without sampling, and keep its state as an entry."""

    pinned: bool = False
    ttl_s: float | None = 1800.0
    #: All tenants may reuse it, or those of the group with this name. Only for the operator.
    shared: bool | str = False
    project: str | None = None  # name under `projects:`; clients may send it as a cache key


class ToolUse(Struct, frozen=True, kw_only=True):
    """Which tools of the request the reply may or must call."""

    choice: Literal["none", "auto", "required"] = "auto"
    name: str | None = None  # with "required": call this tool
    parallel: bool = True  # allow several calls in one reply
    max_calls: int | None = None  # None: any number


class StructuredOutput(Struct, kw_only=True):
    """The format of the reply's text: JSON, unless one of the other fields is set."""

    schema: dict[str, Any] | bool | None = None  # JSON schema; None: any object
    regex: str | None = None
    choices: list[str] | None = None  # the reply is one of these texts
    grammar: str | None = None  # in GBNF or Lark
    param: str = "response_format"  # the request field, for error messages


class ExtraFile(Struct):
    """A file, or a part of one, that helps to fill a gap in another file."""

    filename: str
    text: str


class Infill(Struct, kw_only=True):
    """The text around a gap (fill in the middle). The prompt is the start of what goes into it."""

    prefix: str = ""
    suffix: str = ""
    extra: list[ExtraFile] = []


class Choice(Struct, kw_only=True):
    """Another reply to the same prompt, with the fields that differ from the first reply."""

    turn: int = 0
    seed: int | None = None
    names: Names | None = None


class GenerateRequest(Struct, tag=True, kw_only=True):
    """One turn: a chat (`messages`) or a completion (`prompt`: text, token ids, or both mixed).

    `more_choices` adds one turn per choice. They share the prompt, which travels only once.
    """

    turn: int
    more_choices: list[Choice] = []
    messages: list[dict[str, Any]] | None = None
    pictures: list[Picture] = []  # one per image part of the messages, in order
    tools: list[Any] | None = None
    loaded_tools: list[Any] = []  # tools that the messages describe; they may be called too
    tool_use: ToolUse = ToolUse()
    structured_output: StructuredOutput | None = None
    priority: int = 0  # among the turns of one tenant, those of higher priority run first
    outranks: bool = False  # sent with an admin key: its priority counts against other tenants too
    normalise: Normalise = True
    names: Names | None = None
    prepare: Prepare | None = None
    prompt: str | list[int | str] | None = None
    infill: Infill | None = None  # the prompt is text within a gap
    template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True  # end the prompt with the template's start of a reply
    continue_final_message: bool = False  # leave the last message open; the reply continues it
    sampling: SamplingParams
    max_tokens: int | None
    stop: list[str] = []
    stop_token_ids: list[int] = []  # end tokens in addition to the model's
    truncate_prompt_tokens: int | None = None  # keep this many last tokens; -1: as many as fit
    ignore_eos: bool = False
    reuse: bool = True
    exact: bool = False
    kv_bits: int | None = None  # of the KV cache; None: the default KV type
    kv_group_size: int | None = None  # values per scale; None: the engine's default
    kv_quantization_start: int = 5000  # up to this length the default KV type is used
    salt: bytes = b""  # of the tenant
    groups: list[str] = []  # of the tenant, which may reuse their shared prompts
    cache_bytes: int | None = None  # that the tenant's stored state may take; None: any
    progress: bool = False
    returns_tokens: bool = False  # TextDelta has the ids of its tokens
    returns_prompt: bool = False  # Started has the text of the prompt
    max_generate_s: float | None = None  # ends a reply with a line break after this time
    received_s: float | None = None  # on the machine's monotonic clock
    request_id: str | None = None  # of the HTTP request, for the log

    @property
    def source(self) -> str:
        """The request field that holds the prompt, for error messages."""
        return "messages" if self.prompt is None else "prompt"

    @property
    def turns(self) -> list[int]:
        return [self.turn, *(choice.turn for choice in self.more_choices)]

    def with_turn_ids(self, ids: Iterator[int]) -> GenerateRequest:
        more = [structs.replace(choice, turn=next(ids)) for choice in self.more_choices]
        return structs.replace(self, turn=next(ids), more_choices=more)

    def choices(self) -> list[GenerateRequest]:
        """Return one request per turn. They share one prompt."""
        if not self.more_choices:
            return [self]
        first = structs.replace(self, more_choices=[])
        others = (
            structs.replace(
                first,
                turn=choice.turn,
                names=choice.names,
                sampling=replace(self.sampling, seed=choice.seed),
            )
            for choice in self.more_choices
        )
        return [first, *others]


class EmbedderRequest(Struct, kw_only=True):
    turn: int = 0
    reuse: bool = True
    salt: bytes = b""  # of the tenant
    request_id: str | None = None  # of the HTTP request, for the log

    @property
    def turns(self) -> list[int]:
        return [self.turn]

    def with_turn_ids(self, ids: Iterator[int]) -> Self:
        return structs.replace(self, turn=next(ids))


class EmbedRequest(EmbedderRequest, tag=True, kw_only=True):
    """Asks for one vector per input: a text, or token ids and texts. Ends with Embedded."""

    inputs: list[str | list[int | str]]
    truncate: bool = False  # shorten a text that is longer than the context; False: refuse it
    dimensions: int | None = None  # truncate each vector and normalise it again; None: keep all
    batch_size: int | None = None  # maximum number of inputs of this request in one batch


class RankRequest(EmbedderRequest, tag=True, kw_only=True):
    """Asks for one relevance score per document. Ends with Ranked."""

    query: str
    documents: list[str]


class Cancel(Struct, tag=True):
    turn: int


class Stop(Struct, tag=True):
    """Cancel all turns, keep their state, and end the process."""


def levels(value: Any) -> Iterator[list[Any]]:
    """Yield the values of each nesting level, starting with the value itself."""
    level = [value]
    while level:
        yield level
        level = [inner for outer in level for inner in _children(outer)]


def depth_exceeds(value: Any, limit: int) -> bool:
    """Whether a value has more than `limit` levels. A string or a number has one level."""
    return any(depth > limit for depth, _ in enumerate(levels(value), start=1))


def _children(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else []
