"""Writes, checks and tries the grammars of clients in a process of its own.

The grammar process starts on first use and stays. It answers one request after another. It has no
memory and no sockets of the runtime, so a grammar that hangs, needs too much memory or overflows
the stack ends only this process, and another one takes its place.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rekindle.chat.grammar.arguments import PARAM
from rekindle.chat.grammar.lark import Grammar
from rekindle.chat.grammar.matcher import GrammarCompiler
from rekindle.chat.grammar.reply import ReplyGrammars
from rekindle.chat.grammar.trial import limit_cpu
from rekindle.chat.tools.registry import select
from rekindle.errors import BadRequest, ServerError, Unavailable, as_server_error
from rekindle.protocol.events import ErrorInfo
from rekindle.protocol.frames import read_exactly
from rekindle.protocol.requests import StructuredOutput, ToolUse

_LENGTH = struct.Struct(">I")
# Ways in which a request ends the process: CPU time, memory, the stack.
_LIMIT_SIGNALS = frozenset((signal.SIGPROF, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS))


class GrammarLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on one request."""

    cpu_s: float = 2.0
    wall_s: float = 30.0  # longer than the CPU time, because the machine may be busy
    memory_bytes: int = 512 << 20  # by which the process may grow
    # A process that has grown by this much is replaced after its answer. Otherwise memory that it
    # has freed but not returned would count against the next request.
    lasting_bytes: int = 128 << 20


class ReplyFormatSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The model's part of every grammar. A process gets it once."""

    template: str | None = None
    tool_format: str | None = None
    reasoning_format: str | None = None
    control: dict[str, int] = {}  # the text of each control token, and its id
    vocabulary_size: int = 0
    end_tokens: list[int] = []
    limits: GrammarLimits = GrammarLimits()


class GrammarRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The client's part of one grammar."""

    tools: list[Any] = []  # that may be called
    use: ToolUse = ToolUse()
    output: StructuredOutput | None = None
    opened: bool = False  # the prompt ends inside reasoning
    completion: bool = False  # the reply has neither reasoning nor calls

    def too_costly(self) -> BadRequest:
        """The error for a request that exceeded its limits."""
        output = self.output
        is_schema = output is None or (output.grammar is None and output.regex is None)
        return BadRequest(
            f"The {'schema' if is_schema else 'grammar'} cannot be enforced: "
            "compiling it takes too much time or memory.",
            param=PARAM if output is None else output.param,
        )


class GrammarAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A grammar that can be compiled, None for a reply without constraints, or an error."""

    grammar: Grammar | None = None
    error: ErrorInfo | None = None
    cpu_s: float = 0.0
    is_last: bool = False  # the process has to be replaced


class GrammarTooCostly(Exception):
    """A request exceeded its limits and ended the process."""


class GrammarProcess:
    """A grammar process and its replacements. Only one thread at a time may use it."""

    def __init__(self, setup: ReplyFormatSetup) -> None:
        self._setup = setup
        self._has_begun = False  # it has loaded its modules
        self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def answer(self, request: bytes) -> GrammarAnswer:
        """Answer an encoded GrammarRequest.

        Raises GrammarTooCostly, or another ServerError if that is not the request's fault. If
        something else ends the process, for example an operator, another one answers.
        """
        for _ in range(2):
            try:
                return self._exchange(request)
            except TimeoutError:
                self._restart()
                raise Unavailable(
                    "This machine is too busy to compile the grammar; try again later."
                ) from None
            except (EOFError, ConnectionError):
                has_begun, status = self._has_begun, self._restart()
            if has_begun and -status in _LIMIT_SIGNALS:
                raise GrammarTooCostly
        if has_begun:
            raise GrammarTooCostly
        raise ServerError(f"the process that compiles grammars ended with exit status {status}")

    def close(self) -> None:
        """End the process."""
        self._end()

    def _exchange(self, request: bytes) -> GrammarAnswer:
        if not self._has_begun:
            _receive(self._socket)
            self._has_begun = True
        _send(self._socket, request)
        answer = msgspec.msgpack.decode(_receive(self._socket), type=GrammarAnswer)
        if answer.is_last:
            self._restart()
        return answer

    def _restart(self) -> int:
        """Start another process now, so that it is ready for the next request.

        Returns the exit status of the old one.
        """
        process = self._process
        self._end()
        self._start()
        return process.returncode

    def _start(self) -> None:
        """Start the process. It inherits nothing except its end of the socket, as its input."""
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(self._setup.limits.wall_s)
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __name__],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # NumPy needs no threads
                )
            except OSError as error:
                self._socket.close()
                reason = error.strerror
                raise ServerError(f"cannot start a process to compile grammars: {reason}") from None
        self._has_begun = False
        self._end = weakref.finalize(self, _end, self._process, self._socket)
        with contextlib.suppress(ConnectionError):  # `answer` reports that the process has ended
            _send(self._socket, msgspec.msgpack.encode(self._setup))


def _end(process: subprocess.Popen[bytes], sock: socket.socket) -> None:
    process.kill()
    process.wait()
    sock.close()


def _send(sock: socket.socket, body: bytes) -> None:
    sock.sendall(_LENGTH.pack(len(body)) + body)


def _receive(sock: socket.socket) -> bytes:
    """Raises EOFError if the other end is gone."""
    length = read_exactly(sock, _LENGTH.size)
    body = read_exactly(sock, _LENGTH.unpack(length)[0]) if length else None
    if body is None:
        raise EOFError
    return body


class _ByteVocabulary:
    """The model's control tokens, and one token for each byte behind the model's own tokens."""

    bos = None

    def __init__(self, control: Mapping[str, int], size: int) -> None:
        self.control_texts = control
        self._texts = {token: text.encode() for text, token in control.items() if token < size}
        self._first_byte = size
        self.size = size + 256

    def encode(self, text: str, *, special: bool) -> list[int]:
        assert not special
        return [self._first_byte + byte for byte in text.encode()]

    def piece(self, token: int, *, special: bool) -> bytes:
        if token >= self._first_byte:
            return bytes([token - self._first_byte])
        return self._texts.get(token, b"") if special else b""


class _Child:
    """Answers requests, in the grammar process."""

    def __init__(self, setup: ReplyFormatSetup) -> None:
        self._limits = setup.limits
        format = select(
            setup.template,
            tool_format=setup.tool_format,
            reasoning_format=setup.reasoning_format,
        )
        self._grammars = format.grammars(setup.control)
        vocabulary = _ByteVocabulary(setup.control, setup.vocabulary_size)
        self._row = np.zeros(vocabulary.size, np.float32)
        self._compiler = GrammarCompiler(
            vocabulary, vocabulary_size=vocabulary.size, end_tokens=setup.end_tokens
        )
        with contextlib.suppress(BadRequest):  # the model has no end token
            self._compiler.compile(Grammar('start: "a"', ""))  # builds the vocabulary
        self._first_bytes = _address_space_bytes()

    def answer(self, request: GrammarRequest) -> GrammarAnswer:
        started_s = time.process_time()
        limit_cpu(self._limits.cpu_s)
        try:
            grammar = written(self._grammars, request)
            if grammar is not None:
                matcher = self._compiler.compile(grammar)
                matcher.mask(self._row)  # the first step costs more than any other
            answer = GrammarAnswer(grammar=grammar)
        except (MemoryError, RecursionError):
            answer = GrammarAnswer(error=request.too_costly().info)
        except Exception as error:
            answer = GrammarAnswer(error=as_server_error(error, "writing the grammar").info)
        limit_cpu(0)
        return msgspec.structs.replace(
            answer,
            cpu_s=time.process_time() - started_s,
            is_last=_address_space_bytes() - self._first_bytes > self._limits.lasting_bytes,
        )

    def limit_memory(self) -> None:
        """Let the process grow by the limit at most. Linux enforces this, other systems may not."""
        if self._first_bytes:
            most = self._first_bytes + self._limits.memory_bytes
            resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _address_space_bytes() -> int:
    """Zero where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def written(grammars: ReplyGrammars, request: GrammarRequest) -> Grammar | None:
    """The grammar of a reply. None for a reply without constraints. Raises BadRequest."""
    output, opened = request.output, request.opened
    if request.tools:
        return grammars.calls(request.tools, request.use, opened=opened, answer=output)
    if output is None:
        return None
    return grammars.text(output) if request.completion else grammars.answer(output, opened=opened)


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sock = socket.socket(fileno=sys.stdin.fileno())
    setup = msgspec.msgpack.decode(_receive(sock), type=ReplyFormatSetup)
    child = _Child(setup)
    child.limit_memory()
    _send(sock, b"")
    with contextlib.suppress(EOFError, ConnectionError):  # the runtime has gone
        while True:
            request = msgspec.msgpack.decode(_receive(sock), type=GrammarRequest)
            _send(sock, msgspec.msgpack.encode(child.answer(request)))


if __name__ == "__main__":
    _main()
