"""Pictures in conversations, from messages to replies: what is computed, reused and encoded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from rekindle.errors import BadRequest, ContextTooLong, Unsupported
from rekindle.kvcache.disk.image_files import PictureFiles
from rekindle.protocol.admin import Validate, Validation
from rekindle.protocol.events import Failed
from rekindle.protocol.requests import Names, Picture, Prepare
from rekindle.runtime.device import images as encoded_pictures
from tests.support.fake import VECTOR_WIDTH, AsciiTokenizer, FakeEngine
from tests.support.harness import Reply, RuntimeHarness
from tests.support.pictures import BEGIN, END, drawn

ONE, OTHER = drawn(1), drawn(2)
IMAGE = {"type": "image"}
PICTURE_TOKENS = 2 + 8 + 24 // 8  # of these, two are around it
ONE_BYTES = (PICTURE_TOKENS - 2) * VECTOR_WIDTH * 4

Messages = list[dict[str, Any]]


@pytest.fixture(params=[False, True], ids=["cut", "whole"])
def harness(request: pytest.FixtureRequest) -> Iterator[RuntimeHarness]:
    """Pictures may be cut into steps, or are computed whole."""
    built = RuntimeHarness(seeing(whole_pictures=request.param))
    yield built
    built.close()


def seeing(**options: Any) -> FakeEngine:
    engine = FakeEngine(sees=True, **options)
    engine.tokenizer = AsciiTokenizer()
    return engine


def encodings(harness: RuntimeHarness) -> int:
    engine = harness.engine
    assert isinstance(engine, FakeEngine)
    return engine.projector.encoded


def user(*parts: str | dict[str, Any]) -> dict[str, Any]:
    """Content with pictures and texts."""
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": "user", "content": content}


def said(reply: Reply) -> dict[str, Any]:
    return {"role": "assistant", "content": reply.text}


def cold(messages: Messages, pictures: list[Picture], **ask: Any) -> Reply:
    """The answer of a server that has seen nothing."""
    harness = RuntimeHarness(seeing())
    reply = harness.ask_chat(messages, pictures, **ask)
    harness.close()
    return reply


def recomputed(reply: Reply) -> Reply:
    """The answer to the same tokens, with nothing reused."""
    harness = RuntimeHarness(seeing())
    request = structs.replace(reply.turn.request, turn=1, reuse=False)
    again = harness.take(replace(reply.turn.encoded, request=request))
    harness.run(again)
    harness.close()
    return again


def test_a_picture_takes_its_place_between_the_texts(harness: RuntimeHarness) -> None:
    prompt = harness.ask_chat([user("ab", IMAGE, "c")], [ONE]).turn.encoded.prompt
    [span] = prompt.tokens.media
    assert prompt.tokens.ids()[: span.start] == [*b"ab", BEGIN]
    assert prompt.tokens.ids()[span.stop :] == [END, *b"c "]
    assert (span.length, span.digest) == (PICTURE_TOKENS - 2, ONE.digest)
    assert [(each.start, each.end) for each in prompt.spans] == [(0, len(prompt.tokens) - 1)]


def test_texts_are_joined_by_a_line_break_and_pictures_by_nothing(harness: RuntimeHarness) -> None:
    reply = harness.ask_chat([user("1", "2", IMAGE, IMAGE, "3")], [ONE, OTHER])
    digests = [f"\xfd[image {each.digest.hex()}]\xfc".encode("latin-1") for each in (ONE, OTHER)]
    assert reply.turn.encoded.prompt.escaped == b"1\n2" + b"".join(digests) + b"3 "


def test_a_picture_decides_the_answer_and_its_place_does_too(harness: RuntimeHarness) -> None:
    asked = [user("11", IMAGE, "12", IMAGE, "13")]
    orders = ([ONE, OTHER], [OTHER, ONE], [ONE, ONE])
    answers = [harness.ask_chat(asked, order).tokens for order in orders]
    assert len({tuple(each) for each in answers}) == 3
    assert answers == [cold(asked, order).tokens for order in orders]


def test_a_follow_up_computes_its_own_tokens_and_encodes_nothing(harness: RuntimeHarness) -> None:
    messages: Messages = [user("11", IMAGE, "12 13 14")]
    first = harness.ask_chat(messages, [ONE])
    messages += [said(first), user("15 16")]
    second = harness.ask_chat(messages, [ONE])
    assert second.reused == len(first.turn.tokens) - 1  # the last sampled token was not computed
    assert encodings(harness) == 1
    assert second.tokens == recomputed(second).tokens


def test_ten_questions_on_one_picture_encode_it_once(harness: RuntimeHarness) -> None:
    questions = [[user("This is what I mean:", IMAGE, f"{n}: what is it?")] for n in range(10)]
    replies = [harness.submit_chat(question, [ONE]) for question in questions]
    harness.run(*replies)
    assert encodings(harness) == 1
    for question, reply in zip(questions, replies, strict=True):
        assert reply.tokens == cold(question, [ONE]).tokens
    assert sum(reply.reused >= PICTURE_TOKENS for reply in replies) == 9


def test_one_picture_after_other_texts_is_encoded_once(harness: RuntimeHarness) -> None:
    """Its state cannot be reused there, its vectors can."""
    for start in range(5):
        messages = [user(f"{20 + start} 21", IMAGE, "12")]
        assert harness.ask_chat(messages, [ONE]).tokens == cold(messages, [ONE]).tokens
    assert encodings(harness) == 1
    assert harness.pictures.counts.hits == 4


def test_a_picture_of_another_tenant_is_encoded_again(harness: RuntimeHarness) -> None:
    for salt in (b"one", b"other", b"one"):
        harness.ask_chat([user(IMAGE, "12")], [ONE], salt=salt)
    assert encodings(harness) == 2


def test_other_turns_go_on_between_two_pictures(harness: RuntimeHarness) -> None:
    talking = harness.submit_chat([user("11 12")], max_tokens=40)
    while not talking.turn.generated_tokens:
        harness.scheduler.step()
    looking = harness.submit_chat(
        [user(*[IMAGE] * 4, "12")], [drawn(seed) for seed in range(4)], max_tokens=1
    )
    before = talking.turn.generated_tokens
    grown = []
    while not looking.ended:
        encoded = encodings(harness)
        harness.scheduler.step()
        assert encodings(harness) - encoded <= 1
        grown.append(talking.turn.generated_tokens)
    assert encodings(harness) == 4
    assert grown == list(range(before + 1, before + 1 + len(grown)))
    harness.run(talking)


def test_vectors_that_exceed_the_budget_are_not_kept_and_the_answer_is_right() -> None:
    harness = RuntimeHarness(seeing(), pictures_bytes=100)
    messages = [user("11", IMAGE, "12")]
    assert harness.ask_chat(messages, [ONE]).tokens == cold(messages, [ONE]).tokens
    assert harness.pictures.used_bytes == 0


@pytest.mark.parametrize("before", [1, 4, 9, 14, 20])
def test_exact_answers_equal_cold_ones_wherever_the_picture_begins(
    harness: RuntimeHarness, before: int
) -> None:
    """A canonical step of this engine has 16 tokens, a picture 13."""
    text = "x" * before
    messages: Messages = [user(text, IMAGE, "12 13 14 15 16")]
    for _ in range(3):
        reply = harness.ask_chat(messages, [ONE], exact=True)
        assert reply.tokens == cold(messages, [ONE], exact=True).tokens
        held = reply.turn.encoded.prompt.tokens.whole_media(reply.reused)
        assert held == reply.reused or not harness.capabilities.whole_pictures
        messages = [*messages, said(reply), user("17 18", IMAGE, "19 20 21 22 23 24 25")]
        harness.ask_chat(messages, [ONE, OTHER])
        messages = messages[:-1]
        messages.append(user("17 18 19 20 21 22 23 24 25 26 27 28 29"))
    assert encodings(harness) == 2


def test_state_comes_back_from_the_store_with_its_pictures(harness: RuntimeHarness) -> None:
    messages: Messages = [user("Twenty tokens of text", IMAGE, "12 13", IMAGE, "14")]
    first = harness.ask_chat(messages, [ONE, OTHER])
    harness.offload()
    harness.kv.make_room(harness.capabilities.pool_tokens)
    messages += [said(first), user("15 16")]
    second = harness.ask_chat(messages, [ONE, OTHER])
    assert second.reused == len(first.turn.tokens) - 1
    assert encodings(harness) == 2
    assert second.tokens == recomputed(second).tokens


def test_a_picture_of_several_tiles_is_one_picture(harness: RuntimeHarness) -> None:
    wide = drawn(5, width=48)
    messages: Messages = [user("ab", IMAGE, "c", IMAGE, "d")]
    first = harness.ask_chat(messages, [wide, ONE])
    prompt = first.turn.encoded.prompt
    assert len(prompt.tokens.media) == 3
    assert [(each.start, each.end) for each in prompt.spans] == [(0, len(prompt.tokens) - 1)]
    assert first.tokens == recomputed(first).tokens
    messages += [said(first), user("e", IMAGE)]
    second = harness.ask_chat(messages, [wide, ONE, wide])
    assert second.reused == len(first.turn.tokens) - 1
    assert second.tokens == recomputed(second).tokens
    assert encodings(harness) == 2


def test_an_engine_that_breaks_in_a_picture_starts_over_and_answers_the_same() -> None:
    for step in range(1, 6):
        harness = RuntimeHarness(seeing(break_steps={step}))
        messages = [user("11", IMAGE, "12", IMAGE)]
        assert harness.ask_chat(messages, [ONE, OTHER]).tokens == (
            cold(messages, [ONE, OTHER]).tokens
        )
        assert encodings(harness) == 2


# -- on disk -------------------------------------------------------------------------------------


def look_at(folder: Path, picture: Picture, text: str, **limits: Any) -> tuple[Reply, int]:
    """A server's life: one question; the answer, and how many pictures it encoded."""
    harness = RuntimeHarness(seeing(), folder=folder, **limits)
    messages = [user(text, IMAGE, "What is it?")]
    reply = harness.ask_chat(messages, [picture])
    harness.close()
    assert reply.tokens == cold(messages, [picture]).tokens
    return reply, encodings(harness)


@pytest.mark.parametrize("pictures_bytes", [1 << 20, 1], ids=["held", "too large to be held"])
def test_vectors_outlive_the_process(tmp_path: Path, pictures_bytes: int) -> None:
    limits = {"pictures_bytes": pictures_bytes}
    assert [look_at(tmp_path, ONE, text, **limits)[1] for text in "abc"] == [1, 0, 0]
    assert look_at(tmp_path, OTHER, "d", **limits)[1] == 1


def test_the_file_of_another_tenants_picture_is_never_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    read_file = PictureFiles.read

    def recorded(files: PictureFiles, key: bytes) -> None:
        read.append(key.hex())
        read_file(files, key)

    monkeypatch.setattr(PictureFiles, "read", recorded)

    def look(text: str, salt: bytes) -> tuple[int, set[str]]:
        """The number of pictures that were encoded, and the files that were read."""
        read.clear()
        harness = RuntimeHarness(seeing(), folder=tmp_path)
        harness.ask_chat([user(text, IMAGE)], [ONE], salt=salt)
        harness.close()
        return encodings(harness), set(read)

    assert look("a", b"one")[0] == 1
    [file] = picture_files(tmp_path)
    encoded, names = look("b", b"other")
    assert encoded == 1
    assert file.name not in names
    assert look("c", b"one") == (0, {file.name})


def picture_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/pictures/*"))


@pytest.mark.parametrize("damage", ["flipped", "shorter", "empty", "gone", "another's", "folder"])
def test_a_damaged_file_is_a_miss_and_is_written_again(tmp_path: Path, damage: str) -> None:
    look_at(tmp_path, ONE, "a")
    [file] = picture_files(tmp_path)
    whole = file.read_bytes()
    match damage:
        case "flipped":
            file.write_bytes(whole[:-40] + bytes([whole[-40] ^ 1]) + whole[-39:])
        case "shorter":
            file.write_bytes(whole[:-1])
        case "empty":
            file.write_bytes(b"")
        case "gone":
            file.unlink()
        case "another's":
            look_at(tmp_path, OTHER, "a")
            other = next(each for each in picture_files(tmp_path) if each != file)
            file.write_bytes(other.read_bytes())
            other.unlink()
        case "folder":
            file.unlink()
            file.mkdir()
    assert look_at(tmp_path, ONE, "b")[1] == 1
    if damage != "folder":
        assert file.read_bytes() == whole
        assert look_at(tmp_path, ONE, "c")[1] == 0


def test_what_may_not_be_written_is_not(tmp_path: Path) -> None:
    harness = RuntimeHarness(seeing(), folder=tmp_path)
    harness.ask_chat([user("a", IMAGE)], [ONE], names=Names(in_memory=True))
    harness.ask_chat([user("b", IMAGE)], [OTHER], reuse=False)
    harness.close()
    assert picture_files(tmp_path) == []
    assert harness.pictures.used_bytes == ONE_BYTES  # and nothing of who wants nothing kept


def test_the_files_stay_within_their_budget_and_the_least_recently_used_go(tmp_path: Path) -> None:
    with_header = ONE_BYTES + 200
    limits = {"disk_bytes": 16 * 3 * with_header + 1}
    for seed in range(3):
        look_at(tmp_path, drawn(seed), "a", **limits)
    assert look_at(tmp_path, drawn(0), "b", **limits)[1] == 0
    look_at(tmp_path, drawn(3), "a", **limits)
    files = picture_files(tmp_path)
    assert len(files) == 3
    assert sum(file.stat().st_size for file in files) <= 3 * with_header
    assert look_at(tmp_path, drawn(0), "c", **limits)[1] == 0
    assert look_at(tmp_path, drawn(1), "c", **limits)[1] == 1


def test_a_read_that_does_not_end_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_at(tmp_path, ONE, "a")
    monkeypatch.setattr(PictureFiles, "_read", lambda self, key: None)  # nobody answers
    monkeypatch.setattr(encoded_pictures, "READ_TIMEOUT_S", 0.0)
    assert look_at(tmp_path, ONE, "b")[1] == 1


def test_a_prompt_may_end_with_a_picture(harness: RuntimeHarness) -> None:
    messages = [user("11", IMAGE)]
    for _ in range(2):
        assert harness.ask_chat(messages, [ONE]).tokens == cold(messages, [ONE]).tokens


def test_a_prepared_prefix_with_a_picture_is_reused(harness: RuntimeHarness) -> None:
    system = {**user("11 12 13 14 15 16", IMAGE, "17"), "role": "system"}
    prepared = harness.ask_chat([system], [ONE], prepare=Prepare(), max_tokens=0)
    messages = [system, user("18", IMAGE)]
    reply = harness.ask_chat(messages, [ONE, OTHER])
    assert reply.reused == len(prepared.turn.tokens)
    assert reply.tokens == cold(messages, [ONE, OTHER]).tokens


def test_validate_sees_which_picture_a_conversation_holds(harness: RuntimeHarness) -> None:
    messages = [user("11", IMAGE, "12 13")]
    prepared = harness.ask_chat(messages, [ONE], prepare=Prepare(), max_tokens=0)
    harness.offload()
    key = prepared.finished.cache.new_cache_key
    assert key is not None

    def validate(picture: Picture) -> Validation:
        op = Validate(cache_key=key, messages=messages, pictures=[picture])
        encoded = harness.runtime.input_processor.encode_about(op, b"")
        result = harness.administer(op, prompt=encoded)
        assert isinstance(result, Validation)
        return result

    assert validate(ONE).status == "hit"
    changed = validate(OTHER)
    assert (changed.status, changed.invalidated_at) == ("partial_hit", "turn 1")
    assert encodings(harness) == 1


def test_more_pictures_than_fit_are_refused_with_their_number(harness: RuntimeHarness) -> None:
    pictures = [drawn(seed) for seed in range(60)]
    with pytest.raises(
        ContextTooLong, match=r"60 different pictures.*Send fewer pictures"
    ) as error:
        harness.submit_chat([user(*[IMAGE] * 60)], pictures)
    assert error.value.param == "messages"
    assert encodings(harness) == 0


def test_pictures_and_image_parts_have_to_be_as_many(harness: RuntimeHarness) -> None:
    with pytest.raises(BadRequest, match="2 image parts, but the request has 1 pictures"):
        harness.submit_chat([user(IMAGE, IMAGE)], [ONE])


def test_a_model_without_a_projector_refuses_pictures() -> None:
    harness = RuntimeHarness(FakeEngine())
    with pytest.raises(Unsupported, match="no pictures"):
        harness.submit_chat([user(IMAGE)], [ONE])


@pytest.mark.parametrize("failure", ["raises", "too few", "too short"])
def test_a_picture_that_cannot_be_encoded_ends_its_own_turn_alone(
    harness: RuntimeHarness, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    def fail(picture: Picture) -> list[Any]:
        if failure == "raises":
            raise BadRequest("the projector failed")
        return [] if failure == "too few" else [np.zeros((3, VECTOR_WIDTH), np.float32)]

    talking = harness.submit_chat([user("11 12")], max_tokens=40)
    harness.scheduler.step()
    monkeypatch.setattr(harness.engine, "encode_picture", fail)
    looking = harness.submit_chat([user("11", IMAGE)], [ONE])
    harness.run(talking, looking)
    assert isinstance(looking.events[-1], Failed)
    assert len(talking.tokens) == 40
