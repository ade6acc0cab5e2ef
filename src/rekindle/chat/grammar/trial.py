"""Compiles a client's grammar in a separate process first.

llguidance compiles in one native call. An intersection of patterns can take forever, and a long
chain of rules overflows its stack. Both would end the runtime. The process has limits on time and
memory. A grammar that it survives is compiled again where it is needed.
"""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from hashlib import sha256
from threading import Lock

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from rekindle.errors import BadRequest, ServerError

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
MAX_CPU_S = 2
MAX_WALL_S = 30.0  # on a busy machine
MAX_BYTES = 1 << 30
TOO_COSTLY = "compiling it takes too much time or memory"
_REGEX_ERROR = re.compile(r"regex parse error:.*^error: (.*?)$", re.DOTALL | re.MULTILINE)


def first_line(problem: str, max_characters: int = 300) -> str:
    """llguidance's message without its notes to developers and its drawings."""
    if wrong := _REGEX_ERROR.search(problem):
        return f"invalid regular expression: {wrong[1][:max_characters]}"
    lines = problem.replace("<non-verbose/>", "").strip().splitlines()
    return lines[0].strip()[:max_characters] if lines else ""


class Trials:
    """Tries each grammar once. Thread-safe."""

    def __init__(self, max_remembered: int = 1_000) -> None:
        self._passed: dict[bytes, None] = {}  # hashes of grammars, in order of arrival
        self._max_remembered = max_remembered
        self._lock = Lock()

    def check(self, lark: str, param: str) -> None:
        """Raises BadRequest for a grammar that cannot be compiled, or only at too high a cost."""
        key = sha256(lark.encode()).digest()
        with self._lock:
            if key in self._passed:
                return
        if problem := _tried(lark):
            raise BadRequest(f"The grammar cannot be enforced: {problem}.", param=param)
        with self._lock:
            self._passed[key] = None
            if len(self._passed) > self._max_remembered:
                del self._passed[next(iter(self._passed))]


def _tried(lark: str) -> str:
    """The problem with a grammar. Empty if it compiles."""
    command = [sys.executable, "-m", __name__]
    try:
        tried = subprocess.run(
            command, input=lark.encode(), capture_output=True, timeout=MAX_WALL_S
        )
    except subprocess.TimeoutExpired:
        return TOO_COSTLY
    except OSError as error:
        reason = error.strerror
        raise ServerError(f"cannot start a process to compile a grammar: {reason}") from None
    return tried.stdout.decode(errors="replace") if tried.returncode == 0 else TOO_COSTLY


def _main() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    grammar = sys.stdin.buffer.read().decode()
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=PARSER_LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()  # the first step costs more than any other
    sys.stdout.write(first_line(matcher.get_error()))


if __name__ == "__main__":
    _main()
