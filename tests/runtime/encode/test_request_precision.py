"""A turn gets the KV type it asks for, and requantisation computes nothing twice."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rekindle.engine.base import Capabilities
from rekindle.errors import ModelError, NoRoomForPins, Unsupported
from rekindle.protocol.events import Cancelled, Failed, Reason
from rekindle.protocol.requests import GenerateRequest, Names, Prepare, SamplingParams
from rekindle.runtime.encode.request import check_kv_bits, precision
from tests.support.fake import CELL_BYTES, AsciiTokenizer, FakeEngine
from tests.support.harness import Reply, RuntimeHarness
from tests.support.pictures import drawn
from tests.support.rounds import rounds

PROMPT = [(7 * n) % 900 for n in range(100)]
STEP = 16
START = 5 * STEP
EIGHT: dict[str, Any] = {"kv_bits": 8, "max_tokens": 4}
LATER: dict[str, Any] = {**EIGHT, "kv_quantization_start": START}


def bits(reply: Reply) -> tuple[int | None, int | None]:
    return reply.finished.cache.kv_bits, reply.finished.cache.kv_group_size


def fresh(tokens: list[int], **request: Any) -> list[int]:
    return RuntimeHarness(FakeEngine()).ask(tokens, **request).tokens


def stored_bytes(harness: RuntimeHarness) -> int:
    harness.kv.offload_all()
    return harness.store.size_bytes(None)


@pytest.mark.parametrize(("kv_bits", "size"), [(8, 8), (4, 4)])
def test_a_turn_gets_the_kv_bits_that_it_asks_for(kv_bits: int, size: int) -> None:
    harness = RuntimeHarness(FakeEngine())
    reply = harness.ask(PROMPT, kv_bits=kv_bits, max_tokens=4)
    assert bits(reply) == (kv_bits, 1)
    assert stored_bytes(harness) == size * (len(PROMPT) + 3)
    assert harness.engine.sequences.free_tokens() == harness.capabilities.pool_tokens
    again = harness.ask([*PROMPT, *reply.tokens], kv_bits=kv_bits, max_tokens=4)
    assert again.reused == len(PROMPT) + 3


def test_the_default_kv_type_is_used_without_kv_bits() -> None:
    harness = RuntimeHarness(FakeEngine())
    assert bits(harness.ask(PROMPT, max_tokens=4)) == (16, None)
    assert stored_bytes(harness) == CELL_BYTES * (len(PROMPT) + 3)


def test_unsupported_kv_bits_are_refused_with_the_supported_ones() -> None:
    harness = RuntimeHarness(FakeEngine())
    with pytest.raises(Unsupported, match=r"supports 4 or 8 or 16 bits, not 5") as raised:
        harness.submit(PROMPT, kv_bits=5)
    assert raised.value.param == "kv_bits"
    check_kv_bits(harness.capabilities, 4)
    check_kv_bits(harness.capabilities, None)
    with pytest.raises(ModelError, match=r"bits, not 5: leave --kv-bits out"):
        check_kv_bits(harness.capabilities, 5)


def request_for(**fields: Any) -> GenerateRequest:
    return GenerateRequest(turn=0, prompt=[1], sampling=SamplingParams(), max_tokens=1, **fields)


def grouped(default: str = "fake") -> Capabilities:
    """The capabilities of an engine with several group sizes."""
    known = FakeEngine().capabilities
    layouts = {
        f"q{bits}_g{size}": replace(known.kv_layout, bits=bits, group_size=size)
        for bits, size in ((8, 128), (8, 64), (8, 32), (4, 128), (4, 32))
    }
    return replace(known, kv={"fake": known.kv_layout, **layouts}, kv_type=default)


@pytest.mark.parametrize(
    ("bits", "group_size", "default", "kv_type"),
    [
        (None, 32, "fake", "fake"),
        (8, None, "fake", "q8_g64"),
        (8, 32, "fake", "q8_g32"),
        (4, 128, "fake", "q4_g128"),
        (4, None, "fake", "q4_g32"),  # the smallest if there is no group size of 64
        (8, None, "q8_g128", "q8_g128"),
        (8, 32, "q8_g128", "q8_g32"),
        (4, 32, "q8_g64", "q4_g32"),
    ],
)
def test_a_turn_gets_the_group_size_that_it_asks_for(
    bits: int | None, group_size: int | None, default: str, kv_type: str
) -> None:
    request = request_for(kv_bits=bits, kv_group_size=group_size, kv_quantization_start=9)
    chosen = precision(request, grouped(default), b"tenant")
    assert chosen.format_at(100).kv_type == kv_type
    if kv_type == "q8_g32" and default == "q8_g128":
        assert (chosen.can_requantise, chosen.start_tokens) == (
            False,
            0,
        )  # the default type has no more bits


def test_an_unsupported_group_size_is_refused_with_the_supported_ones() -> None:
    request = request_for(kv_bits=4, kv_group_size=64)
    with pytest.raises(Unsupported, match=r"groups of 32 or 128 values at 4 bits") as raised:
        precision(request, grouped(), b"tenant")
    assert raised.value.param == "kv_group_size"


def test_an_engine_with_a_single_group_size_ignores_the_requested_one() -> None:
    assert bits(RuntimeHarness(FakeEngine()).ask(PROMPT, kv_group_size=64, **EIGHT))[0] == 8


def test_turns_of_several_precisions_run_concurrently() -> None:
    harness = RuntimeHarness(FakeEngine())
    asked: list[dict[str, Any]] = [
        {},
        {"kv_bits": 8},
        {"kv_bits": 4},
        {"kv_bits": 8, "exact": True},
    ]
    prompts = [[number, *PROMPT] for number in range(len(asked))]
    pairs = zip(prompts, asked, strict=True)
    replies = [harness.submit(prompt, max_tokens=20, **each) for prompt, each in pairs]
    while not all(reply.tokens for reply in replies):
        assert harness.scheduler.step()
    assert not any(reply.ended for reply in replies)
    harness.run()
    for reply, prompt, each in zip(replies, prompts, asked, strict=True):
        assert reply.tokens == fresh(prompt, max_tokens=20, **each)


# -- requantisation --


def test_a_short_conversation_has_the_default_kv_type_and_shares_its_state() -> None:
    harness = RuntimeHarness(FakeEngine())
    first = harness.ask(PROMPT[:50], **LATER)
    assert bits(first) == (16, None)
    assert harness.ask(PROMPT[:60], max_tokens=1).reused == 50
    assert first.tokens == fresh(PROMPT[:50], max_tokens=4)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("can_truncate", [True, False])
def test_a_prompt_beyond_the_start_is_computed_once(exact: bool, can_truncate: bool) -> None:
    engine = FakeEngine(can_truncate=can_truncate)
    reply = RuntimeHarness(engine).ask(PROMPT, **LATER, exact=exact)
    assert bits(reply) == (8, 1)
    assert engine.counts.computed_tokens == len(PROMPT) + 3
    assert engine.counts.transcoded_tokens == START


@pytest.mark.parametrize("exact", [False, True])
def test_a_sequence_can_be_requantised_in_the_middle_of_a_reply(exact: bool) -> None:
    engine = FakeEngine()
    harness = RuntimeHarness(engine)
    reply = harness.ask(PROMPT[:70], **{**LATER, "max_tokens": 30}, exact=exact)
    assert bits(reply) == (8, 1)
    assert engine.counts.computed_tokens == 70 + 29
    assert engine.counts.transcoded_tokens == START
    assert engine.open_sequences == (0 if exact else 1)
    whole = harness.ask([*PROMPT[:70], *reply.tokens], **LATER, exact=exact)
    assert whole.reused >= (64 if exact else 70 + 29)


def test_a_requantised_conversation_reuses_its_prefix() -> None:
    engine = FakeEngine()
    harness = RuntimeHarness(engine)
    first = harness.ask(PROMPT[:60], **LATER, names=Names(session_id="s"))
    assert bits(first) == (16, None)
    computed = engine.counts.computed_tokens
    second = harness.ask(PROMPT, **LATER, names=Names(session_id="s"))
    assert (second.reused, bits(second)) == (60, (8, 1))
    assert engine.counts.computed_tokens - computed == 40 + 3
    third = harness.ask([*PROMPT, *second.tokens, 5], **LATER, names=Names(session_id="s"))
    assert third.reused == len(PROMPT) + 3
    assert third.finished.cache.status == "hit"


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("start", [1, START - 1, len(PROMPT) - 1, len(PROMPT), len(PROMPT) + 2])
def test_a_sequence_is_requantised_exactly_at_the_start(exact: bool, start: int) -> None:
    engine = FakeEngine()
    asked = {**LATER, "kv_quantization_start": start, "exact": exact}
    assert bits(RuntimeHarness(engine).ask(PROMPT, **asked)) == (8, 1)
    assert engine.counts.transcoded_tokens == start


def test_a_turn_that_ends_at_the_start_is_not_requantised() -> None:
    engine = FakeEngine()
    reply = RuntimeHarness(engine).ask(PROMPT, **{**LATER, "kv_quantization_start": 103})
    assert (bits(reply), engine.counts.transcoded_tokens) == ((16, None), 0)


def test_turns_with_the_same_start_compute_their_common_prefix_once() -> None:
    engine = FakeEngine()
    harness = RuntimeHarness(engine)
    replies = [harness.submit([*PROMPT, 300 + n], **LATER) for n in range(3)]
    harness.run()
    assert engine.counts.computed_tokens < 1.5 * len(PROMPT)
    assert [bits(reply) for reply in replies] == 3 * [(8, 1)]


def test_other_turns_continue_during_a_requantisation() -> None:
    engine = FakeEngine(context_tokens=2048, pool_tokens=4096)
    harness = RuntimeHarness(engine)
    harness.kv.budget.step_bytes = 2 * 8 * CELL_BYTES
    other = harness.submit([1, 2, 3], max_tokens=200)
    long = harness.submit([5] * 900, **{**LATER, "kv_quantization_start": 800})
    while long.turn.requantisation is None:
        harness.scheduler.step()
    said = len(other.tokens)
    steps = 0
    while long.turn.requantisation is not None:
        harness.scheduler.step()
        steps += 1
    assert steps >= 20
    assert len(other.tokens) == said + steps
    harness.run()
    assert long.tokens == fresh_long(800)


def fresh_long(start: int) -> list[int]:
    engine = FakeEngine(context_tokens=2048, pool_tokens=4096)
    return RuntimeHarness(engine).ask([5] * 900, **{**LATER, "kv_quantization_start": start}).tokens


def test_a_turn_cancelled_during_requantisation_closes_its_sequences() -> None:
    engine = FakeEngine()
    harness = RuntimeHarness(engine)
    harness.kv.budget.step_bytes = 1
    reply = harness.submit(PROMPT, **LATER)
    while reply.turn.requantisation is None or reply.turn.requantisation.into is None:
        harness.scheduler.step()
    harness.cancel(reply)
    assert engine.open_sequences == 1  # the state of the default type, which can be reused
    assert harness.ask(PROMPT, **LATER).reused == START


def test_the_runtime_continues_after_the_engine_breaks_during_requantisation() -> None:
    engine = FakeEngine(break_restores=1)
    harness = RuntimeHarness(engine)
    reply = harness.ask(PROMPT, **LATER)
    assert engine.counts.resets == 1
    assert reply.tokens == fresh(PROMPT, **LATER)


@pytest.mark.parametrize("start", [0, START])
def test_lack_of_memory_for_a_kv_type_fails_only_that_turn(start: int) -> None:
    harness = RuntimeHarness(FakeEngine(no_memory_for={"fake8"}))
    other = harness.submit(PROMPT[:50], max_tokens=20)
    failing = harness.submit(PROMPT, **{**EIGHT, "kv_quantization_start": start})
    harness.run()
    [*_, last] = failing.events
    assert isinstance(last, Failed)
    assert last.error.code == "no_memory"
    assert other.tokens == fresh(PROMPT[:50], max_tokens=20)


def test_exact_turns_are_requantised_one_after_the_other_if_contexts_are_short() -> None:
    harness = RuntimeHarness(FakeEngine(exact_sequences=2))
    replies = [harness.submit([n, *PROMPT], **LATER, exact=True) for n in range(4)]
    harness.run()
    assert [bits(reply) for reply in replies] == 4 * [(8, 1)]


# -- reuse across precisions --


def test_a_turn_reuses_state_of_more_bits() -> None:
    engine = FakeEngine()
    harness = RuntimeHarness(engine)
    harness.ask(PROMPT, max_tokens=1)
    computed = engine.counts.computed_tokens
    reply = harness.ask([*PROMPT, 5], **EIGHT)
    assert (reply.reused, bits(reply)) == (len(PROMPT), (8, 1))
    assert engine.counts.computed_tokens - computed == 1 + 3
    assert engine.counts.transcoded_tokens == len(PROMPT)
    assert harness.ask([*PROMPT, 5, 6], **EIGHT).reused == len(PROMPT) + 1
    assert engine.counts.transcoded_tokens == len(PROMPT)


def test_a_turn_never_reuses_state_of_fewer_bits_and_reports_it() -> None:
    harness = RuntimeHarness(FakeEngine())
    first = harness.ask(PROMPT, **EIGHT, names=Names(return_cache_key=True))
    key = first.finished.cache.new_cache_key
    reply = harness.ask([*PROMPT, 5], max_tokens=1, names=Names(cache_key=key))
    assert reply.reused == 0
    assert (reply.finished.cache.status, reply.finished.cache.reason) == (
        "miss",
        Reason.KV_BITS_CHANGED,
    )
    assert reply.tokens == fresh([*PROMPT, 5], max_tokens=1)
    four = harness.ask([*PROMPT, 6], kv_bits=4, max_tokens=1)
    assert four.reused == 100  # state of the default type that the previous turn left


def test_tokens_before_the_start_are_never_computed_from_quantised_state() -> None:
    engine = FakeEngine()
    harness = RuntimeHarness(engine)
    harness.ask(PROMPT, **LATER)
    assert harness.ask(PROMPT[:70], **LATER).reused == 0
    edited = harness.ask([*PROMPT[:40], *[9] * 60], **LATER)
    assert edited.reused == 40  # from the turn without quantisation
    assert edited.tokens == fresh([*PROMPT[:40], *[9] * 60], **LATER)


def test_state_with_another_start_is_not_reused() -> None:
    harness = RuntimeHarness(FakeEngine())
    harness.ask(PROMPT, **LATER)
    assert harness.ask(PROMPT, **{**LATER, "kv_quantization_start": 64}).reused == 0
    assert harness.ask([*PROMPT, 7], **LATER).reused == len(PROMPT)


def test_a_server_with_few_default_bits_serves_a_request_for_more() -> None:
    engine = FakeEngine(kv_type="fake4")
    harness = RuntimeHarness(engine)
    assert bits(harness.ask(PROMPT, max_tokens=1)) == (4, 1)
    reply = harness.ask(PROMPT, **LATER)
    assert (reply.reused, bits(reply)) == (0, (8, 1))
    assert reply.tokens == fresh(PROMPT, **EIGHT)


# -- exactness and restarts --


@pytest.mark.parametrize("kv_bits", [8, 4])
@pytest.mark.parametrize("start", [0, STEP, START, 91])
@pytest.mark.parametrize("can_truncate", [True, False])
def test_warm_equals_cold_at_each_precision_and_after_a_restart(
    tmp_path: Path, kv_bits: int, start: int, can_truncate: bool
) -> None:
    asked: dict[str, Any] = {"kv_bits": kv_bits, "kv_quantization_start": start, "exact": True}
    tokens = [*PROMPT, *PROMPT]
    cold = RuntimeHarness(FakeEngine(can_truncate=can_truncate)).ask(tokens, **asked).tokens
    for others in ({}, {"kv_bits": kv_bits}, asked):  # store state of other precisions first
        harness = RuntimeHarness(FakeEngine(can_truncate=can_truncate), folder=tmp_path)
        harness.ask(tokens, **others)
        harness.ask(tokens[:130], **{**asked, **others})
        assert harness.ask(tokens, **asked).tokens == cold
        harness.close()
    engine = FakeEngine(can_truncate=can_truncate)
    restarted = RuntimeHarness(engine, folder=tmp_path)
    warm = restarted.ask(tokens, **asked)
    assert warm.tokens == cold
    assert warm.reused >= len(tokens) - 2 * STEP
    restarted.close()


def test_an_entry_finds_its_state_and_its_tenant_after_a_restart(tmp_path: Path) -> None:
    harness = RuntimeHarness(FakeEngine(), folder=tmp_path)
    first = harness.ask(PROMPT, **EIGHT, salt=b"a", names=Names(return_cache_key=True))
    harness.close()
    again = RuntimeHarness(FakeEngine(), folder=tmp_path)
    tenant = again.namespace(b"a")
    assert again.store.size_bytes(tenant) == 8 * (len(PROMPT) + 3)
    assert [entry.key for entry in again.entries.of(tenant)] == [first.finished.cache.new_cache_key]
    key = first.finished.cache.new_cache_key
    reply = again.ask([*PROMPT, *first.tokens, 3], **EIGHT, salt=b"a", names=Names(cache_key=key))
    assert (reply.finished.cache.status, reply.reused) == ("hit", len(PROMPT) + 3)
    other = again.ask([*PROMPT, *first.tokens, 3], **EIGHT, salt=b"b")
    assert other.reused == 0
    again.close()


def test_the_same_conversation_at_another_precision_is_the_same_entry() -> None:
    harness = RuntimeHarness(FakeEngine())
    names = Names(return_cache_key=True)
    first = harness.ask(PROMPT, max_tokens=1, names=names)
    second = harness.ask(PROMPT, kv_bits=8, max_tokens=1, names=names)
    keys = {reply.finished.cache.new_cache_key for reply in (first, second)}
    assert (len(keys) == 1) == (first.tokens == second.tokens)


def test_pins_of_different_precisions_are_counted_separately() -> None:
    """The state of 100 tokens takes 1,600 bytes here, plus the overhead of each block."""
    harness = RuntimeHarness(FakeEngine(), ram_bytes=40_000)
    harness.ask(PROMPT, prepare=Prepare(pinned=True), max_tokens=1)
    with pytest.raises(NoRoomForPins):
        harness.submit(PROMPT, prepare=Prepare(pinned=True), kv_bits=8)
    harness.ask(PROMPT, prepare=Prepare(pinned=True), max_tokens=1)


# -- memory --


def test_idle_state_of_another_kv_type_is_evicted_so_that_its_pool_can_be_freed() -> None:
    engine = FakeEngine()
    harness = RuntimeHarness(engine)
    harness.ask(PROMPT, **EIGHT)
    harness.ask(PROMPT, max_tokens=1)
    assert engine.open_sequences == 2
    for _ in range(2):
        for _ in harness.runtime.upkeep():
            pass
    assert engine.open_sequences == 1
    assert harness.ask([*PROMPT, 5], **EIGHT).reused == len(PROMPT)


# -- many turns --


@pytest.mark.parametrize("whole_pictures", [False, True])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("start", [2, 3, 9, 14, 20])
def test_an_image_may_span_the_position_of_requantisation(
    start: int, exact: bool, whole_pictures: bool
) -> None:
    parts = [{"type": "text", "text": "ab"}, {"type": "image"}, {"type": "text", "text": "c" * 20}]
    messages, pictures = [{"role": "user", "content": parts}], [drawn(1)]
    asked: dict[str, Any] = {"kv_bits": 8, "kv_quantization_start": start, "exact": exact}
    replies = []
    for _ in range(2):
        engine = FakeEngine(sees=True, whole_pictures=whole_pictures)
        engine.tokenizer = AsciiTokenizer()
        harness = RuntimeHarness(engine)
        replies += [harness.ask_chat(messages, pictures, **asked) for _ in range(2)]
    assert len({tuple(reply.tokens) for reply in replies}) == 1
    assert {bits(reply) for reply in replies} == {(8, 1)}
    assert replies[1].reused >= 16


def crowd(seed: int) -> None:
    """Runs turns of all precisions in small pools. Some are cancelled, and the engine sometimes
    breaks. Each turn ends, and each exact turn gives the answer of a cold server."""
    choose = random.Random(seed)
    same: dict[str, Any] = {
        "context_tokens": 256,
        "can_truncate": choose.random() < 0.7,
        "kv_type": choose.choice(["fake", "fake", "fake8"]),
    }
    engine = FakeEngine(
        pool_tokens=choose.choice([300, 512, 1024]),
        max_sequences=choose.choice([6, 12]),
        exact_sequences=choose.choice([1, 2, 4]),
        break_steps=set(choose.sample(range(1, 400), choose.choice([0, 2]))),
        break_restores=choose.choice([0, 0, 1]),
        park_tokens=choose.choice([0, 200, 600]) if same["can_truncate"] else 0,
        async_launch=choose.random() < 0.5,
        scatters=choose.random() < 0.5,
        **same,
    )
    harness = RuntimeHarness(
        engine,
        idle_tokens=choose.choice([None, 0, 1 << 20]),
        ram_bytes=choose.choice([1 << 30, 20_000, 0]),
    )
    harness.kv.budget.step_bytes = choose.choice([64 << 20, 300, 1])
    texts = [[choose.randrange(900) for _ in range(200)] for _ in range(3)]
    asked: list[tuple[Reply, list[int], dict[str, Any]]] = []
    for _ in range(30):
        tokens = choose.choice(texts)[: choose.randrange(5, 200)]
        request: dict[str, Any] = {
            "max_tokens": choose.randrange(1, 40),
            "kv_bits": choose.choice([None, 8, 4]),
            "kv_quantization_start": choose.choice([0, 16, 50, 64, 120, 500]),
            "exact": choose.random() < 0.3,
            "reuse": choose.random() < 0.9,
        }
        asked.append((harness.submit(tokens, **request), tokens, request))
        for _ in range(choose.randrange(12)):
            harness.scheduler.step()
        if choose.random() < 0.15:
            harness.cancel(choose.choice(asked)[0])
        if choose.random() < 0.1:
            list(harness.runtime.upkeep())
    harness.run()
    copies = sum(idle.copy is not None for idle in harness.kv.idle)
    deferred = len(harness.kv.idle.default.deferred)
    assert engine.open_sequences == len(harness.kv.idle) + copies + deferred
    for reply, tokens, request in asked:
        is_one_type = request["kv_bits"] is None
        if (request["exact"] or is_one_type) and not isinstance(reply.events[-1], Cancelled):
            alone = RuntimeHarness(FakeEngine(**same)).ask(tokens, **request)
            assert reply.tokens == alone.tokens
            assert reply.text == alone.text
    harness.close()
    assert engine.open_sequences == len(harness.kv.idle) + sum(
        idle.copy is not None for idle in harness.kv.idle
    )


@pytest.mark.long
def test_turns_of_all_precisions_end_in_small_pools() -> None:
    for seed in range(rounds(12, 400)):
        crowd(seed)
