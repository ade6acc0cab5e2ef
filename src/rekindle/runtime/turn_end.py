"""The terminal event of a turn that has run to its end."""

from __future__ import annotations

import time

from rekindle.engine.base import KvLayout
from rekindle.errors import BadRequest
from rekindle.protocol.events import Failed, Finished
from rekindle.runtime.turn import Turn


def end_of(turn: Turn, layout: KvLayout) -> Finished | Failed:
    """What the turn was like; `layout` is that of the cells it ended in."""
    token_mask = turn.encoded.decoding.token_mask
    if token_mask is not None and token_mask.trouble:
        return Failed(turn.id, _too_costly(turn, token_mask.trouble).info)
    report, output = turn.report, turn.output
    assert report is not None, "a turn that ends has started"
    assert output.finish_reason is not None
    report.cached_tokens = turn.held_tokens if turn.request.reuse else 0
    report.kv_bits, report.kv_group_size = layout.bits, layout.group_size
    now_s = time.monotonic()
    return Finished(
        turn.id,
        output.finish_reason,
        turn.prompt_tokens,
        turn.generated_tokens,
        turn.prompt_eval_s,
        report,
        stages=turn.stopwatch.stages,
        first_token_at_s=turn.first_token_at_s,
        reasoning_tokens=output.reasoning_tokens,
        completion_s=now_s - (turn.first_token_at_s or now_s),
        stop_string=output.stop_string,
    )


def _too_costly(turn: Turn, trouble: str) -> BadRequest:
    """What some grammars cost shows only while a reply follows them."""
    output = turn.request.structured_output
    return BadRequest(
        f"Holding the reply to what was asked for costs too much: {trouble}. Make it simpler.",
        param=output.param if output else "tools",
    )
