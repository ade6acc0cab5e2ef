"""A grammar that would hang or crash its compiler is refused without harm to the server."""

from __future__ import annotations

import pytest

from rekindle.chat.grammar import trial
from rekindle.chat.grammar.trial import Trials
from rekindle.errors import BadRequest

HANGS = "start: T\nT: " + " & ".join(f"/(.*a.{{{count}}}b.*)/" for count in range(30))
OVERFLOWS = (
    "start: r0\n" + "\n".join(f'r{n}: "a" r{n + 1} | "b"' for n in range(20_000)) + '\nr20000: "c"'
)


@pytest.mark.parametrize(
    ("lark", "problem"),
    [
        (HANGS, "compiling it takes too much time or memory"),
        (OVERFLOWS, "compiling it takes too much time or memory"),
        ("start: nowhere", 'unknown name: "nowhere"'),
        ("start: /(/", "unclosed group"),
        ("", "Empty grammar"),
    ],
    ids=["it hangs", "it overflows the stack", "a name", "a pattern", "nothing"],
)
def test_a_grammar_that_cannot_be_compiled_is_refused_with_the_reason(
    lark: str, problem: str
) -> None:
    with pytest.raises(BadRequest, match=problem) as refused:
        Trials().check(lark, "grammar")
    assert refused.value.param == "grammar"
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "lark",
    [
        "start: /(a+)+b/",
        "start: /((((a{1,100}){1,100}){1,100}){1,100})/",
        "start: /a{1,1000000000}/",
        "start: a{100}\na: b{100}\nb: c{100}\nc: /x/",
        "start: start start | /a/ |",
    ],
)
def test_repetition_of_repetitions_is_cheap(lark: str) -> None:
    Trials().check(lark, "grammar")


def test_a_grammar_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def record(lark: str) -> str:
        tried.append(lark)
        return ""

    monkeypatch.setattr(trial, "_tried", record)
    trials = Trials(max_remembered=1_000)
    for number in (*range(1_000), 0, 1, 1_000, 0):
        trials.check(f"start: /{number}/", "grammar")
    assert len(tried) == 1_002  # the oldest was forgotten
