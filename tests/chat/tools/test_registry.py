from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.chat import tools
from rekindle.chat.tools import registry
from rekindle.chat.tools.registry import REASONING_FORMAT_NAMES, TOOL_FORMAT_NAMES, select
from rekindle.errors import ModelError
from tests.chat.tools.parsing import BAR

TEMPLATES = {
    "ChatML without tools": ("<|im_start|>{{ role }}\n{{ content }}<|im_end|>", "hermes", None),
    "Qwen 2.5": ('\'\\n<tool_call>\\n{"name": "\' + tool_call.name', "hermes", None),
    "Qwen 3": (
        "content.split('</think>')[-1] … '<think>\\n' … '<tool_call>\\n{\"name\": \"'",
        "hermes",
        "think",
    ),
    "Qwen3-Coder": (
        "<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>",
        "qwen3-coder",
        None,
    ),
    "Seed-OSS": (
        "<seed:tool_call>\\n<function=example>\\n<parameter=p> … <seed:think>",
        "qwen3-coder",
        "seed",
    ),
    "Granite 3": ("{{- '<|tool_call|>' }}{{ tool_calls|tojson }}", "hermes", None),
    "Hermes on Llama 3": ("<|start_header_id|> … <tool_call> … <|python_tag|>", "hermes", None),
    "Llama 3.1": ("{{- '<|python_tag|>' + tool_call.name + '.call(' }}", "llama3-json", None),
    "Llama 3.2": (
        'Respond in the format {"name": function name, "parameters": dictionary}',
        "llama3-json",
        None,
    ),
    "Llama 4": (
        '<|python_start|> … the format {"name": function name, "parameters": dictionary}',
        "llama3-json",
        None,
    ),
    "Llama 4, pythonic": ("[func_name1(params_name1=params_value1), …]", "pythonic", None),
    "LFM2": ("<|tool_call_start|>[ … ]<|tool_call_end|>", "pythonic", None),
    "Mistral": ("{{- '[TOOL_CALLS] [' }} … [AVAILABLE_TOOLS]", "mistral", None),
    "Magistral": ("[THINK] … [/THINK] … '[TOOL_CALLS]' + name + '[ARGS]'", "mistral", "mistral"),
    "DeepSeek R1": (
        f"</think> … '<{BAR}tool▁calls▁begin{BAR}><{BAR}tool▁call▁begin{BAR}>' + type",
        "deepseek",
        "think",
    ),
    "FunctionGemma": ("<start_function_call>call:{{ name }}", "functiongemma", None),
    "Gemma 4": ("'<|channel>thought\\n' … '<|tool_call>call:' + name + '{'", "gemma4", "gemma4"),
    "Gemma 3": ("<start_of_turn>model\\n{{ content }}<end_of_turn>", "hermes", None),
    "Command R7B": ("<|START_THINKING|> … <|END_THINKING|>", "hermes", "cohere"),
}


@pytest.mark.parametrize(("template", "name", "reasoning"), TEMPLATES.values(), ids=list(TEMPLATES))
def test_a_template_shows_its_format(template: str, name: str, reasoning: str | None) -> None:
    form = select(template)
    assert form.name == name
    assert form.reasoning == select(None, reasoning_format=reasoning or "none").reasoning


def test_harmony_reasons_on_a_channel() -> None:
    form = select("'<|start|>assistant<|channel|>analysis<|message|>' + thinking + '<|end|>'")
    assert form.name == "harmony"
    assert form.reasoning == ("<|channel|>analysis<|message|>", "<|end|>")
    assert {"<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>"} <= set(form.markers)


def test_a_name_overrides_the_template() -> None:
    form = select("[TOOL_CALLS] [THINK]", tool_format="hermes", reasoning_format="think")
    assert (form.name, form.reasoning) == ("hermes", ("<think>", "</think>"))
    assert select("<think>", reasoning_format="none").reasoning is None


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r"'herms'.*, hermes, llama3-json") as refusal:
        select(None, tool_format="herms")
    assert all(name in str(refusal.value) for name in TOOL_FORMAT_NAMES)
    with pytest.raises(ModelError, match=r"'thinks'.*think, mistral") as refusal:
        select(None, reasoning_format="thinks")
    assert all(name in str(refusal.value) for name in REASONING_FORMAT_NAMES)


def test_the_markers_are_texts_of_single_tokens() -> None:
    form = select("<|tool_call>call: <|channel>thought")
    assert {"<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"} <= set(
        form.markers
    )
    assert form.end_markers == ("<|tool_response>",)
    assert {"<think>", "</think>"} <= set(select("<think>").markers)


def test_the_registry_finds_a_format_in_a_new_module(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "invented.py").write_text(
        "from rekindle.chat.tools.format import ToolFormat\n"
        "from rekindle.chat.tools.stream import ReplyParser\n"
        "FORMAT = ToolFormat(name='invented', parser=ReplyParser)\n"
    )
    monkeypatch.setattr(tools, "__path__", [*tools.__path__, str(tmp_path)])
    names = {format.name for format in registry.discover()}
    assert names == {*TOOL_FORMAT_NAMES, "invented"}


def test_every_row_of_the_template_table_names_a_format_and_can_win() -> None:
    """An earlier row with fewer texts would hide a later one."""
    for index, (name, texts) in enumerate(registry.TEMPLATE_TEXTS):
        assert name in TOOL_FORMAT_NAMES
        template = " ".join(texts)
        earlier = registry.TEMPLATE_TEXTS[:index]
        assert not [row for row in earlier if all(text in template for text in row[1])]
        assert select(template).name == name
