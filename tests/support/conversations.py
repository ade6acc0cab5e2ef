"""Encodes and remembers conversations in a real runtime, with replies that the test writes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rekindle.protocol.events import (
    ArgumentsDelta,
    CacheReport,
    Finished,
    Reason,
    ReasoningDelta,
    TextDelta,
    ToolCallStart,
    new_call_id,
)
from rekindle.protocol.requests import GenerateRequest, SamplingParams
from rekindle.runtime.schedule.turn import Turn
from rekindle.tokens import Tokens
from tests.support.fake import FakeEngine
from tests.support.harness import RuntimeHarness

MERGES = [b'{"', b'": "', b'", "', b'"}', b"assistant", b"user", b"tool", b"The ", b"\n\n", b"ing"]
CHATML_CONTROL = ("<|im_start|>", "<|im_end|>")
HARMONY_CONTROL = (
    *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>"),
    "<|return|>",
)


class Letters:
    """Bytes, a few merges, so that a text has several tokenisations, and control tokens."""

    bos: int | None = None
    eos: int | None = None
    add_bos = False
    longest_bytes = 16
    fim = None

    def __init__(self, control: Sequence[str], ends: Sequence[str], *, bos: str = "") -> None:
        self._pieces = [bytes([value]) for value in range(256)] + MERGES
        self.control_texts = {text: len(self._pieces) + n for n, text in enumerate(control)}
        self._controls = {token: text for text, token in self.control_texts.items()}
        self.end_tokens = frozenset(self.control_texts[text] for text in ends)
        self.bos = self.control_texts.get(bos)
        self.eos = self.control_texts[ends[0]]
        self.size = len(self._pieces) + len(control)
        self._split = re.compile("(" + "|".join(map(re.escape, control)) + ")")
        merges = sorted(MERGES, key=len, reverse=True)
        self._merges = re.compile(b"|".join(map(re.escape, merges)) + b"|.", re.DOTALL)

    def encode(self, text: str, *, special: bool) -> list[int]:
        tokens: list[int] = []
        for part in self._split.split(text) if special else [text]:
            if special and part in self.control_texts:
                tokens.append(self.control_texts[part])
            else:
                tokens += map(self._pieces.index, self._merges.findall(part.encode()))
        return tokens

    def text(self, token: int | None) -> str:
        return "" if token is None else self.piece(token, special=True).decode(errors="replace")

    def piece(self, token: int, *, special: bool) -> bytes:
        if token in self._controls:
            return self._controls[token].encode() if special else b""
        return self._pieces[token]

    def sampled(self, text: str) -> list[int]:
        """The text tokenised letter by letter, as no tokenizer would do it."""
        tokens: list[int] = []
        for part in self._split.split(text):
            known = self.control_texts.get(part)
            tokens += part.encode() if known is None else [known]
        return tokens

    def spelled(self, tokens: Iterable[int]) -> str:
        return b"".join(self.piece(token, special=True) for token in tokens).decode()


class Conversations(RuntimeHarness):
    """Encodes and finds turns without computing.

    The test provides the replies. With a folder it remembers them across restarts.
    """

    def __init__(
        self,
        template: str,
        *,
        control: Sequence[str] = CHATML_CONTROL,
        ends: Sequence[str] = ("<|im_end|>",),
        folder: Path | None = None,
    ) -> None:
        self.letters = Letters(control, ends)
        engine = FakeEngine(context_tokens=1 << 20, chat_template=template)
        engine.tokenizer = self.letters
        super().__init__(engine, ram_bytes=0, folder=folder)

    def begin(self, messages: Sequence[dict[str, Any]], **fields: Any) -> Turn:
        """Encode a request for the engine."""
        request = GenerateRequest(
            turn=next(self._ids),
            messages=json.loads(json.dumps(messages)),
            sampling=SamplingParams(),
            max_tokens=None,
            **fields,
        )
        turn = self.encode_one(request)
        self.pipeline.find(turn)
        return turn

    def answer(
        self,
        turn: Turn,
        raw: str,
        text: str | None = None,
        *,
        reasoning: str = "",
        calls: Sequence[tuple[str, str]] = (),
        cut_off: str = "",
    ) -> dict[str, Any]:
        """End the turn with `raw` as its sampled text, which was parsed into the other arguments.

        Returns the assistant message. Text that was cut off was sampled but not sent.
        """
        for token in self.letters.sampled(raw + cut_off):
            turn.tokens.append(token)
        turn.output._raw.append(raw)
        message = turn.output.message
        if reasoning:
            message.add(ReasoningDelta(reasoning))
        message.add(TextDelta(raw if text is None else text))
        for number, (name, arguments) in enumerate(calls):
            message.add(ToolCallStart(number, name, new_call_id()))
            message.add(ArgumentsDelta(number, arguments))
        report = CacheReport("miss", Reason.NOT_CACHED, 0, len(turn.tokens), None)
        self.sessions.remember(turn, Finished(turn.id, "stop", 0, 0, 0.0, report))
        return message.as_dict()

    def fresh(self, messages: Sequence[dict[str, Any]], **fields: Any) -> Tokens:
        """The prompt on a server that remembers nothing."""
        return self.begin(messages, exact=True, **fields).encoded.prompt.tokens
