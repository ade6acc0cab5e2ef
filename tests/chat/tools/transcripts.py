"""Replies from the models' documentation and from the tests of other servers."""

from __future__ import annotations

from typing import Any, NamedTuple

from tests.chat.tools.parsing import BAR


class Reply(NamedTuple):
    format: str
    text: str
    calls: list[tuple[str, Any]]
    content: str = ""
    reasoning: str = ""


def deepseek(text: str) -> str:
    return text.replace("|", BAR)


REPLIES = {
    # Hermes 2 Pro and Qwen 2.5, model cards
    "hermes": Reply(
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        [("get_weather", {"city": "Paris"})],
    ),
    "hermes, arguments first (Hermes 2 Pro)": Reply(
        "hermes",
        '<tool_call>\n{"arguments": {"city": "Paris"}, "name": "get_weather"}\n</tool_call>',
        [("get_weather", {"city": "Paris"})],
    ),
    "hermes, several after a text (Qwen 2.5)": Reply(
        "hermes",
        "I will look.\n"
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>\n',
        [("f", {"a": 1}), ("g", {})],
        content="I will look.",
    ),
    "hermes, a list between one pair (SmolLM2)": Reply(
        "hermes",
        '<tool_call>[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]'
        "</tool_call>",
        [("f", {"a": 1}), ("g", {})],
    ),
    "hermes, arguments as a string": Reply(
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1, \\"b\\": \\"\\u00e9\\"}"}</tool_call>',
        [("f", {"a": 1, "b": "é"})],
    ),
    "hermes, parameters (Hermes on Llama 3)": Reply(
        "hermes",
        '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>',
        [("f", {"a": 1})],
    ),
    "hermes, wrapped": Reply(
        "hermes",
        '<tool_call>{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}'
        "</tool_call>",
        [("f", {"a": 1})],
    ),
    "hermes, Granite 3 and Phi-4 mini": Reply(
        "hermes",
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Boston"}}]',
        [("get_weather", {"city": "Boston"})],
    ),
    "hermes, Nemotron Nano 2": Reply(
        "hermes",
        '<TOOLCALL>[{"name": "add", "arguments": {"a": 3, "b": 4}}]</TOOLCALL>',
        [("add", {"a": 3, "b": 4})],
    ),
    # Qwen3-Coder, as in vLLM's tests of its parser
    "qwen3-coder": Reply(
        "qwen3-coder",
        "Sure! Let me check the weather for you.\n<tool_call>\n<function=get_weather>\n"
        "<parameter=city>\nDallas\n</parameter>\n<parameter=days>\n5\n</parameter>\n"
        '<parameter=at>\n{"x": 1.50}\n</parameter>\n</function>\n</tool_call>',
        [("get_weather", {"city": "Dallas", "days": 5, "at": {"x": 1.5}})],
        content="Sure! Let me check the weather for you.",
    ),
    "qwen3-coder, several": Reply(
        "qwen3-coder",
        "<tool_call>\n<function=f>\n<parameter=b>\none\n\n  two\n</parameter>\n</function>\n"
        "</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
        [("f", {"b": "one\n\n  two"}), ("g", {})],
    ),
    "qwen3-coder, without the outer tag": Reply(
        "qwen3-coder",
        "<function=f>\n<parameter=a>\n7\n</parameter>\n</function>\n</tool_call>",
        [("f", {"a": 7})],
    ),
    "qwen3-coder, Seed-OSS": Reply(
        "qwen3-coder",
        "<seed:tool_call>\n<function=get_weather>\n<parameter=location>Paris</parameter>\n"
        "</function>\n</seed:tool_call>",
        [("get_weather", {"location": "Paris"})],
    ),
    # Llama 3.1 and 3.2, prompt format documentation
    "llama3-json": Reply(
        "llama3-json",
        '{"name": "get_weather", "parameters": {"city": "San Francisco"}}',
        [("get_weather", {"city": "San Francisco"})],
    ),
    "llama3-json, tagged": Reply(
        "llama3-json",
        '<|python_tag|>{"type": "function", "name": "f", "parameters": {"a": "1"}}',
        [("f", {"a": "1"})],
    ),
    "llama3-json, several": Reply(
        "llama3-json",
        '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        [("f", {"a": 1}), ("g", {})],
    ),
    # Llama 3.2, ToolACE and Llama 4, as in vLLM's tests of its parsers
    "pythonic": Reply(
        "pythonic",
        "[get_weather(city='San Francisco', metric='celsius'), g()]",
        [("get_weather", {"city": "San Francisco", "metric": "celsius"}), ("g", {})],
    ),
    "pythonic, escapes": Reply(
        "pythonic",
        r"""[get_weather(city='Martha\'s Vineyard', metric='\"cool units\"')]""",
        [("get_weather", {"city": "Martha's Vineyard", "metric": '"cool units"'})],
    ),
    "pythonic, marked (Llama 4)": Reply(
        "pythonic",
        "Here's a call: <|python_start|>[get_weather(location='Tokyo', at=[1, 2, 3])]"
        "<|python_end|>",
        [("get_weather", {"location": "Tokyo", "at": [1, 2, 3]})],
        content="Here's a call:",
    ),
    "pythonic, LFM2": Reply(
        "pythonic",
        '<|tool_call_start|>[get_weather(city="12345")]<|tool_call_end|>Checking the weather.',
        [("get_weather", {"city": "12345"})],
        content="Checking the weather.",
    ),
    "pythonic, all literals": Reply(
        "pythonic",
        '[f(a=-1.5e3, b=None, c=True, d={\'x\': (1, 2,), 3: [false]}, e="""say "hi"\n""", f=0x10)]',
        [
            (
                "f",
                {
                    "a": -1500.0,
                    "b": None,
                    "c": True,
                    "d": {"x": [1, 2], "3": [False]},
                    "e": 'say "hi"\n',
                    "f": 16,
                },
            )
        ],
    ),
    # Mistral 7B v0.3, Nemo; Small 3.2, Devstral; as in vLLM's and llama.cpp's tests
    "mistral, a list": Reply(
        "mistral",
        '[TOOL_CALLS] [{"name": "add", "arguments":{"a": 3.5, "b": 4}}, '
        '{"name": "get_weather", "arguments":{"city": "San Francisco"}}]',
        [("add", {"a": 3.5, "b": 4}), ("get_weather", {"city": "San Francisco"})],
    ),
    "mistral, arguments first": Reply(
        "mistral",
        '[TOOL_CALLS][{"arguments":{"a": 3, "b": 4}, "name": "add", "id": "VvvODy9mT"}]',
        [("add", {"a": 3, "b": 4})],
    ),
    "mistral, names": Reply(
        "mistral",
        'hi[TOOL_CALLS]add[ARGS]{"a": 3.5, "b": 4}[TOOL_CALLS]f[ARGS]{"a": 3}',
        [("add", {"a": 3.5, "b": 4}), ("f", {"a": 3})],
        content="hi",
    ),
    "mistral, names and ids": Reply(
        "mistral",
        '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": 1}',
        [("f", {"a": 1})],
    ),
    "mistral, names alone": Reply(
        "mistral",
        '[TOOL_CALLS]f{"a":1}[TOOL_CALLS]g{}',
        [("f", {"a": 1}), ("g", {})],
    ),
    # DeepSeek V3 and R1, model template and SGLang's parser
    "deepseek V3": Reply(
        "deepseek",
        deepseek(
            "<|tool▁calls▁begin|><|tool▁call▁begin|>function<|tool▁sep|>get_weather\n"
            '```json\n{"location": "Tokyo"}\n```<|tool▁call▁end|>\n'
            "<|tool▁call▁begin|>function<|tool▁sep|>get_weather\n"
            '```json\n{"location": "Paris"}\n```<|tool▁call▁end|><|tool▁calls▁end|>'
        ),
        [("get_weather", {"location": "Tokyo"}), ("get_weather", {"location": "Paris"})],
    ),
    "deepseek V3.1": Reply(
        "deepseek",
        deepseek(
            "I will.<|tool▁calls▁begin|><|tool▁call▁begin|>f<|tool▁sep|>"
            '{"a": 1}<|tool▁call▁end|><|tool▁call▁begin|>g<|tool▁sep|>{}<|tool▁call▁end|>'
            "<|tool▁calls▁end|>"
        ),
        [("f", {"a": 1}), ("g", {})],
        content="I will.",
    ),
    # gpt-oss, OpenAI's guide to the format
    "harmony": Reply(
        "harmony",
        "<|channel|>analysis<|message|>Need to use function get_weather.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.get_weather "
        '<|constrain|>json<|message|>{"location":"San Francisco"}<|call|>',
        [("get_weather", {"location": "San Francisco"})],
        reasoning="Need to use function get_weather.",
    ),
    "harmony, recipient in the role": Reply(
        "harmony",
        "<|channel|>analysis<|message|>Call it.<|end|><|start|>assistant to=functions.get_weather"
        '<|channel|>commentary <|constrain|>json<|message|>{"location": "Tokyo"}<|call|>',
        [("get_weather", {"location": "Tokyo"})],
        reasoning="Call it.",
    ),
    "harmony, recipient at once, end token unseen": Reply(
        "harmony",
        ' to=functions.get_weather<|channel|>commentary json<|message|>{"location": "Tokyo"}',
        [("get_weather", {"location": "Tokyo"})],
    ),
    "harmony, a preamble": Reply(
        "harmony",
        "<|channel|>analysis<|message|>Several steps.<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>**Action plan**: 1. Look<|end|><|start|>assistant<|channel|>commentary "
        "to=functions.g<|constrain|>json<|message|>{}<|call|>",
        [("g", {})],
        content="**Action plan**: 1. Look",
        reasoning="Several steps.",
    ),
    "harmony, an answer": Reply(
        "harmony",
        "<|channel|>analysis<|message|>User asks: 2 + 2. Simple.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>2 + 2 = 4.<|return|>",
        [],
        content="2 + 2 = 4.",
        reasoning="User asks: 2 + 2. Simple.",
    ),
    # Google's pages on FunctionGemma and Gemma 4
    "functiongemma": Reply(
        "functiongemma",
        "<start_function_call>call:get_weather{location:<escape>San Francisco<escape>,"
        "unit:<escape>celsius<escape>}<end_function_call><start_function_response>",
        [("get_weather", {"location": "San Francisco", "unit": "celsius"})],
    ),
    "gemma4": Reply(
        "gemma4",
        'Let me see.<|tool_call>call:get_weather{location:<|"|>a {brace}, "quote"<|"|>,days:3,'
        'at:{x:[1.5,true,<|"|>y<|"|>],<|"|>z<|"|>:{}}}<tool_call|><|tool_call>call:g{}<tool_call|>'
        "<|tool_response>response:g{value:1}<tool_response|>",
        [
            (
                "get_weather",
                {
                    "location": 'a {brace}, "quote"',
                    "days": 3,
                    "at": {"x": [1.5, True, "y"], "z": {}},
                },
            ),
            ("g", {}),
        ],
        content="Let me see.",
    ),
    "gemma3": Reply(
        "gemma3",
        'Sure.\n```tool_code\nprint(get_weather(city="Paris"))\n```',
        [("get_weather", {"city": "Paris"})],
        content="Sure.",
    ),
    "gemma3, several lines": Reply(
        "gemma3",
        "```tool_code\nf(a=1)\ng()\n```\nThat is all.",
        [("f", {"a": 1}), ("g", {})],
        content="\nThat is all.",
    ),
}
