"""Pictures in prompts are rendered in place by every template and recovered from ids."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.chat.describe import Preview
from rekindle.chat.encode import Encoder
from rekindle.chat.message_hashes import ConversationHashes
from rekindle.chat.messages import picture_text, with_digests, with_pictures_as_text
from rekindle.chat.prompt import KnownPrefix, Prompt
from rekindle.chat.template import ChatTemplate
from rekindle.errors import BadRequest, TemplateFailed
from rekindle.tokens import MEDIA_BIT, Tokens

from .templates import ALTERNATING, CHATML, HEADERS, PARTS
from .vocabulary import CONTROL, SpacedVocabulary, Vocabulary

# As vision models have them: they know image parts, and write markers of their own for them.
QWEN_VL = """\
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- else %}{{- part.text }}{%- endif %}{%- endfor %}{%- endif %}
{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
TRIMMING = QWEN_VL.replace("message.content }}", "message.content | trim }}").replace(
    "part.text }}", "part.text | trim }}"
)
SOURCES = (CHATML, HEADERS, ALTERNATING, PARTS, QWEN_VL, TRIMMING)
TEMPLATES = {source: ChatTemplate(source, bos_token="<s>", eos_token="</s>") for source in SOURCES}
ONE, OTHER = "0a" * 32, "0b" * 32


def tokens_of(digest: str) -> Tokens:
    """A picture with tokens of the model around it."""
    span = Tokens.of_media(bytes.fromhex(digest), 6, 6)
    return Tokens.of([ord("<")]) + span + Tokens.of([ord(">")])


PICTURES = {picture_text(digest): tokens_of(digest) for digest in (ONE, OTHER)}


def image(digest: str) -> dict[str, str]:
    return {"type": "image", "digest": digest}


def user(*parts: str | dict[str, str]) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": "user", "content": content}


def chat(messages: list[dict[str, Any]], source: str = CHATML, **kwargs: Any) -> Prompt:
    encoder = Encoder(kwargs.pop("vocabulary", None) or Vocabulary(), TEMPLATES[source])
    return encoder.chat(messages, template_kwargs={}, pictures=PICTURES, **kwargs)


def shown(prompt: Prompt) -> bytes:
    """The text of a prompt, each picture as a single byte."""
    ids = prompt.tokens.ids()
    for span in reversed(prompt.tokens.media):
        name = ord("1") if span.digest == bytes.fromhex(ONE) else ord("2")
        ids[span.start : span.stop] = [name]
    vocabulary = Vocabulary()
    return b"".join(vocabulary.piece(token, special=True) for token in ids)


@pytest.mark.parametrize("source", SOURCES)
def test_every_template_renders_a_picture_in_its_place(source: str) -> None:
    prompt = chat([user("Look: ", image(ONE), " and ", image(OTHER), image(ONE), "what?")], source)
    assert b"Look: <1> and <2><1>what?" in shown(prompt)
    assert b"vision_start" not in shown(prompt)
    assert len(prompt.spans) == 1


@pytest.mark.parametrize("source", SOURCES)
def test_a_message_begins_and_ends_with_its_pictures(source: str) -> None:
    messages = [user(image(ONE), "what?"), {"role": "assistant", "content": "A cat."}]
    messages.append(user("And this?", image(OTHER)))
    prompt = chat(messages, source)
    first, last = prompt.tokens.media
    spans = {span.index: span for span in prompt.spans}
    assert spans[0].start == first.start - 1
    assert spans[2].end == last.stop + 1


@pytest.mark.parametrize("control", [*CONTROL, "<__media__>", picture_text(ONE)])
def test_text_next_to_a_picture_stays_text(control: str) -> None:
    """This includes halves of a control text on both sides of a picture."""
    vocabulary = Vocabulary()
    half = len(control) // 2
    for parts in ((control, image(ONE)), (control[:half], image(ONE), control[half:])):
        prompt = chat([user(*parts)], vocabulary=vocabulary)
        harmless = chat([user("x", image(ONE))])
        text_tokens = [token for token in prompt.tokens if token < MEDIA_BIT]
        expected = vocabulary.controls(t for t in harmless.tokens if t < MEDIA_BIT)
        assert vocabulary.controls(text_tokens) == expected
        assert len(prompt.tokens.media) == 1


def test_texts_are_joined_by_a_line_break_and_a_picture_by_nothing() -> None:
    messages = [user("a", "b", image(ONE), "c", "d")]
    [flat] = with_pictures_as_text(messages, lambda text: text[7:9])
    assert flat["content"] == "a\nb0ac\nd"


def test_a_part_that_is_neither_text_nor_a_picture_is_refused() -> None:
    with pytest.raises(TemplateFailed, match="audio"):
        chat([user(image(ONE), {"type": "audio"})])


def test_image_parts_and_pictures_must_be_equal_in_number() -> None:
    messages = [user({"type": "image"}, "a", {"type": "image"}), {"role": "user", "content": "b"}]
    named = with_digests(messages, [ONE, OTHER])
    assert named == [user(image(ONE), "a", image(OTHER)), {"role": "user", "content": "b"}]
    with pytest.raises(BadRequest, match="2 image parts, but the request has 1"):
        with_digests(messages, [ONE])


# -- known prefixes ------------------------------------------------------------------------------


def continued(first: Prompt, reply: bytes, vocabulary: Vocabulary) -> KnownPrefix:
    """The known prefix after a reply, as it is read from disk: only ids, no pictures."""
    encoder = Encoder(vocabulary, TEMPLATES[CHATML])
    known = encoder.known_after(first, list(reply), reply.decode())
    assert known is not None
    return KnownPrefix(known.escaped, Tokens(known.tokens.packed))


@pytest.mark.parametrize("vocabulary", [Vocabulary(), SpacedVocabulary()], ids=["plain", "spaced"])
def test_a_known_prefix_is_used_with_its_pictures(vocabulary: Vocabulary) -> None:
    messages = [user("Look: ", image(ONE), image(OTHER), "what?")]
    known = continued(chat(messages, vocabulary=vocabulary), b"hello", vocabulary)
    messages += [{"role": "assistant", "content": "hello"}, user("And ", image(ONE), "?")]
    prompt = chat(messages, vocabulary=vocabulary, recall=lambda _escaped: known)
    assert prompt.known_tokens == len(known.tokens)
    assert prompt.tokens.startswith(known.tokens)
    digests = [span.digest.hex() for span in prompt.tokens.media]
    assert digests == [ONE, OTHER, ONE]
    for span in prompt.tokens.media:
        assert prompt.tokens.packed[4 * span.start : 4 * span.stop] == span.ids()


def test_a_prefix_with_another_picture_is_not_known() -> None:
    vocabulary = Vocabulary()
    known = continued(chat([user(image(ONE), "what?")]), b"hello", vocabulary)
    messages = [user(image(OTHER), "what?"), {"role": "assistant", "content": "hello"}]
    messages.append(user("?"))
    assert chat(messages, recall=lambda _escaped: known).known_tokens == 0
    lying = known._replace(escaped=known.escaped.replace(ONE.encode(), OTHER.encode()))
    assert chat(messages, recall=lambda _escaped: lying).known_tokens == 0


def test_a_shared_prefix_may_end_with_a_picture() -> None:
    encoder = Encoder(Vocabulary(), TEMPLATES[CHATML])
    system = {**user("Be brief.", image(ONE)), "role": "system"}
    prefix = encoder.prefix([system], template_kwargs={}, pictures=PICTURES)
    prompt = chat([system, user(image(OTHER), "?")])
    assert prompt.tokens.startswith(prefix.tokens)
    assert prompt.escaped.startswith(prefix.escaped)
    assert [span.digest.hex() for span in prefix.tokens.media] == [ONE]


@settings(deadline=None)
@given(st.lists(st.sampled_from([ONE, OTHER, None]), max_size=6), st.data())
def test_pictures_are_recovered_from_ids(order: list[str | None], data: st.DataObject) -> None:
    tokens = Tokens()
    for digest in order:
        text = Tokens.of(data.draw(st.lists(st.integers(0, 99), max_size=3)))
        tokens = tokens + text + (tokens_of(digest) if digest else Tokens())
    bare = Tokens(tokens.packed)
    found = bare.with_media(tokens.media)
    assert found is not None
    assert found.media == tokens.media
    if tokens.media:
        assert bare.with_media(tokens.media[1:]) is None
        assert bare.with_media([*tokens.media, tokens.media[0]]) is None


# -- hashes and preview --------------------------------------------------------------------------


def test_pictures_are_in_every_hash_of_a_conversation() -> None:
    reply = {"role": "assistant", "content": "A cat."}
    one, other, none = (
        ConversationHashes([user(*parts), reply])
        for parts in ((image(ONE), "what?"), (image(OTHER), "what?"), ("what?",))
    )
    for hashes in ("segments", "fingerprint", "reply_keys"):
        values = [str(getattr(each, hashes)) for each in (one, other, none)]
        assert len(set(values)) == 3
    assert one.first_change(other.segments) == "turn 1"


def test_a_preview_says_that_there_is_a_picture() -> None:
    prompt = chat([user(image(ONE), "what is this?")])
    assert Preview(TEMPLATES[CHATML], CONTROL).of(prompt.escaped) == "[image] what is this?"


@pytest.mark.parametrize("source", SOURCES)
def test_a_continued_conversation_with_pictures_encodes_like_a_new_one(source: str) -> None:
    encoder = Encoder(Vocabulary(), TEMPLATES[source])
    messages, earlier = [user("Look: ", image(ONE))], None
    for reply, question in (("A cat.", user("And ", image(OTHER), "?")), ("<s>", user("Why?"))):
        messages += [{"role": "assistant", "content": reply}, question]
        encode = partial(encoder.chat, messages, template_kwargs={}, pictures=PICTURES)
        whole, earlier = encode(), encode(earlier=earlier)
        assert earlier == whole
        assert earlier.tokens.media == whole.tokens.media
        messages = list(messages)
