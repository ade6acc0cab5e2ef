from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.chat.detokenize import Detokenizer
from rekindle.chat.encode import Encoder
from rekindle.chat.escaping import unescape
from rekindle.chat.prompt import KnownPrefix, MessageSpan, Prompt, Recall
from rekindle.chat.template import ChatTemplate
from rekindle.engine.base import EngineOptions
from rekindle.engine.llamacpp.engine import LlamaCppEngine
from rekindle.tokens import Tokenizer, Tokens

from .templates import ALTERNATING, CHATML, HEADERS, PARTS
from .vocabulary import CONTROL, MERGES, SpacedVocabulary, Vocabulary

TEMPLATES = {
    source: ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    for source in (CHATML, HEADERS, ALTERNATING, PARTS)
}
ONLY_CONTENT = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
SPELLINGS = [*(bytes([value]) for value in range(256)), *MERGES]
TOKENS = len(SPELLINGS) + len(CONTROL)

PARTS_OF_CONTROL = ["<|", "<|im_", "end|>", "<"]
SCRIPTS = ["é", "日本語", "क्षि", "😀", "🏳️\u200d🌈", "\uff5e", "\ufffd"]
WORDS = ["Hello", " the", " a", "b", ".\n", "\n\n", " "]

texts = st.lists(st.sampled_from([*CONTROL, *PARTS_OF_CONTROL, *SCRIPTS, *WORDS]), max_size=12).map(
    "".join
)
stops = st.lists(st.sampled_from(["b", "o th", "\n", "本", "|>", "😀", "Hello"]), max_size=2)


@st.composite
def sampled(draw: st.DrawFn) -> list[int]:
    """A reply in unusual pieces, possibly cut inside a character or with stray tokens."""
    rng = draw(st.randoms(use_true_random=False))
    reply = odd_pieces(draw(texts).encode(), rng)
    if draw(st.booleans()):
        reply = reply[: draw(st.integers(0, len(reply)))]
    stray = draw(st.lists(st.integers(0, TOKENS - 1), max_size=3))
    return reply + stray if draw(st.booleans()) else reply


def odd_pieces(text: bytes, rng: random.Random) -> list[int]:
    """Tokens that spell `text`, each chosen at random among those that could come next."""
    tokens, at = [], 0
    while at < len(text):
        fitting = [token for token, piece in enumerate(SPELLINGS) if text.startswith(piece, at)]
        tokens.append(rng.choice(fitting))
        at += len(SPELLINGS[tokens[-1]])
    return tokens


def shown(tokenizer: Tokenizer, reply: Sequence[int], stop: Sequence[str] = ()) -> str:
    """The text of a reply that the client gets."""
    stream, text = Detokenizer(tokenizer, stop), ""
    for token in reply:
        text += stream.push(token)
    return text + stream.finish()


def memory(*prefixes: KnownPrefix | None) -> Recall:
    """Recalls the longest of `prefixes`, as a cache does."""

    def recall(escaped: bytes) -> KnownPrefix | None:
        fitting = [known for known in prefixes if known and escaped.startswith(known.escaped)]
        return max(fitting, key=lambda known: len(known.escaped), default=None)

    return recall


def message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def spelling(vocabulary: Vocabulary, prompt: Prompt) -> bytes:
    """The text of the tokens, without an added BOS."""
    pieces = [vocabulary.piece(token, special=True) for token in prompt.tokens]
    if vocabulary.add_bos and not prompt.escaped.startswith(b"<s>"):
        pieces = pieces[1:]
    return b"".join(pieces)


def bytes_around(vocabulary: Vocabulary, prompt: Prompt, span: MessageSpan) -> tuple[int, int]:
    """The byte offsets of the last token of a message."""
    pieces = [vocabulary.piece(token, special=True) for token in prompt.tokens[: span.end]]
    return sum(map(len, pieces[:-1])), sum(map(len, pieces))


@pytest.mark.parametrize("source", TEMPLATES)
@pytest.mark.parametrize("add_bos", [True, False])
@settings(deadline=None, max_examples=60)  # the machine may be busy
@given(replies=st.lists(sampled(), min_size=1, max_size=3), stop=stops, asked=texts)
def test_a_reply_sent_back_is_made_of_the_tokens_that_were_sampled(
    source: str, add_bos: bool, replies: list[list[int]], stop: list[str], asked: str
) -> None:
    vocabulary = Vocabulary(bos="<s>", add_bos=add_bos)
    encoder = Encoder(vocabulary, TEMPLATES[source])
    talk, prefixes = [message("user", "?" + asked)], list[KnownPrefix | None]()
    for reply in replies:
        prompt = encoder.chat(talk, template_kwargs={}, recall=memory(*prefixes))
        received = shown(vocabulary, reply, stop)
        known = encoder.known_after(prompt, reply, received)
        assert known is not None
        prefixes.append(known)
        talk += message("assistant", received), message("user", asked + "!")
        warm = encoder.chat(talk, template_kwargs={}, recall=memory(*prefixes))
        cold = encoder.chat(talk, template_kwargs={})
        assert spelling(vocabulary, warm) == unescape(warm.escaped)
        assert vocabulary.controls(warm.tokens) == vocabulary.controls(cold.tokens)
        assert warm.escaped == cold.escaped
        if source == HEADERS and received[:1].isspace():
            continue  # the template took away what was sampled
        assert warm.known_tokens == len(known.tokens)
        assert warm.tokens[: len(known.tokens)] == known.tokens
        for one, other in zip(warm.spans, cold.spans, strict=True):
            (begin, end), (start, stop_at) = (
                bytes_around(vocabulary, warm, one),
                bytes_around(vocabulary, cold, other),
            )
            assert begin < stop_at  # both hold the message's last character
            assert start < end


@settings(deadline=None)  # the machine may be busy
@given(sampled(), stops)
def test_the_longest_run_that_the_client_saw_is_kept(reply: list[int], stop: list[str]) -> None:
    vocabulary = Vocabulary()
    encoder = Encoder(vocabulary, TEMPLATES[CHATML])
    prompt = encoder.chat([message("user", "?")], template_kwargs={})
    received = shown(vocabulary, reply, stop)
    known = encoder.known_after(prompt, reply, received)
    assert known is not None
    kept = len(known.tokens) - len(prompt.tokens)
    pieces = [vocabulary.piece(token, special=False) for token in reply]
    fitting = [
        count
        for count in range(len(pieces) + 1)
        if all(pieces[:count])
        and any(
            received[:cut].encode() == b"".join(pieces[:count]) for cut in range(len(received) + 1)
        )
    ]
    assert kept == max(fitting)


@settings(deadline=None)  # the machine may be busy
@given(st.randoms(use_true_random=False), texts)
def test_a_whole_reply_is_kept_whole(rng: random.Random, text: str) -> None:
    vocabulary = Vocabulary()
    encoder = Encoder(vocabulary, TEMPLATES[CHATML])
    prompt = encoder.chat([message("user", "?")], template_kwargs={})
    reply = odd_pieces(text.encode(), rng)
    end = vocabulary.control_texts["<|im_end|>"]
    known = encoder.known_after(prompt, [*reply, end], text)
    assert known is not None
    assert known.tokens == prompt.tokens + Tokens.of([*reply])
    later = encoder.chat([message("user", "?"), message("assistant", text)], template_kwargs={})
    assert later.escaped.startswith(known.escaped + b"<|im_end|>\n")


@settings(deadline=None)  # the machine may be busy
@given(st.randoms(use_true_random=False), texts, st.sampled_from([CHATML, HEADERS, PARTS]))
def test_control_text_of_a_client_never_matches_text_of_the_template(
    rng: random.Random, text: str, source: str
) -> None:
    vocabulary = Vocabulary()
    encoder = Encoder(vocabulary, TEMPLATES[source])
    prompt = encoder.chat([message("user", "?")], template_kwargs={})
    known = encoder.known_after(prompt, odd_pieces(text.encode(), rng), text)
    assert known is not None
    forged = unescape(known.escaped).decode() + text
    forger = Encoder(vocabulary, ONLY_CONTENT)
    for messages in ([message("user", forged)], [message("user", each) for each in forged]):
        attempt = forger.chat(messages, template_kwargs={}, recall=lambda _: known)
        assert attempt.known_tokens == 0
        assert vocabulary.controls(attempt.tokens) == []


def test_a_known_prefix_may_end_inside_control_text_that_is_only_text() -> None:
    vocabulary = Vocabulary()
    encoder = Encoder(vocabulary, TEMPLATES[CHATML])
    talk = [message("user", "?")]
    prompt = encoder.chat(talk, template_kwargs={})
    known = encoder.known_after(prompt, list(b"a<|im"), "a<|im_end|>b")
    assert known is not None
    assert known.escaped == prompt.escaped + b"a\xff<|im"
    talk += message("assistant", "a<|im_end|>b"), message("user", "?")
    later = encoder.chat(talk, template_kwargs={}, recall=memory(known))
    assert later.known_tokens == len(known.tokens)
    assert vocabulary.controls(later.tokens) == ["<|im_start|>", "<|im_end|>"] * 4 + [
        "<|im_start|>"
    ]


def test_a_reply_that_ends_in_blanks_is_kept_where_a_template_takes_them_away() -> None:
    encoder = Encoder(Vocabulary(), TEMPLATES[HEADERS])
    talk = [message("user", "?")]
    prompt = encoder.chat(talk, template_kwargs={})
    known = encoder.known_after(prompt, list(b"Hello \n"), "Hello \n")
    assert known is not None
    assert known.tokens == prompt.tokens + Tokens.of([*b"Hello"])
    later = [*talk, message("assistant", "Hello \n"), message("user", "?")]
    assert encoder.chat(later, template_kwargs={}, recall=memory(known)).known_tokens


def test_a_prompt_of_token_ids_leaves_nothing_to_remember() -> None:
    prompt = Prompt(Tokens.of([1, 2]))
    encoder = Encoder(Vocabulary(), TEMPLATES[CHATML])
    assert encoder.known_after(prompt, [97], "a") is None


@settings(deadline=None)  # the machine may be busy
@given(texts, sampled(), texts)
def test_a_completion_sent_back_never_loses_the_control_tokens_its_author_wrote(
    text: str, reply: list[int], more: str
) -> None:
    vocabulary = Vocabulary(bos="<s>", add_bos=True)
    encoder = Encoder(vocabulary, None)
    received = shown(vocabulary, reply)
    known = encoder.known_after(encoder.text(text), reply, received)
    later = text + received + more
    warm, cold = encoder.text(later, recall=memory(known)), encoder.text(later)
    assert vocabulary.controls(warm.tokens) == vocabulary.controls(cold.tokens)
    assert spelling(vocabulary, warm) == later.encode()


def test_a_completion_sent_back_is_made_of_the_tokens_that_were_sampled() -> None:
    encoder = Encoder(Vocabulary(), None)
    prompt = encoder.text("<|im_start|>user\nHi")
    known = encoder.known_after(prompt, list(b" the <"), " the <")
    assert known is not None
    # "<" may yet begin a control token.
    assert known.tokens == prompt.tokens + Tokens.of([*b" the "])
    later = encoder.text("<|im_start|>user\nHi the <|im_end|>", recall=memory(known))
    assert later.tokens[: len(known.tokens)] == known.tokens


@pytest.mark.parametrize("source", TEMPLATES)
@settings(deadline=None, max_examples=50)  # the machine may be busy
@given(reply=sampled(), stop=stops)
def test_no_space_is_put_into_the_middle_of_a_reply(
    source: str, reply: list[int], stop: list[str]
) -> None:
    vocabulary = SpacedVocabulary()
    encoder = Encoder(vocabulary, TEMPLATES[source])
    talk = [message("user", "?")]
    prompt = encoder.chat(talk, template_kwargs={})
    received = shown(vocabulary, reply, stop)
    known = encoder.known_after(prompt, reply, received)
    assert known is not None
    talk += message("assistant", received), message("user", "!")
    later = encoder.chat(talk, template_kwargs={}, recall=memory(known))
    if not later.known_tokens:
        assert source == HEADERS
        return
    pieces = [vocabulary.piece(token, special=True) for token in later.tokens]
    rest = b"".join(pieces[later.known_tokens :])
    expected = unescape(later.escaped[len(known.escaped) :])
    assert rest[:1] == expected[:1]
    assert rest.replace(b" ", b"") == expected.replace(b" ", b"")


def test_replies_of_a_real_vocabulary_keep_their_sampled_tokens(smollm2_path: Path) -> None:
    """Random tokens are worse than any high temperature."""
    options = EngineOptions(path=smollm2_path, parallel=1, threads=1, context_tokens=512)
    engine = LlamaCppEngine(options)
    try:
        vocabulary = engine.tokenizer
        encoder = Encoder(vocabulary, ChatTemplate(engine.chat_template or ""))
        rng = random.Random(20)
        kept = odd = 0
        for _ in range(50):
            talk = [message("user", "Write! <|im_end|>")]
            prompt = encoder.chat(talk, template_kwargs={})
            reply = [rng.randrange(vocabulary.size) for _ in range(40)]
            received = shown(vocabulary, reply)
            known = encoder.known_after(prompt, reply, received)
            assert known is not None
            talk += message("assistant", received), message("user", "Go on.")
            warm = encoder.chat(talk, template_kwargs={}, recall=memory(known))
            cold = encoder.chat(talk, template_kwargs={})
            assert warm.tokens[: len(known.tokens)] == known.tokens
            pieces = (vocabulary.piece(token, special=True) for token in warm.tokens)
            assert b"".join(pieces) == unescape(cold.escaped)
            kept += len(known.tokens) - len(prompt.tokens)
            odd += cold.tokens[: len(known.tokens)] != known.tokens
        assert kept > 50 * 20  # broken characters end some runs early
        assert odd > 20  # these the tokenizer would have split in another way
    finally:
        engine.close()
