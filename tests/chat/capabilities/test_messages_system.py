"""System messages in mid-conversation are rendered by every template."""

from __future__ import annotations

import pytest

from rekindle.chat.messages import Message
from rekindle.chat.template import ChatTemplate
from tests.chat.templates import ALTERNATING, CHATML, HEADERS, PARTS

# Refuses a system message that is not the first, as the templates of many models do.
STRICT = """\
{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}
        {{- raise_exception('System message must be at the beginning.') }}
    {%- endif %}
    {{- '<|' + message.role + '|>' + message.content + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
# Puts all of them at the top.
HOISTING = """\
{%- for message in messages if message.role == 'system' %}
    {{- '<|s|>' + message.content }}
{%- endfor %}
{%- for message in messages if message.role != 'system' %}
    {{- '<|' + message.role + '|>' + message.content }}
{%- endfor %}"""
# Has no place for any but the first, and leaves the others out.
DROPPING = """\
{%- if messages[0].role == 'system' %}{{- '<|s|>' + messages[0].content }}{% endif %}
{%- for message in messages if message.role in ('user', 'assistant') %}
    {{- '<|' + message.role + '|>' + message.content }}
{%- endfor %}"""
# The same, and roles have to alternate.
STRICTEST = """\
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}
{%- if messages[0].role == 'system' %}{{- '<|s|>' + messages[0].content }}{% endif %}
{%- for message in rest %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate.') }}
    {%- endif %}
    {{- '<|' + message.role + '|>' + message.content }}
{%- endfor %}"""

TEMPLATES = {
    "chatml": CHATML,
    "headers": HEADERS,
    "parts": PARTS,
    "alternating": ALTERNATING,
    "strict": STRICT,
    "hoisting": HOISTING,
    "dropping": DROPPING,
    "strictest": STRICTEST,
}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def reply(text: str) -> Message:
    return {"role": "assistant", "content": text}


TALK = [system("rules"), user("one"), reply("two"), system("note"), user("three")]


def render(source: str, *messages: Message) -> str:
    return ChatTemplate(source).render(messages)


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("last", [[user("three")], [user("three"), system("finale")]])
def test_it_stays_where_it_is_with_every_template(source: str, last: list[Message]) -> None:
    """llama.cpp #27367: strict templates failed with HTTP 500."""
    text = render(source, *TALK[:-1], *last)
    words = ["rules", "one", "two", "note", "three", *("finale" for _ in last[1:])]
    places = [text.index(word) for word in words]
    assert places == sorted(places)


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
def test_a_later_turn_begins_with_the_earlier_ones(source: str) -> None:
    """ollama #18431, omlx #1826: moved to the top, it changed the prompt of every turn."""
    earlier = ChatTemplate(source).render(TALK, add_generation_prompt=False)
    later = render(source, *TALK, reply("four"), system("another"), user("five"))
    assert later.startswith(earlier)


def test_it_is_rendered_as_it_was_sent_where_the_template_takes_it() -> None:
    assert "<|im_start|>system\nnote<|im_end|>\n<|im_start|>user\nthree" in render(CHATML, *TALK)


def test_else_it_is_a_user_message_of_its_own() -> None:
    assert "<|user|>note<|end|><|user|>three<|end|>" in render(STRICT, *TALK)


def test_where_roles_alternate_it_is_a_part_of_the_users_message() -> None:
    assert "<|user|>note\n\nthree" in render(STRICTEST, *TALK)


def test_several_at_the_beginning_are_one_where_the_template_takes_one() -> None:
    assert render(STRICT, system("a"), system("b"), user("c")).startswith(
        "<|system|>a\n\nb<|end|><|user|>c<|end|>"
    )
    assert "<|im_start|>system\na<|im_end|>\n<|im_start|>system\nb" in render(
        CHATML, system("a"), system("b"), user("c")
    )


def test_a_template_without_system_messages_shows_them_to_the_user() -> None:
    assert render(ALTERNATING, system("rules"), user("one")) == "[INST] rules\n\none [/INST]"
