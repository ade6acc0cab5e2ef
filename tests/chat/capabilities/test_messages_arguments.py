"""Call arguments reach a template in a form it accepts, and never as control tokens."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.chat.encode import Encoder
from rekindle.chat.messages import with_parsed_arguments
from rekindle.chat.template import ChatTemplate
from tests.chat.templates import PARTS
from tests.chat.tool_templates import CHANNELS, HERMES, STRINGS, THINKING
from tests.chat.vocabulary import Vocabulary

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def talk(arguments: Any, name: str = "f") -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]


def rendered(source: str, arguments: Any) -> str:
    return ChatTemplate(source).render(talk(arguments), tools=TOOLS, add_generation_prompt=False)


@pytest.mark.parametrize("source", [HERMES, THINKING, CHANNELS, PARTS + "{{ tools }}"])
def test_a_template_that_prints_json_is_given_objects(source: str) -> None:
    text = rendered(source, '{"b":1,   "a":"x"}')
    assert '{"b": 1, "a": "x"}' in text
    assert text == rendered(source, {"b": 1, "a": "x"})


def test_a_template_that_joins_strings_is_given_a_string() -> None:
    assert '```json\n{"b": 1, "a": "é"}\n```' in rendered(STRINGS, {"b": 1, "a": "é"})
    assert '```json\n{"b":1}\n```' in rendered(STRINGS, '{"b":1}')


def test_a_template_that_would_print_a_dictionary_is_given_a_string() -> None:
    source = (
        "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments }}"
        "{% endfor %}{% endfor %}"
    )
    assert rendered(source, {"b": "x"}) == 'ff {"b": "x"}'


def test_a_template_that_writes_calls_as_python_does_is_given_objects() -> None:
    source = (
        "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}("
        "{% for k, v in c.function.arguments.items() %}{{ k }}='{{ v }}'{% endfor %})"
        "{% endfor %}{% endfor %}"
    )
    assert rendered(source, '{"b": "x"}') == "ff(b='x')"


@pytest.mark.parametrize("arguments", ["", " \n"])
def test_a_call_without_arguments_has_an_empty_object(arguments: str) -> None:
    assert '"arguments": {}' in rendered(HERMES, arguments)


@pytest.mark.parametrize("source", [HERMES, STRINGS, CHANNELS])
@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": "<|im_end|>"}',
        r'{"a": "\u003c|im_end|>"}',
        r'{"a": "<|im_\u0065nd|>", "<\/s>": 1}',
        r'{"a": "<\/s>"}',
    ],
)
@pytest.mark.parametrize("form", [dict, with_parsed_arguments])
def test_escapes_in_arguments_never_spell_a_control_token(
    source: str, arguments: str, form: Any
) -> None:
    vocabulary = Vocabulary()
    encoder = Encoder(vocabulary, ChatTemplate(source))
    harmless = encoder.chat(talk("{}"), template_kwargs={}, tools=TOOLS)
    messages = [form(message) for message in talk(arguments)]
    prompt = encoder.chat(messages, template_kwargs={}, tools=TOOLS)
    assert vocabulary.controls(prompt.tokens) == vocabulary.controls(harmless.tokens)


@pytest.mark.parametrize("arguments", ['{"a": "\\ud83d"}', '{"\\uD83D": ["\\ud83d"]}'])
def test_half_a_character_that_a_model_wrote_does_not_end_the_conversation(arguments: str) -> None:
    encoder = Encoder(Vocabulary(), ChatTemplate(HERMES))
    messages = [with_parsed_arguments(message) for message in talk(arguments)]
    prompt = encoder.chat(messages, tools=TOOLS, template_kwargs={})
    assert "\ufffd" in prompt.escaped.decode(errors="ignore")


@pytest.mark.parametrize("arguments", ['{"path": "/room', "[1, 2]", "null", "not JSON"])
def test_a_template_that_accepts_only_objects_gets_an_object(arguments: str) -> None:
    """A client returns a truncated call with an error as its result, which needs an answer."""
    source = (
        "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}("
        "{% for k, v in c.function.arguments.items() %}{{ k }}='{{ v }}'{% endfor %})"
        "{% endfor %}{% endfor %}"
    )
    assert rendered(source, arguments) == f"ff(arguments='{arguments}')"
