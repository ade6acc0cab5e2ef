"""A grammar that a client wrote is compiled first in a process of its own.

llguidance compiles in one native call. An intersection of patterns can take it for ever, and a long
chain of rules overflows its stack: either would take the runtime along. The process has limits on
time and memory; what it survives is compiled again where it is needed.
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

#: A step costs 10 ms at worst and a reply 40 MB; what needs more ends with an error.
PARSER_LIMITS = LLParserLimits(
    max_items_in_row=1_000,
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
MOST_CPU_S = 2
MOST_WALL_S = 30.0  # on a machine that does much else
MOST_BYTES = 1 << 30
MOST_REMEMBERED = 1_000
TOO_COSTLY = "compiling it takes too much time or memory"
_MOST_CHARACTERS = 300  # of llguidance's message
_SILENT = 0
_REGEX_ERROR = re.compile(r"regex parse error:.*^error: (.*?)$", re.DOTALL | re.MULTILINE)


def first_line(problem: str) -> str:
    """llguidance's message without its notes to developers and drawings of where it is wrong."""
    if wrong := _REGEX_ERROR.search(problem):
        return f"invalid regular expression: {wrong[1][:_MOST_CHARACTERS]}"
    lines = problem.replace("<non-verbose/>", "").strip().splitlines()
    return lines[0].strip()[:_MOST_CHARACTERS] if lines else ""


class Trials:
    """Grammars that were tried, so that each is tried once. Thread-safe."""

    def __init__(self) -> None:
        self._passed: dict[bytes, None] = {}  # by their hashes, oldest first
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
            if len(self._passed) > MOST_REMEMBERED:
                del self._passed[next(iter(self._passed))]


def _tried(lark: str) -> str:
    """What went wrong; empty when nothing did."""
    command = [sys.executable, "-m", __name__]
    try:
        tried = subprocess.run(
            command, input=lark.encode(), capture_output=True, timeout=MOST_WALL_S
        )
    except subprocess.TimeoutExpired:
        return TOO_COSTLY
    except OSError as error:
        raise ServerError(f"no process to compile a grammar in: {error.strerror}") from None
    if tried.returncode == 0:
        return tried.stdout.decode(errors="replace")
    return TOO_COSTLY


def _main() -> None:
    """The process: reads a grammar, writes the problem there is with it."""
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_S, MOST_CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    grammar = sys.stdin.buffer.read().decode()
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=_SILENT, limits=PARSER_LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()  # the first step costs more than any other
    sys.stdout.write(first_line(matcher.get_error()))


if __name__ == "__main__":
    _main()
