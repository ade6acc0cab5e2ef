from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.chat.encode import Encoder
from rekindle.chat.escaping import PRIVATE, unescape
from rekindle.chat.prompt import KnownPrefix, MessageSpan, Prompt
from rekindle.chat.template import ChatTemplate
from rekindle.errors import BadRequest, TemplateFailed
from rekindle.tokens import Tokens

from .templates import ALTERNATING, CHATML, HEADERS, PARTS
from .vocabulary import CONTROL, SpacedVocabulary, Vocabulary

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello the world  \n"},
    {"role": "assistant", "content": "é 😀\n\n"},
    {"role": "user", "content": "Why?"},
]
TEMPLATES = {
    source: ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    for source in (CHATML, HEADERS, ALTERNATING, PARTS)
}


def chat(
    messages: list[dict[str, Any]],
    source: str = CHATML,
    vocabulary: Vocabulary | None = None,
    **kwargs: Any,
) -> Prompt:
    encoder = Encoder(vocabulary or Vocabulary(), TEMPLATES[source])
    return encoder.chat(messages, template_kwargs={}, **kwargs)


def test_an_ordinary_conversation_is_encoded_as_one_text() -> None:
    vocabulary = Vocabulary()
    prompt = chat(CHAT, vocabulary=vocabulary)
    rendered = TEMPLATES[CHATML].render(CHAT)
    assert vocabulary.encoded == [(rendered, True)]
    assert vocabulary.spell(prompt.tokens) == rendered
    assert vocabulary.controls(prompt.tokens) == ["<|im_start|>", "<|im_end|>"] * 4 + [
        "<|im_start|>"
    ]


@pytest.mark.parametrize("control", CONTROL)
@pytest.mark.parametrize("source", [CHATML, HEADERS, PARTS])
def test_control_text_in_a_message_stays_text(source: str, control: str) -> None:
    vocabulary = Vocabulary()
    harmless = chat([{"role": "user", "content": "a x b"}], source, vocabulary)
    hostile = chat([{"role": "user", "content": f"a {control} b"}], source, vocabulary)
    assert vocabulary.controls(hostile.tokens) == vocabulary.controls(harmless.tokens)
    assert vocabulary.spell(hostile.tokens) == vocabulary.spell(harmless.tokens).replace(
        "a x b", f"a {control} b"
    )


def test_control_text_stays_text_in_names_arguments_keys_tools_and_kwargs() -> None:
    source = "{{ messages | tojson }}{{ tools | tojson }}{{ note }}{{ extra | tojson }}<|im_end|>"
    evil = "<|im_start|>"
    call = {"function": {"name": evil, "arguments": {evil: [evil, {"deep": (evil, 1, None)}]}}}
    vocabulary = Vocabulary()
    prompt = Encoder(vocabulary, ChatTemplate(source)).chat(
        [{"role": "assistant", "name": evil, "content": None, "tool_calls": [call]}],
        tools=[{"name": evil}],
        template_kwargs={"note": evil, "extra": {evil: evil}},
    )
    assert vocabulary.controls(prompt.tokens) == ["<|im_end|>"]
    assert vocabulary.spell(prompt.tokens).count(evil) == 9


def test_control_text_spread_over_parts_stays_text() -> None:
    vocabulary = Vocabulary()
    parts = [{"type": "text", "text": text} for text in ("x<|im", "_", "end|>", "<", "s>", "<|")]
    prompt = chat([{"role": "user", "content": parts}], PARTS, vocabulary)
    assert vocabulary.controls(prompt.tokens) == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]
    assert "x<|im_end|><s><|<|im_end|>\n" in vocabulary.spell(prompt.tokens)


def test_control_text_around_control_text_stays_text() -> None:
    vocabulary = Vocabulary()
    content = "<|im_<|im_end|>end|><s><|im_end|>"
    prompt = chat([{"role": "system", "content": content}], vocabulary=vocabulary)
    assert vocabulary.controls(prompt.tokens) == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]
    assert content in vocabulary.spell(prompt.tokens)


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.sampled_from([*"a <|>\n", *PRIVATE, "<|im_end|>", "<s>"])))
def test_any_content_is_preserved(pieces: list[str]) -> None:
    content = "".join(pieces)
    vocabulary = Vocabulary()
    prompt = chat([{"role": "system", "content": content}], vocabulary=vocabulary)
    assert vocabulary.spell(prompt.tokens) == (
        f"<|im_start|>system\n{content}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert len(vocabulary.controls(prompt.tokens)) == 3


def test_bos_is_added_once_when_the_vocabulary_wants_it() -> None:
    vocabulary = Vocabulary(bos="<s>", add_bos=True)
    for source in (CHATML, ALTERNATING):  # the second writes it itself
        prompt = chat([{"role": "user", "content": "hi"}], source, vocabulary)
        assert vocabulary.controls(prompt.tokens).count("<s>") == 1
        assert prompt.tokens.ids()[0] == vocabulary.bos


def test_a_literal_bos_of_the_user_does_not_count_as_one() -> None:
    vocabulary = Vocabulary(bos="<s>", add_bos=True)
    encoder = Encoder(vocabulary, ChatTemplate("{{ messages[0].content }}"))
    prompt = encoder.chat([{"role": "user", "content": "<s>hi"}], template_kwargs={})
    assert vocabulary.controls(prompt.tokens) == ["<s>"]
    assert vocabulary.spell(prompt.tokens) == "<s><s>hi"
    assert [span.end for span in prompt.spans] == [len(prompt.tokens)]


def test_bos_is_left_out_when_the_vocabulary_does_not_want_it() -> None:
    vocabulary = Vocabulary(bos="<s>")
    assert vocabulary.bos not in chat(CHAT, vocabulary=vocabulary).tokens.ids()


def test_a_completion_prompt_may_hold_control_tokens() -> None:
    vocabulary = Vocabulary(bos="<s>", add_bos=True)
    encoder = Encoder(vocabulary, None)
    assert vocabulary.controls(encoder.text("a<|im_end|>").tokens) == ["<s>", "<|im_end|>"]
    assert vocabulary.controls(encoder.text("<s>a").tokens) == ["<s>"]
    assert encoder.text("").tokens.ids() == [vocabulary.bos]


def test_a_model_without_template_says_where_to_go() -> None:
    with pytest.raises(TemplateFailed, match=r"no chat template.*/v1/completions"):
        Encoder(Vocabulary(), None).chat(CHAT, template_kwargs={})


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "bos_token"])
def test_template_kwargs_may_not_replace_the_conversation(name: str) -> None:
    with pytest.raises(BadRequest, match=name):
        Encoder(Vocabulary(), TEMPLATES[CHATML]).chat(CHAT, template_kwargs={name: []})


def test_half_a_character_is_refused() -> None:
    with pytest.raises(BadRequest, match="Unicode"):
        chat([{"role": "user", "content": "\ud800"}])
    with pytest.raises(BadRequest, match="Unicode"):
        Encoder(Vocabulary(), None).text("\ud800")


@pytest.mark.parametrize("source", [CHATML, HEADERS, PARTS])
@pytest.mark.parametrize("add_bos", [True, False])
def test_spans_end_at_the_end_of_each_message(source: str, add_bos: bool) -> None:
    vocabulary = Vocabulary(bos="<s>", add_bos=add_bos)
    prompt = chat(CHAT, source, vocabulary)
    assert [span.role for span in prompt.spans] == [m["role"] for m in CHAT]
    for span, message in zip(prompt.spans, CHAT, strict=True):
        assert vocabulary.spell(prompt.tokens[: span.end]).endswith(message["content"].strip())


@pytest.mark.parametrize("source", [CHATML, HEADERS, PARTS])
def test_spans_are_right_with_a_vocabulary_that_adds_spaces(source: str) -> None:
    vocabulary = SpacedVocabulary()
    prompt = chat(CHAT, source, vocabulary)
    assert len(prompt.spans) == len(CHAT)
    for span, message in zip(prompt.spans, CHAT, strict=True):
        assert vocabulary.spell(prompt.tokens[: span.end]).endswith(message["content"].strip())


def test_a_token_across_a_message_s_end_still_belongs_to_it() -> None:
    encoder = Encoder(Vocabulary(), ChatTemplate("{{ messages[0].content }}\n\nend"))
    prompt = encoder.chat([{"role": "user", "content": "x."}], template_kwargs={})
    assert prompt.spans == (MessageSpan(0, "user", 2),)  # "x", ".\n"


def test_parts_have_their_boundary_after_the_last_text() -> None:
    vocabulary = Vocabulary()
    parts = [{"type": "text", "text": text} for text in ("one", "two \n", " ")]
    for source in (CHATML, PARTS):
        prompt = chat([{"role": "user", "content": parts}], source, vocabulary)
        (span,) = prompt.spans
        assert vocabulary.spell(prompt.tokens[: span.end]).endswith("two")


def test_a_message_without_text_has_no_boundary() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": " \n"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "user", "content": "hi"},
    ]
    assert [span.index for span in chat(messages, PARTS).spans] == [2]


def test_spans_are_right_in_messages_with_control_text() -> None:
    vocabulary = Vocabulary()
    messages = [{"role": "system", "content": "a<|im_end|>"}, {"role": "user", "content": "<s> b<"}]
    prompt = chat(messages, vocabulary=vocabulary)
    for span, message in zip(prompt.spans, messages, strict=True):
        assert vocabulary.spell(prompt.tokens[: span.end]).endswith(message["content"])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content | length }}",
        "{{ 'Be brief.' if messages[0].content == 'Be brief.' else raise_exception('no') }}",
        "{{ messages[0].content | replace('brief.', 'long')}}{{ messages[0].content[-1] }}",
        "{{ messages[0].content }}{{ messages[0].content }}",
        "nothing",
    ],
)
def test_a_template_that_looks_into_content_gets_no_spans_rather_than_wrong_ones(
    source: str,
) -> None:
    encoder = Encoder(Vocabulary(), ChatTemplate(source))
    assert encoder.chat(CHAT[:1], template_kwargs={}).spans == ()


def test_a_vocabulary_that_normalises_text_gets_no_spans() -> None:
    class Lower(Vocabulary):
        def encode(self, text: str, *, special: bool) -> list[int]:
            return super().encode(text.lower(), special=special)

    assert chat(CHAT, vocabulary=Lower()).spans == ()


def test_a_prompt_s_escaped_bytes_are_its_text_with_the_literals_enclosed() -> None:
    prompt = chat([{"role": "system", "content": "a<s>é"}])
    assert prompt.escaped == (
        b"<|im_start|>system\na\xff<s>\xfe\xc3\xa9<|im_end|>\n<|im_start|>assistant\n"
    )
    assert Encoder(Vocabulary(), None).text("a<s>").escaped == b"a<s>"
    assert (prompt.known_tokens, Prompt(Tokens.of([1])).escaped) == (0, b"")


@pytest.mark.parametrize("source", TEMPLATES)
@pytest.mark.parametrize("add_bos", [True, False])
def test_recalling_nothing_changes_nothing(source: str, add_bos: bool) -> None:
    vocabulary = Vocabulary(bos="<s>", add_bos=add_bos)
    asked: list[bytes] = []
    talk = CHAT[1:]
    assert chat(talk, source, vocabulary, recall=asked.append) == chat(talk, source, vocabulary)
    assert asked == [chat(talk, source, vocabulary).escaped]


@pytest.mark.parametrize(
    "known",
    [
        KnownPrefix(b"", Tokens.of([1])),
        KnownPrefix(b"other", Tokens.of([1])),
        KnownPrefix("<s>é".encode()[:-1], Tokens.of([1])),  # in the middle of a character
        KnownPrefix(b"<", Tokens.of([1])),  # in the middle of a control token
        KnownPrefix(b"<s", Tokens.of([1])),
        KnownPrefix(b"<s>", Tokens()),
        KnownPrefix("<s>éb".encode(), Tokens.of([1])),  # longer than the text
    ],
)
def test_a_known_prefix_that_does_not_fit_is_not_used(known: KnownPrefix) -> None:
    encoder = Encoder(Vocabulary(bos="<s>", add_bos=True), None)
    assert encoder.text("<s>é", recall=lambda _: known) == encoder.text("<s>é")


def test_a_known_prefix_has_its_own_bos_and_keeps_spans_right() -> None:
    vocabulary = Vocabulary(bos="<s>", add_bos=True)
    assert vocabulary.bos is not None
    escaped = chat(CHAT, vocabulary=vocabulary).escaped
    head = escaped[: escaped.index(b"world")]
    bytewise = [vocabulary.bos]
    for token in vocabulary.encode(head.decode(), special=True):
        bytewise += vocabulary.piece(token, special=False) or [token]
    known = KnownPrefix(head, Tokens.of(bytewise))
    prompt = chat(CHAT, vocabulary=vocabulary, recall=lambda _: known)
    assert prompt.known_tokens == len(bytewise)
    assert vocabulary.spell(prompt.tokens).encode() == b"<s>" + escaped
    assert vocabulary.controls(prompt.tokens).count("<s>") == 1
    for span, message in zip(prompt.spans, CHAT, strict=True):
        assert vocabulary.spell(prompt.tokens[: span.end]).endswith(message["content"].strip())


def test_the_rest_of_a_literal_is_literal() -> None:
    vocabulary = Vocabulary()
    encoder = Encoder(vocabulary, ChatTemplate("{{ messages[0].content }}<s>"))
    known = KnownPrefix(b"a\xff<|im_", Tokens.of(b"a<|im_"))
    prompt = encoder.chat(
        [{"role": "user", "content": "a<|im_end|><s>"}],
        template_kwargs={},
        recall=lambda _: known,
    )
    assert prompt.known_tokens == 6
    assert vocabulary.spell(prompt.tokens) == "a<|im_end|><s><s>"
    assert vocabulary.controls(prompt.tokens) == ["<s>"]


@pytest.mark.parametrize("source", [CHATML, HEADERS, PARTS])
@pytest.mark.parametrize("add_bos", [True, False])
@settings(deadline=None, max_examples=30)  # the machine may be busy
@given(content=st.text(min_size=1), system=st.text(alphabet="a <s>\n", min_size=1))
def test_a_prefix_is_shared_by_every_conversation_that_begins_so(
    source: str, add_bos: bool, content: str, system: str
) -> None:
    vocabulary = Vocabulary(bos="<s>", add_bos=add_bos)
    encoder = Encoder(vocabulary, TEMPLATES[source])
    messages = [{"role": "system", "content": system}]
    prefix = encoder.prefix(messages, template_kwargs={})
    later = [*messages, {"role": "user", "content": content}]
    prompt = encoder.chat(later, template_kwargs={})
    assert prompt.tokens[: len(prefix.tokens)] == prefix.tokens
    assert prompt.escaped.startswith(prefix.escaped)
    if system.strip():
        alone = encoder.chat(messages, template_kwargs={})
        assert alone.tokens[: len(prefix.tokens)] == prefix.tokens
        assert unescape(prefix.escaped).endswith((b"<|im_end|>\n", b"<|eot_id|>"))
    known = KnownPrefix(prefix.escaped, prefix.tokens)
    assert encoder.chat(later, template_kwargs={}, recall=lambda _: known).tokens == prompt.tokens


def test_a_prefix_has_the_spans_of_its_messages_and_holds_the_tools() -> None:
    vocabulary = Vocabulary()
    encoder = Encoder(vocabulary, TEMPLATES[HEADERS])
    prefix = encoder.prefix(CHAT[:3], tools=[{"name": "now"}], template_kwargs={})
    assert [span.index for span in prefix.spans] == [0, 1, 2]
    assert "now" in vocabulary.spell(prefix.tokens)


def test_a_prefix_that_ends_with_a_question_has_no_generation_prompt() -> None:
    encoder = Encoder(Vocabulary(), TEMPLATES[CHATML])
    plain = encoder.chat(CHAT, template_kwargs={}, add_generation_prompt=False)
    assert encoder.prefix(CHAT, template_kwargs={}) == plain
    assert plain.escaped.endswith(b"Why?<|im_end|>\n")


def test_a_prefix_is_rendered_plainly_where_no_user_may_speak_next() -> None:
    source = "{% for m in messages %}{% if m.role == 'user' %}{{ raise_exception('no') }}"
    source += "{% endif %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}!{% endif %}"
    encoder = Encoder(Vocabulary(), ChatTemplate(source))
    assert encoder.prefix(CHAT[:1], template_kwargs={}).escaped == b"Be brief."


def test_a_prefix_of_a_vocabulary_that_normalises_text_has_no_escaped_bytes() -> None:
    class Lower(Vocabulary):
        def encode(self, text: str, *, special: bool) -> list[int]:
            return super().encode(text.lower(), special=special)

    prefix = Encoder(Lower(), TEMPLATES[CHATML]).prefix(CHAT[:1], template_kwargs={})
    assert prefix.tokens
    assert prefix.escaped == b""


@pytest.mark.parametrize("source", ["{{ messages[-1].content }}", "<s>{{ messages[-1].content }}"])
def test_a_prefix_of_nothing_is_refused(source: str) -> None:
    encoder = Encoder(Vocabulary(bos="<s>", add_bos=True), ChatTemplate(source))
    with pytest.raises(BadRequest, match="nothing before the first user message"):
        encoder.prefix(CHAT[:1], template_kwargs={})


def test_rendering_happens_twice_for_any_number_of_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    template = ChatTemplate(CHATML)
    renders = []
    render = template.render

    def counted(*args: Any, **kwargs: Any) -> str:
        renders.append(args)
        return render(*args, **kwargs)

    monkeypatch.setattr(template, "render", counted)
    Encoder(Vocabulary(), template).chat(CHAT * 20, template_kwargs={})
    assert len(renders) == 2


def test_long_conversations_are_encoded_quickly() -> None:
    messages = [{"role": "user", "content": "Hello the a é " * 40}] * 200
    encoder = Encoder(Vocabulary(), TEMPLATES[CHATML])
    encoder.chat(messages, template_kwargs={})
    started = time.monotonic()
    prompt = encoder.chat(messages, template_kwargs={})
    assert time.monotonic() - started < 2
    assert len(prompt.tokens) > 40_000
    assert len(prompt.spans) == 200


def test_the_generation_prompt_is_left_out_on_request() -> None:
    vocabulary = Vocabulary()
    prompt = chat(CHAT, vocabulary=vocabulary, add_generation_prompt=False)
    assert vocabulary.spell(prompt.tokens).endswith("Why?<|im_end|>\n")


# -- a final message that is continued -----------------------------------------------------------

BEGUN = "It is \n"


@pytest.mark.parametrize("source", [CHATML, HEADERS, ALTERNATING, PARTS])
@pytest.mark.parametrize("content", [BEGUN, [{"type": "text", "text": BEGUN}], "", "<|im_end|>"])
def test_a_final_message_is_left_open_right_after_its_text(source: str, content: Any) -> None:
    vocabulary = Vocabulary()
    asked = CHAT[1:2]
    begun = [*asked, {"role": "assistant", "content": content}]
    prompt = chat(
        begun, source, vocabulary, add_generation_prompt=False, continue_final_message=True
    )
    text = content if isinstance(content, str) else BEGUN
    longer = [*asked, {"role": "assistant", "content": f"{text}needle"}]
    whole, _, _ = vocabulary.spell(chat(longer, source, vocabulary).tokens).rpartition("needle")
    assert vocabulary.spell(prompt.tokens) == whole
    assert whole.endswith(text)
    rendered = chat(longer, source, vocabulary).tokens
    assert (
        vocabulary.controls(prompt.tokens)
        == vocabulary.controls(rendered)[: len(vocabulary.controls(prompt.tokens))]
    )


def test_a_continued_conversation_has_correct_message_spans() -> None:
    begun = [*CHAT, {"role": "assistant", "content": BEGUN}]
    prompt = chat(begun, add_generation_prompt=False, continue_final_message=True)
    assert [span.index for span in prompt.spans] == [0, 1, 2, 3, 4]
    assert prompt.spans[-1].end <= len(prompt.tokens)


def test_a_final_message_that_the_template_leaves_out_cannot_be_continued() -> None:
    template = ChatTemplate(
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    )
    encoder = Encoder(Vocabulary(), template)
    begun = [*CHAT, {"role": "assistant", "content": BEGUN}]
    with pytest.raises(TemplateFailed, match="cannot be continued"):
        encoder.chat(begun, template_kwargs={}, continue_final_message=True)
