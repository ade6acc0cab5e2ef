from __future__ import annotations

import pytest

from rekindle.chat.messages import Message
from rekindle.chat.template import ChatTemplate
from rekindle.errors import TemplateFailed
from tests.chat.templates import ALTERNATING, CHATML, HEADERS, PARTS

TWO_PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
ONLY_PARTS = (
    "{% for m in messages %}{{ m.role }}:{% for p in m.content %} {{ p.text }}{% endfor %}\n"
    "{% endfor %}"
)
CALL = {"id": "1", "type": "function", "function": {"name": "now", "arguments": {"zone": "UTC"}}}


def content(source: str, content: object, role: str = "user", **fields: object) -> str:
    messages: list[dict[str, object]] = [{"role": role, "content": content, **fields}]
    if role == "assistant":
        messages.insert(0, {"role": "user", "content": "?"})
    return ChatTemplate(source).render(messages, add_generation_prompt=False)


@pytest.mark.parametrize("source", [CHATML, HEADERS, ALTERNATING, "{{ messages[0].content }}"])
def test_parts_are_joined_by_lines_for_a_template_that_takes_strings(source: str) -> None:
    assert content(source, TWO_PARTS) == content(source, "one\ntwo")


def test_parts_reach_a_template_that_takes_them() -> None:
    assert content(PARTS, TWO_PARTS) == "<|im_start|>user\nonetwo<|im_end|>\n"
    assert content(PARTS, [{"type": "image"}, *TWO_PARTS]).startswith("<|im_start|>user\n<|image|>")


def test_a_string_becomes_a_part_for_a_template_that_accepts_only_parts() -> None:
    assert content(ONLY_PARTS, "hi") == "user: hi"


def test_a_part_that_is_not_text_is_refused_rather_than_dropped() -> None:
    with pytest.raises(TemplateFailed, match="image_url"):
        content(CHATML, [{"type": "image_url", "image_url": {"url": "x"}}])


@pytest.mark.parametrize("part", [{"type": "text"}, {"type": "text", "text": 1}, "text", {}])
def test_a_part_without_text_is_refused(part: object) -> None:
    with pytest.raises(TemplateFailed):
        content(CHATML, [part])


@pytest.mark.parametrize("source", [CHATML, ALTERNATING, "{{ messages[-1].content }}"])
def test_a_reply_without_content_is_empty_where_none_would_fail_or_show(source: str) -> None:
    empty = content(source, "", "assistant", tool_calls=[CALL])
    assert content(source, None, "assistant", tool_calls=[CALL]) == empty
    question, reply = {"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [CALL]}
    assert ChatTemplate(source).render([question, reply], add_generation_prompt=False) == empty


def test_a_template_that_knows_none_is_given_none() -> None:
    source = (
        "{% for m in messages %}{{ 'nothing' if m.content is none else m.content }}{% endfor %}"
    )
    assert content(source, None, "assistant") == "?nothing"
    assert '{"name": "now"' in content(PARTS, None, "assistant", tool_calls=[CALL])


def test_the_parts_of_a_result_are_joined_for_a_template_that_prints_results() -> None:
    """The template iterates over the parts of users, but would print a result as a list."""
    source = (
        "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}"
        "{% if m.content is string %}{{ m.content }}{% elif m.role == 'tool' %}"
        "{{ m.content | tojson }}{% else %}{% for p in m.content or [] %}{{ p.text }}{% endfor %}"
        "{% endif %}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% endfor %}"
    )
    parts = [{"type": "text", "text": "Rain"}, {"type": "text", "text": "again."}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
    talk: list[Message] = [
        {"role": "user", "content": [{"type": "text", "text": "?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": parts},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert ChatTemplate(source).render(talk, tools=tools) == "f?fRain\nagain."
