"""Lists the standard tests of LangChain that cannot pass here, with reasons."""

from __future__ import annotations

WITS = (
    "the model has to understand the question: its arguments are compared, or its choice of a tool"
)
NO_CHOICE = (
    "ChatOllama drops `tool_choice`, as Ollama's API has none: the model has to choose by itself"
)
NO_MEDIA = "asks for a picture, a sound or a PDF from a public host"
KEYS = "with a JSON mode that knows no schema the model has to find the keys by itself"
TIMING = "measures time, by recordings of a paid service"

EVERYWHERE = {
    "test_tool_calling": WITS,
    "test_tool_calling_async": WITS,
    "test_tool_calling_with_no_arguments": WITS,
    "test_agent_loop": WITS,
    "test_bind_runnables_as_tools": WITS,
    "test_unicode_tool_call_integration": WITS,
    "test_json_mode": KEYS,
    "test_pdf_inputs": NO_MEDIA,
    "test_audio_inputs": NO_MEDIA,
    "test_image_inputs": NO_MEDIA,
    "test_image_tool_message": NO_MEDIA,
    "test_pdf_tool_message": NO_MEDIA,
    "test_stream_time": TIMING,
}
LEFT_OUT = {
    "TestChatOpenAI": {
        **EVERYWHERE,
        "test_anthropic_inputs": "sends blocks of Anthropic's API, which chat completions have not",
    },
    "TestChatAnthropic": EVERYWHERE,
    "TestChatOllama": {
        **EVERYWHERE,
        "test_tool_choice": NO_CHOICE,
        "test_anthropic_inputs": "sends blocks of Anthropic's API, which Ollama's has not",
    },
}


def reason_for(test: str) -> str | None:
    """The key has the format `file::class::test[parameters]`."""
    *_, suite, name = test.partition("[")[0].split("::")
    return LEFT_OUT.get(suite, {}).get(name)
