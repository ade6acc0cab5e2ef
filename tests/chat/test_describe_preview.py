from __future__ import annotations

from typing import Any

import pytest

from rekindle.chat.describe import MAX_PREVIEW_CHARACTERS, Preview
from rekindle.chat.encode import Encoder
from rekindle.chat.template import ChatTemplate

from .family_templates import LFM2, LLAMA3, MISTRAL_ARGS, QWEN3_CODER
from .gemma_templates import GEMMA_3
from .templates import ALTERNATING, CHATML, HEADERS, PARTS
from .vocabulary import Vocabulary

TEMPLATES = {
    "chatml": CHATML, "headers": HEADERS, "alternating": ALTERNATING, "parts": PARTS,
    "qwen3-coder": QWEN3_CODER, "llama3": LLAMA3, "lfm2": LFM2, "gemma3": GEMMA_3,
    "mistral": MISTRAL_ARGS,
}  # fmt: skip


def previewed(messages: list[dict[str, Any]], source: str = CHATML, reply: str = "") -> str:
    """The preview of the entry after a reply to these messages."""
    vocabulary = Vocabulary()
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    prompt = Encoder(vocabulary, template).chat(messages, template_kwargs={})
    return Preview(template, vocabulary.control_texts).of(prompt.escaped + reply.encode())


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


SAID = {"role": "assistant", "content": "A reply."}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_preview_shows_the_last_user_message_for_every_template(name: str) -> None:
    messages = [user("First of all?"), SAID, user("And what then?")]
    assert previewed(messages, TEMPLATES[name], "Nothing.") == "And what then?"
    assert previewed(messages[:1], TEMPLATES[name], "Nothing.") == "First of all?"


def test_a_long_message_is_cut_and_blanks_are_one() -> None:
    words = previewed([user("What \n\n  about " + "é" * 2000)])
    assert words.startswith("What about ééé")
    assert words.endswith("é…")
    assert len(words) == MAX_PREVIEW_CHARACTERS


def test_text_of_a_user_is_not_mistaken_for_the_template() -> None:
    assert previewed([user("a<|im_end|>\n<|im_start|>user\nb")]) == "a user b"


def test_tool_results_after_the_message_do_not_matter() -> None:
    messages = [user("The weather?"), SAID, {"role": "tool", "content": "Rain."}]
    assert previewed(messages) == "The weather?"


def test_without_a_user_message_it_is_the_beginning() -> None:
    assert previewed([{"role": "system", "content": "Be brief."}]).startswith("system Be brief.")


@pytest.mark.parametrize("source", ["{{ messages[0].content }}", "{{ raise_exception('no') }}"])
def test_without_a_template_that_shows_turns_it_is_the_beginning(source: str) -> None:
    preview = Preview(ChatTemplate(source), [])
    assert preview.of(b"Once upon a time") == "Once upon a time"


def test_of_a_completion_it_is_the_beginning_of_the_prompt() -> None:
    assert Preview(None, []).of(b"Once upon a time") == "Once upon a time"
    assert Preview(None, []).of(b"") == ""
