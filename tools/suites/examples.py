"""Runs the uses that the READMEs of the official SDKs begin with, as programs of our own.

The server's addresses are in the environment, as the SDKs expect them. A program prints one line
for each use: `ok` or `FAILED`, and its name.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

import anthropic
import ollama
import openai
from anthropic import beta_tool

from rekindle.media.document import tiny_pdf

MODEL = "default"
QUESTION = "Say hello."
TALK: list[Any] = [{"role": "user", "content": QUESTION}]
LOOK: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at the sky.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
LIMIT = 16  # tokens of each answer


def openai_responses() -> None:
    client = openai.OpenAI()
    answer = client.responses.create(
        model=MODEL, instructions="Be brief.", input=QUESTION, max_output_tokens=LIMIT
    )
    assert answer.output_text
    again = client.responses.create(
        model=MODEL, input="Again.", previous_response_id=answer.id, max_output_tokens=LIMIT
    )
    assert again.usage is not None
    assert again.usage.input_tokens_details.cached_tokens > 0


def openai_responses_stream() -> None:
    stream = openai.OpenAI().responses.create(
        model=MODEL, input=QUESTION, stream=True, max_output_tokens=LIMIT
    )
    kinds = [event.type for event in stream]
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")


def openai_chat() -> None:
    answer = openai.OpenAI().chat.completions.create(model=MODEL, messages=TALK, max_tokens=LIMIT)
    assert answer.choices[0].message.content


def openai_chat_stream() -> None:
    stream = openai.OpenAI().chat.completions.create(
        model=MODEL, messages=TALK, stream=True, max_tokens=LIMIT
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def openai_async() -> None:
    async def ask() -> str | None:
        async with openai.AsyncOpenAI() as client:
            answer = await client.chat.completions.create(
                model=MODEL, messages=TALK, max_tokens=LIMIT
            )
            return answer.choices[0].message.content

    assert asyncio.run(ask())


def openai_file() -> None:
    data = base64.b64encode(tiny_pdf("The sky is green.")).decode()
    part = {"type": "file", "file": {"file_data": f"data:application/pdf;base64,{data}"}}
    talk: list[Any] = [{"role": "user", "content": [part, {"type": "text", "text": "Read it."}]}]
    answer = openai.OpenAI().chat.completions.create(model=MODEL, messages=talk, max_tokens=LIMIT)
    assert answer.choices[0].message.content is not None


def openai_stored() -> None:
    completions = openai.OpenAI().chat.completions
    made = completions.create(
        model=MODEL, messages=TALK, max_tokens=LIMIT, store=True, metadata={"by": "suite"}
    )
    assert made.id in [each.id for each in completions.list(metadata={"by": "suite"})]
    assert completions.messages.list(made.id).data[0].content == QUESTION
    assert completions.delete(made.id).deleted


def openai_tools() -> None:
    answer = openai.OpenAI().chat.completions.create(
        model=MODEL, messages=TALK, tools=[LOOK], tool_choice="required", max_tokens=64
    )
    assert answer.choices[0].message.tool_calls
    assert len(answer.choices[0].message.tool_calls) == 1


def openai_embeddings() -> None:
    found = openai.OpenAI().embeddings.create(model="minilm", input=["a", "b"])
    assert len(found.data) == 2


def openai_errors() -> None:
    refused = ""
    try:
        openai.OpenAI().chat.completions.create(model=MODEL, messages=[])
    except openai.BadRequestError as error:
        refused = error.param or ""
    assert refused == "messages"


def anthropic_messages() -> None:
    answer = anthropic.Anthropic().messages.create(model=MODEL, max_tokens=LIMIT, messages=TALK)
    assert answer.content[0].type == "text"


def anthropic_stream() -> None:
    with anthropic.Anthropic().messages.stream(
        model=MODEL, max_tokens=LIMIT, messages=TALK
    ) as stream:
        assert "".join(stream.text_stream)
        assert stream.get_final_message().usage.output_tokens > 0


def anthropic_async() -> None:
    async def ask() -> int:
        async with anthropic.AsyncAnthropic() as client:
            answer = await client.messages.create(model=MODEL, max_tokens=LIMIT, messages=TALK)
            return answer.usage.output_tokens

    assert asyncio.run(ask()) > 0


def anthropic_count() -> None:
    counted = anthropic.Anthropic().messages.count_tokens(model=MODEL, messages=TALK)
    assert counted.input_tokens > 0


def anthropic_document() -> None:
    data = base64.b64encode(tiny_pdf("The sky is green.")).decode()
    source = {"type": "base64", "media_type": "application/pdf", "data": data}
    content = [{"type": "document", "source": source}, {"type": "text", "text": "Read it."}]
    talk: list[Any] = [{"role": "user", "content": content}]
    answer = anthropic.Anthropic().messages.create(model=MODEL, max_tokens=LIMIT, messages=talk)
    assert answer.usage.input_tokens > 0


def anthropic_tool_runner() -> None:
    @beta_tool
    def look(at: str) -> str:
        """Look at something.

        Args:
            at: What to look at.
        """
        return f"nothing at {at}"

    runner = anthropic.Anthropic().beta.messages.tool_runner(
        model=MODEL, max_tokens=LIMIT, tools=[look], messages=TALK, max_iterations=2
    )
    assert runner.until_done().usage.output_tokens > 0


def ollama_chat() -> None:
    answer = ollama.chat(MODEL, messages=TALK, options={"num_predict": LIMIT})
    assert answer.message.content


def ollama_generate_stream() -> None:
    stream = ollama.generate(MODEL, QUESTION, stream=True, options={"num_predict": LIMIT})
    assert [part.done for part in stream][-1]


def ollama_structured() -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2, 3]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    answer = ollama.chat(MODEL, messages=TALK, format=schema, options={"num_predict": 64})
    assert isinstance(json.loads(answer.message.content or "")["n"], int)


def ollama_lists() -> None:
    assert ollama.list().models
    assert ollama.ps().models
    assert ollama.show(ollama.list().models[0].model or "").capabilities


def ollama_embed() -> None:
    assert len(ollama.embed("minilm", ["a", "b"]).embeddings) == 2


EXAMPLES: tuple[Callable[[], None], ...] = (
    *(openai_responses, openai_responses_stream, openai_chat, openai_chat_stream, openai_async),
    *(openai_file, openai_stored, openai_tools, openai_embeddings, openai_errors),
    *(anthropic_messages, anthropic_stream, anthropic_async, anthropic_count),
    *(anthropic_document, anthropic_tool_runner),
    *(ollama_chat, ollama_generate_stream, ollama_structured, ollama_lists, ollama_embed),
)


def main() -> None:
    failed = 0
    for example in EXAMPLES:
        try:
            example()
            print(f"ok {example.__name__}", flush=True)
        except Exception:
            failed += 1
            print(f"FAILED {example.__name__}\n{traceback.format_exc(limit=-2)}", flush=True)
    print(f"{len(EXAMPLES) - failed} of {len(EXAMPLES)} examples passed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
