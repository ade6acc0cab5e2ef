"""Compiles a client's grammar for a vocabulary of bytes, to see whether it can be enforced.

llguidance compiles in one native call. An intersection of patterns can take forever, and a long
chain of rules overflows the stack. So this runs only in the grammar process (process.py), which
has limits on time and memory and may die.
"""

from __future__ import annotations

import re
import signal

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from rekindle.errors import BadRequest

# A step costs at most 10 ms, and a reply 40 MB. A grammar that needs more ends with an error.
PARSER_LIMITS = LLParserLimits(
    max_items_in_row=1_000,
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
_REGEX_ERROR = re.compile(r"regex parse error:.*^error: (.*?)$", re.DOTALL | re.MULTILINE)


def first_line(problem: str, max_characters: int = 300) -> str:
    """llguidance's message without its notes to developers and its drawings."""
    if wrong := _REGEX_ERROR.search(problem):
        return f"invalid regular expression: {wrong[1][:max_characters]}"
    lines = problem.replace("<non-verbose/>", "").strip().splitlines()
    return lines[0].strip()[:max_characters] if lines else ""


def check_lark(lark: str, param: str) -> None:
    """Raises BadRequest for a grammar that cannot be compiled by itself."""
    matcher = LLMatcher(LLTokenizer("byte"), lark, log_level=0, limits=PARSER_LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()  # the first step costs more than any other
    if problem := first_line(matcher.get_error()):
        raise BadRequest(f"The grammar cannot be enforced: {problem}.", param=param)


def limit_cpu(seconds: float) -> None:
    """End this process when it has used this much more CPU time. Zero removes the limit.

    A signal without a handler ends the process, even inside a native call.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)


def cpu_left_s() -> float | None:
    """CPU time until the limit ends this process. None without a limit."""
    return signal.getitimer(signal.ITIMER_PROF)[0] or None
