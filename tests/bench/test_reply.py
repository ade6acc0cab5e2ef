from __future__ import annotations

import pytest

from rekindle.bench.reply import Recording
from rekindle.bench.stream import BenchFailed, Chunk, Usage

USAGE = Chunk(usage=Usage(prompt_tokens=10, completion_tokens=2, cached_tokens=None))


def test_the_first_token_is_the_first_text_and_not_the_opening_role() -> None:
    recording = Recording(sent_s=1.0)
    recording.take(Chunk(), 2.0)
    recording.take(Chunk(text="a"), 3.0)
    recording.take(Chunk(text="b"), 4.0)
    recording.take(USAGE, 5.0)
    reply = recording.finish(6.0)
    assert (reply.text, reply.ttft_s, reply.last_s) == ("ab", 2.0, 4.0)


def test_a_thought_starts_the_clock_and_is_no_text() -> None:
    recording = Recording(sent_s=0.0)
    recording.take(Chunk(thought="hm"), 1.0)
    recording.take(Chunk(text="a"), 2.0)
    recording.take(USAGE, 3.0)
    reply = recording.finish(3.0)
    assert (reply.text, reply.ttft_s) == ("a", 1.0)


def test_a_reply_without_text_is_timed_at_its_end() -> None:
    recording = Recording(sent_s=0.0)
    recording.take(USAGE, 1.0)
    assert recording.finish(2.0).ttft_s == 2.0


def test_a_stream_without_usage_fails() -> None:
    with pytest.raises(BenchFailed, match="without usage"):
        Recording(sent_s=0.0).finish(1.0)
