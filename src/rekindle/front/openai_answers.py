"""Describes the answers of OpenAI's API, and of endpoints that llama.cpp's server and vLLM add.

The dialects build their answers without these types, because validating what the server itself
writes would only cost time. `tests/front/test_openapi.py` compares real answers with them, and
`fields.yaml` describes their fields. `openapi.py` imports this module when the document is first
asked for, so that it does not slow down the start.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from rekindle.protocol.events import Divergence, FinishReason, Reason, Status


class XCache(TypedDict):
    """What a request reused of stored state, and why not more.

    Several prompts in one request are added up. The reason is that of the first prompt that is not
    a full hit.
    """

    hit: bool
    status: Status
    cache_key: str | None
    reused_tokens: int
    new_cache_key: str | None
    cached_tokens: int
    reason: Reason
    tier: str | None
    kv_bits: int | None
    kv_group_size: NotRequired[int]
    diverged_at: NotRequired[Divergence]
    normalised: NotRequired[list[str]]


# -- OpenAI's chat and text completions -----------------------------------------------------------


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    reasoning_tokens: int


class FirstTokenTime(TypedDict):
    """Seconds that each stage took until the first token, in the order of the stages."""

    front: float
    encode: float
    queue: float
    plan: float
    restore: float
    compute: float
    first_byte: NotRequired[float]


class CompletionUsage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
    prompt_eval_time: float
    first_token_time: NotRequired[FirstTokenTime]


class Timings(TypedDict):
    """llama.cpp's timings."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class TokenAlternative(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class TokenWithLogprob(TokenAlternative):
    top_logprobs: list[TokenAlternative]


class ChatLogprobs(TypedDict):
    content: list[TokenWithLogprob]
    refusal: None


class GeneratedFunction(TypedDict):
    name: str
    arguments: str


class GeneratedCustom(TypedDict):
    name: str
    input: str


class GeneratedCall(TypedDict):
    id: str
    type: Literal["function", "custom"]
    function: NotRequired[GeneratedFunction]
    custom: NotRequired[GeneratedCustom]


class GeneratedMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[GeneratedCall]]
    refusal: None
    message_id: NotRequired[str]


class ChatChoice(TypedDict):
    index: int
    message: GeneratedMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class Completion(TypedDict):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: CompletionUsage
    x_cache: XCache
    timings: Timings


class ChatCompletion(Completion):
    """The answer of /v1/chat/completions.

    A stream has the same fields in chunks, with `delta` in place of `message`. If the request has a
    field about reuse, the stream ends with the event `x_cache`.
    """

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    store: NotRequired[bool]
    durable: NotRequired[bool]


class StoredChatCompletion(TypedDict):
    """A stored chat completion, with settings of its request."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: CompletionUsage
    metadata: dict[str, str]
    seed: int | None
    temperature: float | None
    top_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    tools: list[dict[str, Any]] | None
    tool_choice: Any
    response_format: dict[str, Any] | None
    durable: NotRequired[bool]


class StoredChatCompletionList(TypedDict):
    """A page of stored chat completions."""

    object: Literal["list"]
    data: list[StoredChatCompletion]
    first_id: str | None
    last_id: str | None
    has_more: bool


class TextLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(TypedDict):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason


class TextCompletion(Completion):
    """The answer of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


# -- models, embeddings, ranking and tokens -------------------------------------------------------


class ModelMeta(TypedDict):
    n_ctx: int
    n_vocab: int


class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    status: Literal["loaded", "loading", "unloaded", "failed"]
    aliases: list[str]
    modalities: list[str] | None
    max_model_len: int | None
    meta: ModelMeta | None
    dimensions: NotRequired[int]


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[Model]
    models: list[dict[str, Any]]


class EmbedderUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Embedding(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(TypedDict):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbedderUsage


class RankedText(TypedDict):
    text: str


class RankedDocument(TypedDict):
    index: int
    relevance_score: float
    document: NotRequired[RankedText]


class ScoredText(TypedDict):
    """One of the `texts` of a request in the form of text-embeddings-inference."""

    index: int
    score: float
    text: NotRequired[str]


class RankedDocuments(TypedDict):
    object: Literal["list"]
    model: str
    results: list[RankedDocument]
    usage: EmbedderUsage


class TokenPiece(TypedDict):
    id: int
    piece: str | list[int]


class TokenList(TypedDict):
    tokens: list[int | TokenPiece]
    count: int
    max_model_len: int
    token_strs: NotRequired[list[str]]


class DetokenizedText(TypedDict):
    content: str
    prompt: str


class RenderedPrompt(TypedDict):
    prompt: str


ProblemCode = Literal[
    "model_loading",
    "model_restarting",
    "model_failed",
    "engine_stuck",
    "encoders_stuck",
    "disk_cache_off",
]


class HealthProblem(TypedDict):
    """Something that is wrong with one model."""

    model: str
    code: ProblemCode
    message: str


class Health(TypedDict):
    """Whether all models answer."""

    status: Literal["ok", "degraded", "unavailable"]
    reason: NotRequired[str]
    problems: NotRequired[list[HealthProblem]]


class Props(TypedDict):
    """The model's properties, as llama.cpp's server reports them."""

    default_generation_settings: dict[str, Any]
    total_slots: int
    model_alias: str
    model_path: str
    modalities: dict[str, bool]
    chat_template: str
    bos_token: str | None
    eos_token: str | None
    build_info: str
    is_sleeping: bool


# -- OpenAI's Responses ---------------------------------------------------------------------------


class InputTokens(TypedDict):
    input_tokens: int


class ResponseInputTokens(InputTokens):
    object: Literal["response.input_tokens"]


class Response(TypedDict):
    """A response. It repeats the fields of its request, with defaults filled in."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: str
    model: str
    output: list[dict[str, Any]]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    usage: dict[str, Any] | None
    store: bool
    durable: NotRequired[bool]
    previous_response_id: str | None
    conversation: dict[str, Any] | None
    x_cache: NotRequired[XCache]
    prompt_cache_diagnostics: NotRequired[dict[str, Any]]


class Deleted(TypedDict):
    id: str
    object: str
    deleted: Literal[True]
    durable: NotRequired[bool]


class ItemList(TypedDict):
    """A page of items."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    durable: NotRequired[bool]


class Compaction(TypedDict):
    """A conversation in which a summary stands for the assistant's part."""

    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[dict[str, Any]]
    usage: dict[str, Any]


class StoredConversation(TypedDict):
    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]
    durable: NotRequired[bool]


class StoredItem(TypedDict):
    """An item of a conversation, with the fields of its type."""

    id: str
    type: str
