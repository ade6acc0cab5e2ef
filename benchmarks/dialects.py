"""Measures what each dialect costs compared with chat completions.

Run it with `python benchmarks/dialects.py` (`--quick`: fewer rounds) while nothing else runs. The
model has one layer, so that most of the measured time is the server. The dialects take turns. Each
asks its own question after one long prompt that is already computed. The promise is at most 5 % of
the time to first token, and 10 µs per token.
"""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
from models import one_layer
from overhead import processes, processor_s
from rich.console import Console
from servers import Server, Setup, rekindle

from rekindle.config import load_config
from rekindle.models.progress import progress_on
from rekindle.models.pull import pull

RULES = "The keeper of the light knows the tides, the ships and the birds. " * 200
REPLY_TOKENS = 256
PROMISED_SHARE, PROMISED_US = 0.05, 10.0


def _messages(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": RULES}, {"role": "user", "content": question}]


@dataclass(slots=True)
class Dialect:
    """How to ask for a turn, and where the answer has text and a token count."""

    name: str
    path: str
    body: Callable[[str], dict[str, Any]]
    text: re.Pattern[bytes]
    count: re.Pattern[bytes]
    first_ms: list[float] = field(default_factory=list)
    token_us: list[float] = field(default_factory=list)
    front_us: list[float] = field(default_factory=list)  # processor time of the front per token


def dialects() -> list[Dialect]:
    """All dialects. The first is chat completions, with which the others are compared."""
    stream: dict[str, Any] = {"stream": True, "temperature": 0}
    return [
        Dialect(
            "chat completions",
            "/v1/chat/completions",
            lambda question: {
                **stream,
                "messages": _messages(question),
                "max_tokens": REPLY_TOKENS,
                "stream_options": {"include_usage": True},
            },
            re.compile(rb'"content":"[^"]'),
            re.compile(rb'"completion_tokens":(\d+)'),
        ),
        Dialect(
            "messages",
            "/v1/messages",
            lambda question: {
                **stream,
                "system": RULES,
                "messages": _messages(question)[1:],
                "max_tokens": REPLY_TOKENS,
            },
            re.compile(rb'"text_delta"'),
            re.compile(rb'"output_tokens":([1-9]\d*)'),
        ),
        Dialect(
            "responses",
            "/v1/responses",
            lambda question: {
                **stream,
                "instructions": RULES,
                "input": question,
                "max_output_tokens": REPLY_TOKENS,
                "store": False,
            },
            re.compile(rb"output_text\.delta"),
            re.compile(rb'"output_tokens":(\d+)'),
        ),
        Dialect(
            "ollama",
            "/api/chat",
            lambda question: {
                "messages": _messages(question),
                "options": {"temperature": 0, "num_predict": REPLY_TOKENS},
            },
            re.compile(rb'"content":"[^"]'),
            re.compile(rb'"eval_count":(\d+)'),
        ),
    ]


async def measure(server: Server, dialect: Dialect, question: str) -> None:
    """Run one turn, and read until the server closes the connection."""
    place = urlsplit(server.url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    sent = json.dumps(dialect.body(question)).encode()
    head = f"POST {dialect.path} HTTP/1.1\r\nHost: {place.netloc}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(sent)}\r\n\r\n"
    front, *_ = processes(server)
    spent_s, started = processor_s(front), time.perf_counter()
    writer.write(head.encode() + sent)
    answer, first_s = bytearray(), 0.0
    while part := await reader.read(1 << 16):
        answer += part
        if not first_s and dialect.text.search(answer):
            first_s = time.perf_counter() - started
    whole_s = time.perf_counter() - started
    writer.close()
    counts = dialect.count.findall(answer)
    if b" 200 " not in answer[:20] or not counts or not first_s:
        raise SystemExit(f"{dialect.name} answered {bytes(answer[:600])!r}")
    tokens = int(counts[-1])
    dialect.first_ms.append(first_s * 1e3)
    dialect.token_us.append((whole_s - first_s) * 1e6 / max(tokens - 1, 1))
    dialect.front_us.append((processor_s(front) - spent_s) * 1e6 / tokens)


def report(measured: list[Dialect]) -> None:
    chat = measured[0]
    print(f"{'':20}{'first token':>14}{'beside chat':>13}{'a token':>12}{'beside chat':>13}  front")
    for each in measured:
        first = median(each.first_ms)
        more = median(a / b for a, b in zip(each.first_ms, chat.first_ms, strict=True)) - 1
        token = median(each.token_us)
        more_us = median(a - b for a, b in zip(each.token_us, chat.token_us, strict=True))
        kept = more <= PROMISED_SHARE and more_us <= PROMISED_US
        print(
            f"{each.name:20}{first:11.2f} ms{more:+13.1%}{token:9.0f} µs{more_us:+10.1f} µs"
            f"  {median(each.front_us):.0f} µs{'' if kept else '  more than promised'}"
        )


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds.")] = False,
) -> None:
    """Compare the dialects."""
    models_dir = load_config({}).models_dir
    smollm2 = pull("smollm2", models_dir=models_dir, progress=progress_on(Console()))
    measured = dialects()
    with tempfile.TemporaryDirectory(prefix="rekindle-bench-") as name:
        folder = Path(name)
        setup = Setup(model=one_layer(smollm2, folder / "one-layer.gguf"), slots=4, context=8192)
        with rekindle(setup, folder / "rekindle.log") as server:
            for number in range(4 if quick else 40):
                for each in measured[number % 4 :] + measured[: number % 4]:
                    asyncio.run(measure(server, each, f"Night {number}: what of {each.name}?"))
                    time.sleep(0.1)  # work after a turn must not count for the next one
                if number == 0:  # it computed the common prompt
                    measured = dialects()
    report(measured)


if __name__ == "__main__":
    typer.run(main)
