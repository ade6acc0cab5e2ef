"""What the front asks of a runtime: load a model, generate a reply, give one up, stop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from msgspec import Struct, structs

from rekindle.protocol.media import Picture
from rekindle.protocol.settings import Normalise, RuntimeSettings

#: Environment variable that names the module of an engine from outside the package.
ENGINE_MODULE = "REKINDLE_ENGINE_MODULE"


class LoadModel(Struct, tag=True, kw_only=True):
    """The first message: which model to load, and with which settings."""

    path: str
    mmproj: str | None = None  # the file of the model's projector, which encodes pictures
    adapter: str | None = None  # a folder of weights trained on top of the model's
    requires_vision: bool = True  # False: without a usable projector, load it text-only
    is_embedder: bool = False  # it is to make vectors or scores, and no text
    served: list[str] = []  # `files` of all models of this server, which share the disk budget
    settings: RuntimeSettings

    @property
    def files(self) -> str:
        """What tells models apart: one that sees, or has an adapter, is another than the same
        without."""
        return " ".join(part for part in (self.path, self.mmproj, self.adapter) if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen; `temperature` 0 is greedy."""

    temperature: float = 0.7
    top_p: float = 0.9
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    repetition_context_size: int = 20
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    top_logprobs: int | None = None  # None: no logprobs; 0: the chosen token's alone


class Names(Struct, kw_only=True):
    """What a request calls the state it goes on from, and what its own is to be called."""

    cache_key: str | None = None
    return_cache_key: bool = False
    session_id: str | None = None
    session_number: int | None = None  # `kv_cache_session_id`
    message_ids: list[str] = []  # newest first
    wants_message_id: bool = False
    message_id: str | None = None  # what its reply is to be called; None: an id of its own
    prompt_cache_key: str | None = None
    by_fingerprint: bool = False  # `--force-cache`: a conversation without a name gets one
    entry_key: str | None = None  # the key that its entry is to have
    ttl_s: float | None = None  # None: the default of its kind
    in_memory: bool = False  # never written to disk
    pin_s: float | None = None  # it is pinned for so long, if there is room for it


class Prepare(Struct, kw_only=True):
    """Compute the prompt, sample nothing, and keep its state as an entry."""

    pinned: bool = False
    ttl_s: float | None = 1800.0
    shared: bool = False  # for every tenant; the operator's own prompts only


class ToolUse(Struct, frozen=True, kw_only=True):
    """Which of the request's tools the reply may call, or has to."""

    choice: Literal["none", "auto", "required"] = "auto"
    name: str | None = None  # with "required": this one
    parallel: bool = True  # more than one call in a reply


class StructuredOutput(Struct, kw_only=True):
    """What the reply's text has to be: JSON, unless one of the others is given."""

    schema: dict[str, Any] | bool | None = None  # of the JSON; None: any object
    regex: str | None = None
    choices: list[str] | None = None  # one of these texts
    grammar: str | None = None  # in GBNF or Lark
    param: str = "response_format"  # the request's field that asks for it


class Choice(Struct, kw_only=True):
    """One more reply to the same prompt: what sets its turn apart from the first."""

    turn: int = 0
    seed: int | None = None
    names: Names | None = None


class GenerateRequest(Struct, tag=True, kw_only=True):
    """One turn: a chat (`messages`) or a completion (`prompt`: text, or token ids).

    With `more_choices` it is a turn for each of them as well; the prompt travels once.
    """

    turn: int
    more_choices: list[Choice] = []
    messages: list[dict[str, Any]] | None = None
    pictures: list[Picture] = []  # of the messages' image parts, in order
    tools: list[Any] | None = None
    loaded_tools: list[Any] = []  # that may be called as well: messages describe them
    tool_use: ToolUse = ToolUse()
    structured_output: StructuredOutput | None = None
    priority: int = 0  # higher goes first
    normalise: Normalise = True
    names: Names | None = None
    prepare: Prepare | None = None
    prompt: str | list[int] | None = None
    template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True  # the template's beginning of a reply
    continue_final_message: bool = False  # no end of the last message, so that the reply goes on
    sampling: SamplingParams
    max_tokens: int | None
    stop: list[str] = []
    ignore_eos: bool = False
    reuse: bool = True
    exact: bool = False
    kv_bits: int | None = None  # of KV cells; None: of the usual ones
    kv_group_size: int | None = None  # of values that share a scale; None: the engine's choice
    kv_quantization_start: int = 5000  # tokens that have the usual cells nevertheless
    salt: bytes = b""
    progress: bool = False
    received_s: float | None = None  # on the machine's monotonic clock
    request_id: str | None = None  # of the HTTP request, for the log

    @property
    def source(self) -> str:
        """The request's field that the prompt comes from."""
        return "messages" if self.prompt is None else "prompt"

    @property
    def turns(self) -> list[int]:
        return [self.turn, *(choice.turn for choice in self.more_choices)]

    def with_turn_ids(self, ids: Iterator[int]) -> GenerateRequest:
        """With a number for each turn."""
        more = [structs.replace(choice, turn=next(ids)) for choice in self.more_choices]
        return structs.replace(self, turn=next(ids), more_choices=more)

    def choices(self) -> list[GenerateRequest]:
        """A request for each turn; they share one prompt."""
        return [
            structs.replace(self, more_choices=[]),
            *(self._chosen(choice) for choice in self.more_choices),
        ]

    def _chosen(self, choice: Choice) -> GenerateRequest:
        sampling = replace(self.sampling, seed=choice.seed)
        return structs.replace(
            self, turn=choice.turn, names=choice.names, sampling=sampling, more_choices=[]
        )


class Cancel(Struct, tag=True):
    turn: int


class Stop(Struct, tag=True):
    """Finish nothing more, keep what there is, end the process."""
