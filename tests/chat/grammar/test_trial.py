"""A grammar is compiled by itself, and CPU time can be limited inside native calls."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from rekindle.chat.grammar.trial import check_lark, cpu_left_s
from rekindle.errors import BadRequest


@pytest.mark.parametrize(
    ("lark", "problem"),
    [
        ("start: nowhere", 'unknown name: "nowhere"'),
        ("start: /(/", "unclosed group"),
        ("", "Empty grammar"),
    ],
    ids=["a name", "a pattern", "nothing"],
)
def test_a_grammar_that_cannot_be_compiled_is_refused_with_the_reason(
    lark: str, problem: str
) -> None:
    with pytest.raises(BadRequest, match=problem) as refused:
        check_lark(lark, "grammar")
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
    check_lark(lark, "grammar")


def test_a_process_ends_when_its_cpu_time_is_used_up() -> None:
    program = (
        "from rekindle.chat.grammar.trial import cpu_left_s, limit_cpu\n"
        "limit_cpu(0.2)\n"
        "assert 0 < cpu_left_s() <= 0.3\n"
        "while True: pass\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], timeout=60)
    assert -ended.returncode == signal.SIGPROF


def test_without_a_limit_no_cpu_time_is_counted() -> None:
    assert cpu_left_s() is None
