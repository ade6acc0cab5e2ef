from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

import pytest

from rekindle.chat.template import ChatTemplate
from rekindle.errors import BadRequest, TemplateFailed

from .templates import ALTERNATING, CHATML, HEADERS, PARTS

USER = {"role": "user", "content": "hi"}


def rendered(source: str, **kwargs: Any) -> str:
    return ChatTemplate(source).render([USER], **kwargs)


def test_chatml_renders_as_written() -> None:
    assert ChatTemplate(CHATML).render([{"role": "system", "content": "Be brief."}, USER]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_generation_prompt_is_left_out_on_request() -> None:
    assert ChatTemplate(CHATML).render([USER], add_generation_prompt=False).endswith("<|im_end|>\n")


def test_bos_trimming_and_tools_match_hugging_face() -> None:
    tool = {"name": "é<b>", "a": 1}
    text = ChatTemplate(HEADERS, bos_token="<|begin_of_text|>").render(
        [{"role": "user", "content": "  hi \n"}], tools=[tool]
    )
    assert text == (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
        '{\n    "name": "é<b>",\n    "a": 1\n}\n\n<|eot_id|>'
        "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_no_tools_are_none_to_the_template() -> None:
    assert rendered("{{ tools is none }}") == rendered("{{ tools is none }}", tools=[]) == "True"


def test_a_template_refusing_the_conversation_fails_with_its_own_words() -> None:
    with pytest.raises(TemplateFailed, match="roles must alternate") as failure:
        ChatTemplate(ALTERNATING).render([USER, USER])
    assert failure.value.status == 400


def test_generation_marker_and_loop_controls_print_the_plain_text() -> None:
    text = ChatTemplate(PARTS).render(
        [
            {"role": "comment", "content": "skipped"},
            USER,
            {"role": "assistant", "content": "ok"},
        ]
    )
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nok<|im_end|>\n"


def test_json_keeps_order_text_and_separators() -> None:
    source = "{{ x | tojson }} {{ x | tojson(separators=(',', ':'), sort_keys=true) }}"
    assert rendered(source, x={"b": "ü<&>'", "a": None}) == (
        """{"b": "ü<&>'", "a": null} {"a":null,"b":"ü<&>'"}"""
    )


def test_strftime_now_tells_the_date() -> None:
    before = datetime.now().strftime("%d %b %Y")
    assert rendered("{{ strftime_now('%d %b %Y') }}") in (
        before,
        datetime.now().strftime("%d %b %Y"),
    )


def test_kwargs_reach_the_template() -> None:
    template = ChatTemplate(PARTS)
    assert template.render([USER], enable_thinking=False).endswith("<think>\n\n</think>\n\n")
    assert template.render([USER], enable_thinking=True).endswith("assistant\n")


@pytest.mark.parametrize(
    "name", ["bos_token", "eos_token", "range", "namespace", "raise_exception"]
)
def test_kwargs_may_not_replace_variables_of_the_server(name: str) -> None:
    with pytest.raises(BadRequest, match=f"'{name}'") as refusal:
        rendered(CHATML, **{name: "x"})
    assert refusal.value.param == "chat_template_kwargs"


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_check_refuses_kwargs_that_are_arguments_of_their_own(name: str) -> None:
    with pytest.raises(BadRequest, match=f"'{name}'"):
        ChatTemplate(CHATML).check({name: []})


def test_a_kwarg_with_a_name_of_jinjas_own_is_only_a_variable() -> None:
    assert rendered("{{ context }}{{ environment }}", context=2, environment=3) == "23"


@pytest.mark.parametrize("name", ["unheard_of", "self", "__class__", "_x", "x" * 10_000, "ns"])
def test_unknown_kwargs_are_refused_with_a_list_of_known_ones(name: str) -> None:
    with pytest.raises(BadRequest) as refusal:
        ChatTemplate("{% set ns = 1 %}{{ mood }}{{ range(tries) }}").check({"mood": 1, name: 2})
    assert refusal.value.param == "chat_template_kwargs"
    assert "takes enable_thinking, mood, preserve_thinking" in str(refusal.value)
    assert "range" not in str(refusal.value)
    assert len(str(refusal.value)) < 300


def test_options_of_reasoning_are_taken_by_every_model() -> None:
    assert rendered("ok", enable_thinking=False, reasoning_effort="low") == "ok"


@pytest.mark.parametrize("source", ["{% if %}", "{{ x | no_such_filter }}", "{% for x in %}"])
def test_a_broken_source_fails_when_it_is_loaded(source: str) -> None:
    with pytest.raises(TemplateFailed):
        ChatTemplate(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__['__builtins__'] }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ ('%s' | attr('format')).__globals__.x }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ 1 // 0 }}",
        "{{ range(10**9) }}",
        "{{ undefined_name.attribute }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_escapes_and_errors_of_a_template_fail_the_request(source: str) -> None:
    template = ChatTemplate(source)
    with pytest.raises(TemplateFailed):
        template.render([USER])


MANY = "{% for a in range(99) %}"
R = "{% set r = range(100000) %}"


@pytest.mark.parametrize(
    "source",
    [
        R + "{% for a in r %}{% for b in r %}{% for c in r %}{% endfor %}{% endfor %}{% endfor %}",
        R + "{% for a in r %}{% for b in r if false %}{% endfor %}{% endfor %}",
        R + "{% for a in r recursive %}{{ loop(r) if loop.depth < 4 }}{% endfor %}",
        R + "{% for a in r %}{{ r | map('string') | list | length }}{% endfor %}",
        "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n }}{% endmacro %}{{ f(60) }}",
        "{% block b %}{% set n = 1 %}{% endblock %}"
        + R
        + "{% for a in r %}{% for b in r %}{{ self.b() }}{% endfor %}{% endfor %}",
    ],
)
def test_a_template_that_would_not_end_is_stopped(source: str) -> None:
    template = ChatTemplate(source, time_limit_s=0.05)
    started = time.monotonic()
    with pytest.raises(TemplateFailed, match=r"more than 0\.05 s"):
        template.render([USER])
    assert time.monotonic() - started < 2


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(20) %}{{ 'x' * 10**6 }}{% endfor %}",
        "{{ 'x' * 10**12 }}",
        "{{ 10**12 * [1] }}",
        "{{ 7 ** (10**9) }}",
        "{% set n = namespace(v=3) %}" + MANY + "{% set n.v = n.v * n.v %}{% endfor %}",
        "{% set n = namespace(v='x') %}" + MANY + "{% set n.v = n.v ~ n.v %}{% endfor %}",
        "{% set n = namespace(v='x') %}" + MANY + "{% set n.v = n.v + n.v %}{% endfor %}",
        "{% macro f(n) %}{{ f(n - 1) * 2 if n else 'x' }}{% endmacro %}{{ f(60) }}",
        "{% set s %}{% for a in range(20) %}{{ 'x' * 10**6 }}{% endfor %}{% endset %}",
    ],
)
def test_a_template_that_would_grow_without_end_is_stopped(source: str) -> None:
    template = ChatTemplate(source)
    with pytest.raises(TemplateFailed, match="more than"):
        template.render([USER])


def test_long_conversations_stay_within_the_limits() -> None:
    text = "x" * 8_000_000
    assert len(ChatTemplate(CHATML).render([{"role": "user", "content": text}])) > 8_000_000


def test_a_stopped_render_leaves_the_template_and_its_thread_usable() -> None:
    source = "{% for a in range(n) %}{% for b in range(n) %}{% endfor %}{% endfor %}done"
    template = ChatTemplate(source, time_limit_s=0.3)
    for _ in range(2):
        with pytest.raises(TemplateFailed):
            template.render([USER], n=100_000)
        assert template.render([USER], n=2) == "done"


def test_one_thread_running_out_of_time_does_not_stop_another() -> None:
    source = "{% for a in range(n) %}{% for b in range(n) %}{% endfor %}{% endfor %}done"
    template = ChatTemplate(source, time_limit_s=0.5)
    with ThreadPoolExecutor() as pool:
        slow = pool.submit(template.render, [USER], n=99_999)
        texts = []
        while not slow.done():
            texts.append(template.render([USER], n=3))
    assert isinstance(slow.exception(), TemplateFailed)
    assert set(texts) == {"done"}


def test_developer_messages_become_system_messages_for_templates_without_that_role() -> None:
    developer = {"role": "developer", "content": "Be brief."}
    system = {"role": "system", "content": "Be brief."}
    assert ChatTemplate(CHATML).render([developer, USER]) == (
        ChatTemplate(CHATML).render([system, USER])
    )
    aware = CHATML + "{# knows developer #}"
    assert "<|im_start|>developer" in ChatTemplate(aware).render([developer, USER])


THINKS = "{% if not enable_thinking %}off{% else %}on{% endif %}{{ messages[-1].content }}"


def test_defaults_of_the_operator_apply_until_a_request_sends_its_own() -> None:
    talk = [{"role": "user", "content": "!"}]
    template = ChatTemplate(THINKS, defaults={"enable_thinking": True, "unknown": 1})
    assert template.render(talk) == "on!"
    assert template.render(talk, enable_thinking=False) == "off!"
    assert template.unread_defaults == ["unknown"]
    assert ChatTemplate(THINKS).render(talk) == "off!"
    with pytest.raises(BadRequest):
        template.render(talk, unknown=1)
