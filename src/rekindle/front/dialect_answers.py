"""Describes the answers of Anthropic's and Ollama's APIs, and lists those of all operations."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from rekindle.front.openai_answers import (
    ChatCompletion,
    Compaction,
    Deleted,
    DetokenizedText,
    EmbeddingList,
    Health,
    InputTokens,
    ItemList,
    Model,
    ModelList,
    Props,
    RankedDocuments,
    RenderedPrompt,
    Response,
    ResponseInputTokens,
    ScoredText,
    StoredChatCompletion,
    StoredChatCompletionList,
    StoredConversation,
    StoredItem,
    TextCompletion,
    TokenList,
    TokenWithLogprob,
    XCache,
)

# -- Anthropic's Messages -------------------------------------------------------------------------


class CacheCreation(TypedDict):
    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class ThinkingTokens(TypedDict):
    thinking_tokens: int


class MessageUsage(TypedDict):
    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    cache_creation: CacheCreation
    service_tier: str
    output_tokens: int
    output_tokens_details: ThinkingTokens


class MessageAnswer(TypedDict):
    """The answer of /v1/messages. A stream sends it as Anthropic's events."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str
    stop_sequence: str | None
    usage: MessageUsage
    diagnostics: dict[str, Any] | None
    x_cache: XCache


# -- Ollama ---------------------------------------------------------------------------------------


class OllamaAnswer(TypedDict):
    model: str
    created_at: str
    done: bool
    done_reason: NotRequired[str]
    logprobs: NotRequired[list[TokenWithLogprob]]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]
    x_cache: NotRequired[XCache]


class OllamaAnsweredMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]


class OllamaChat(OllamaAnswer):
    """The answer of /api/chat with `stream: false`. A stream ends with a line of this form."""

    message: OllamaAnsweredMessage


class OllamaGeneration(OllamaAnswer):
    """The answer of /api/generate with `stream: false`. A stream ends with a line of this form."""

    response: str
    thinking: NotRequired[str]
    context: NotRequired[list[int]]


class OllamaVersion(TypedDict):
    version: str


class OllamaModels(TypedDict):
    models: list[dict[str, Any]]


class OllamaModel(TypedDict):
    """A model, as Ollama describes it."""

    modelfile: str
    parameters: str
    system: NotRequired[str]
    template: str
    details: dict[str, Any]
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaEmbeddings(TypedDict):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(TypedDict):
    embedding: list[float]


class OllamaStatus(TypedDict):
    status: str


# -- llama.cpp ------------------------------------------------------------------------------------


class NativeCompletion(TypedDict, total=False):
    """An answer of /completion or /infill. With `response_fields` it has only those."""

    index: int
    content: str
    tokens: list[int]
    id_slot: int
    stop: bool
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    generation_settings: dict[str, Any]
    prompt: str
    has_new_line: bool
    truncated: bool
    stop_type: Literal["eos", "word", "limit"]
    stopping_word: str
    timings: dict[str, Any]
    completion_probabilities: list[dict[str, Any]]
    x_cache: XCache


#: Several prompts or answers are a list.
NativeCompletions = NativeCompletion | list[NativeCompletion]


class NativeVector(TypedDict):
    index: int
    embedding: list[list[float]]


class NativeSlot(TypedDict):
    """A place in the batch."""

    id: int
    n_ctx: int
    speculative: bool
    is_processing: bool


class NoSlot(TypedDict):
    """Slots cannot be changed, so there is no such answer."""


#: The body of an answer with status 200, by operation.
ANSWERS: dict[str, Any] = {
    "POST /v1/chat/completions": ChatCompletion,
    "GET /v1/chat/completions": StoredChatCompletionList,
    "GET /v1/chat/completions/{completion_id}": StoredChatCompletion,
    "POST /v1/chat/completions/{completion_id}": StoredChatCompletion,
    "DELETE /v1/chat/completions/{completion_id}": Deleted,
    "GET /v1/chat/completions/{completion_id}/messages": ItemList,
    "POST /v1/completions": TextCompletion,
    "POST /v1/embeddings": EmbeddingList,
    "POST /v1/rerank": RankedDocuments | list[ScoredText],
    "POST /v1/responses": Response,
    "GET /v1/responses/{response_id}": Response,
    "POST /v1/responses/{response_id}/cancel": Response,
    "DELETE /v1/responses/{response_id}": Deleted,
    "GET /v1/responses/{response_id}/input_items": ItemList,
    "POST /v1/responses/input_tokens": ResponseInputTokens,
    "POST /v1/responses/compact": Compaction,
    "POST /v1/conversations": StoredConversation,
    "GET /v1/conversations/{conversation_id}": StoredConversation,
    "POST /v1/conversations/{conversation_id}": StoredConversation,
    "DELETE /v1/conversations/{conversation_id}": Deleted,
    "POST /v1/conversations/{conversation_id}/items": ItemList,
    "GET /v1/conversations/{conversation_id}/items": ItemList,
    "GET /v1/conversations/{conversation_id}/items/{item_id}": StoredItem,
    "DELETE /v1/conversations/{conversation_id}/items/{item_id}": StoredConversation,
    "POST /v1/messages": MessageAnswer,
    "POST /v1/messages/count_tokens": InputTokens,
    "POST /api/chat": OllamaChat,
    "POST /api/generate": OllamaGeneration,
    "GET /api/version": OllamaVersion,
    "GET /api/tags": OllamaModels,
    "GET /api/ps": OllamaModels,
    "POST /api/show": OllamaModel,
    "POST /api/embed": OllamaEmbeddings,
    "POST /api/embeddings": OllamaEmbedding,
    "POST /api/pull": OllamaStatus,
    "POST /api/create": OllamaStatus,
    "POST /api/copy": OllamaStatus,
    "DELETE /api/delete": OllamaStatus,
    "GET /v1/models": ModelList,
    "GET /v1/models/{model}": Model,
    "GET /health": Health,
    "GET /health/ready": Health,
    "GET /props": Props,
    "POST /v1/tokenize": TokenList,
    "POST /v1/detokenize": DetokenizedText,
    "POST /v1/apply-template": RenderedPrompt,
    "POST /completion": NativeCompletions,
    "POST /infill": NativeCompletions,
    "POST /embedding": list[NativeVector],
    "GET /slots": list[NativeSlot],
    "POST /slots/{slot}": NoSlot,
    "GET /lora-adapters": list[dict[str, Any]],
}
