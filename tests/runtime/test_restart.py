"""What a runtime computed outlives it: through the disk, and after a stop of any kind."""

from __future__ import annotations

from pathlib import Path

from rekindle.runtime.wire import Naming
from tests.support.desk import Desk
from tests.support.fake import FakeEngine

FIRST = list(range(100, 140))


def converse(desk: Desk, turns: int, tokens: list[int]) -> list[int]:
    """Turns that each add a question to all that was said."""
    for turn in range(turns):
        reply = desk.ask(tokens)
        tokens = [*tokens, *reply.tokens, 200 + turn, 300 + turn, 400 + turn]
    return tokens


def test_a_conversation_goes_on_after_a_restart_as_if_there_had_been_none(tmp_path: Path) -> None:
    engine = FakeEngine()
    desk = Desk(engine, folder=tmp_path)
    tokens = converse(desk, 5, FIRST)
    desk.close()
    engine.reset()

    again = Desk(engine, folder=tmp_path)
    before = engine.counts.computed_tokens
    reply = again.ask(tokens)
    cold = Desk(FakeEngine()).ask(tokens)

    assert reply.tokens == cold.tokens
    assert reply.finished.cache.tier == "disk"
    assert reply.finished.cache.status == "hit"
    assert len(tokens) - reply.reused == 4  # three new tokens, and the last one sampled before
    assert engine.counts.computed_tokens - before == 4 + len(reply.tokens) - 1
    again.close()


def test_what_was_stored_before_a_crash_is_there_after_it(tmp_path: Path) -> None:
    engine = FakeEngine()
    desk = Desk(engine, folder=tmp_path, resident_tokens=0)
    tokens = converse(desk, 3, FIRST)
    desk.flush()
    stored = max(block.stop for block in desk.store if block.stored)
    assert desk.disk is not None
    desk.disk.folder.close()  # what a dead process lets go of
    engine.reset()

    again = Desk(engine, folder=tmp_path)
    assert again.ask(tokens).reused == stored > len(FIRST)
    again.close()


def test_a_second_request_for_blocks_on_their_way_waits_for_them(tmp_path: Path) -> None:
    engine = FakeEngine()
    desk = Desk(engine, folder=tmp_path, resident_tokens=0)
    desk.ask(FIRST)
    desk.close()
    engine.reset()
    again = Desk(engine, folder=tmp_path, resident_tokens=0)
    replies = [again.submit(FIRST) for _ in range(4)]
    again.run(*replies)
    assert again.disk is not None
    assert again.disk.counts.read_bytes <= 16 * (len(FIRST) + 8)
    assert {reply.reused for reply in replies} == {len(FIRST) - 1}
    again.close()


def test_names_survive_a_restart_and_lead_to_the_same_key(tmp_path: Path) -> None:
    engine = FakeEngine()
    desk = Desk(engine, folder=tmp_path)
    reply = desk.ask(FIRST, naming=Naming(session_id="s", return_cache_key=True))
    key = reply.finished.cache.new_cache_key
    assert key is not None
    desk.close()
    engine.reset()

    again = Desk(engine, folder=tmp_path)
    tokens = [*FIRST, *reply.tokens, 7]
    report = again.ask(tokens, naming=Naming(session_id="s")).finished.cache
    assert (report.status, report.cache_key) == ("hit", key)
    assert again.entries.by_key(again.root(), key) is not None
    again.close()


def test_writing_is_for_new_tokens_only(tmp_path: Path) -> None:
    engine = FakeEngine()
    desk = Desk(engine, folder=tmp_path, resident_tokens=0)
    converse(desk, 10, FIRST)
    desk.store.write_everything()
    desk.flush()
    assert desk.disk is not None
    written = desk.disk.counts.written_bytes
    final = sum(path.stat().st_size for path in (desk.disk.folder.path / "blocks").iterdir())
    assert written <= 1.1 * final
    desk.close()
