"""What the front asks of a runtime: load a model, generate a reply, give one up, stop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec import Struct

WritePolicy = Literal["always", "named", "on-evict"]


class LoadModel(Struct, tag=True, kw_only=True):
    """The first message: which model to load, and within what limits."""

    path: str
    parallel: int
    context_tokens: int | None
    kv_fraction: float
    threads: int
    gpu_layers: int | None
    ram_bytes: int
    kv_type: str = "f16"  # of the engine's KV cells: "f16" or "q8_0"
    disk_bytes: int = 0  # 0: nothing is kept on disk
    disk_floor_bytes: int = 0  # free space that is left to others
    cache_dir: str = ""
    cache_secret_file: str | None = None  # None: the cache folder has a secret of its own
    write_policy: WritePolicy = "always"
    key_ttl_s: float | None = 1800.0  # of entries whose key a client asked for
    served: list[str] = []  # all models of this server, which share the disk budget
    tool_format: str | None = None  # None: the one that the model's template speaks of
    reasoning_format: str | None = None


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
    prompt_cache_key: str | None = None
    by_fingerprint: bool = False  # `--force-cache`: a conversation without a name gets one
    ttl_s: float | None = None  # None: the default of its kind
    in_memory: bool = False  # never written to disk


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
    """What the reply's text has to be: any JSON object, or JSON that a schema describes."""

    schema: dict[str, Any] | bool | None = None  # None: any object


class GenerateRequest(Struct, tag=True, kw_only=True):
    """One turn: a chat (`messages`) or a completion (`prompt`: text, or token ids)."""

    turn: int
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    tool_use: ToolUse = ToolUse()
    structured_output: StructuredOutput | None = None
    priority: int = 0  # higher goes first
    normalise: bool = True  # volatile headers that clients put at the top
    names: Names | None = None
    prepare: Prepare | None = None
    prompt: str | list[int] | None = None
    template_kwargs: dict[str, Any] = {}
    sampling: SamplingParams
    max_tokens: int | None
    stop: list[str] = []
    ignore_eos: bool = False
    reuse: bool = True
    exact: bool = False
    salt: bytes = b""
    progress: bool = False

    @property
    def source(self) -> str:
        """The request's field that the prompt comes from."""
        return "messages" if self.prompt is None else "prompt"


class Cancel(Struct, tag=True):
    turn: int


class Stop(Struct, tag=True):
    """Finish nothing more, keep what there is, end the process."""
