"""Lists the fields of OpenAI's, vLLM's and llama.cpp's completions that are not served here."""

from __future__ import annotations

from rekindle.api.base.known_fields import (
    LLAMA_SERVER,
    VLLM,
    FieldTable,
    Ignored,
    Refused,
)

TEMPLATE = "the model's own chat template is always used: remove"
NO_TEXT_TOOLS = "text completions call no tools: use /v1/chat/completions, or remove"

#: Fields of OpenAI's API.
OPENAI: FieldTable = {
    "audio": Refused("audio is not supported: remove"),
    "modalities": Refused("answers are only text: remove", (["text"], [])),
    "web_search_options": Refused("there is no web search: remove"),
    "prediction": Ignored("it makes a reply faster and does not change it"),
    "service_tier": Ignored("there is one tier"),
    "user": Ignored("API keys identify users"),
    "safety_identifier": Ignored("API keys identify users"),
    "verbosity": Ignored("templates have no such setting", ("medium",)),
    "stream_options.include_obfuscation": Ignored("chunks are not padded", (False,)),
}
CHAT_FIELDS: FieldTable = {
    "echo": Refused("only /v1/completions echoes the prompt: remove", (False,)),
    "best_of": Refused("only /v1/completions ranks answers: use `n` instead of", (1,)),
    "suffix": Refused("filling in the middle is for /v1/completions: remove", ("",)),
    **OPENAI,
    **VLLM,
    **LLAMA_SERVER,
    "chat_template": Refused(TEMPLATE),
    "documents": Refused("send documents in `messages` instead of", ([],)),
    "add_special_tokens": Refused(TEMPLATE, (False,)),
    "include_reasoning": Refused("reasoning is always returned: remove", (True,)),
    "reasoning_format": Refused(
        "reasoning comes in `reasoning_content`: remove", ("auto", "deepseek")
    ),
    "thinking_forced_open": Refused(
        "the prompt decides whether reasoning is open: remove", (False,)
    ),
    "chat_format": Refused(TEMPLATE),
    "thinking_budget_tokens": Refused("reasoning has no limit of its own: remove", (-1,)),
    "reasoning_budget": Refused("reasoning has no limit of its own: remove", (-1,)),
    "reasoning_in_content": Refused("reasoning comes in `reasoning_content`: remove", (False,)),
    "parse_tool_calls": Refused("tool calls are always parsed: remove", (True,)),
}
COMPLETION_FIELDS: FieldTable = {
    **OPENAI,
    **VLLM,
    **LLAMA_SERVER,
    "store": Ignored("text completions are not stored; chat completions are", (False,)),
    "metadata": Ignored("it describes stored completions"),
    "chat_template": Refused(TEMPLATE),
    "add_special_tokens": Refused(
        "a prompt of text begins with BOS: send token ids or remove", (True,)
    ),
    "resize": Refused("text completions take no images: use /v1/chat/completions, or remove"),
    "tools": Refused(NO_TEXT_TOOLS, ([],)),
    "functions": Refused(NO_TEXT_TOOLS, ([],)),
    "function_call": Refused(NO_TEXT_TOOLS, ("none", "auto")),
    "tool_choice": Refused(NO_TEXT_TOOLS, ("none", "auto")),
}
