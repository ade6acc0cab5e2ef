"""The models of `peers.py`, which is a script and not a package."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import pytest

from rekindle.chat.template import ChatTemplate
from tests.support.tiny import write_llama

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

TOOL = {"type": "function", "function": {"name": "read_notes", "parameters": {"type": "object"}}}
CALL = {"name": "read_notes", "arguments": '{"place": "the harbor"}'}
HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": "You are an agent."},
    {"role": "user", "content": "What happened?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00001", "type": "function", "function": CALL}],
    },
    {"role": "tool", "tool_call_id": "call00001", "content": "A bridge was built."},
]


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("models")


def test_the_tool_loop_uses_the_same_tensors_with_a_template_that_shows_tools(
    models: ModuleType, tmp_path: Path
) -> None:
    plain = write_llama(tmp_path / "tiny.gguf", layers=1)
    tooled = models.fitting("toolloop", plain, tmp_path)
    before, after = gguf.GGUFReader(plain), gguf.GGUFReader(tooled)
    assert [(each.name, each.data.tobytes()) for each in after.tensors] == [
        (each.name, each.data.tobytes()) for each in before.tensors
    ]
    assert before.fields.keys() == after.fields.keys()
    assert after.fields[models.TEMPLATE_KEY].contents() == models.TOOL_TEMPLATE


def test_the_template_shows_tools_calls_and_results(models: ModuleType) -> None:
    text = ChatTemplate(models.TOOL_TEMPLATE).render(
        HISTORY, tools=[TOOL], add_generation_prompt=True
    )
    assert text.count("You are an agent.") == 1
    assert '"name": "read_notes", "parameters"' in text
    assert '{"name": "read_notes", "arguments": {"place": "the harbor"}}' in text
    assert "<|im_start|>tool\nA bridge was built.<|im_end|>" in text
    assert text.endswith("<|im_start|>assistant\n")


def test_a_hybrid_model_is_written_for_its_scenario(models: ModuleType, tmp_path: Path) -> None:
    path = models.fitting("hybrid", tmp_path / "unused.gguf", tmp_path)
    fields = gguf.GGUFReader(path).fields
    assert fields["general.architecture"].contents() == "lfm2"
    assert fields["lfm2.context_length"].contents() == models.CONTEXT_TOKENS


def test_other_scenarios_use_the_model_itself(models: ModuleType) -> None:
    assert models.fitting("agents", Path("a.gguf"), Path("nowhere")) == Path("a.gguf")
