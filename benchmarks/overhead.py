"""Measures the work of both servers besides computing, with a model of one layer.

Run it with `python benchmarks/overhead.py` (`--quick`: fewer rounds) while nothing else runs. The
two servers take turns with llama.cpp's raw calls, which are the limit of both. For Rekindle it also
prints the processor time of each process, which a busy machine changes little.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
from models import one_layer
from raw_steps import RawSteps
from rich.console import Console
from servers import Server, Setup, llamacpp, rekindle

from rekindle.config import load_config
from rekindle.models.progress import progress_on
from rekindle.models.pull import pull

STREAMS = (1, 8, 32, 64)
STREAM_TOKENS = 128
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8, "top_p": 0.9, "top_k": 0, "min_p": 0},
}
LONE_ROUNDS = (
    8  # rounds of a single stream per round of many; they are short, and some meet a busy moment
)
LONG_WORDS = 28_500  # each word is one token
WORDS = ("the", "of", "and", "to", "in", "is", "that", "for", "it", "was", "with", "not", "at")
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Answer:
    """The bytes of one streamed answer."""

    first_s: float
    body: bytes

    @property
    def text(self) -> str:
        lines = (line[6:] for line in self.body.split(b"\n") if line.startswith(b"data: {"))
        deltas = (json.loads(line)["choices"] for line in lines)
        return "".join(each[0]["delta"].get("content") or "" for each in deltas if each)


class _Stream:
    """A request that is read until the server closes the connection."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        self.url = url
        place = urlsplit(url)
        self.socket = socket.create_connection((place.hostname, place.port))
        sent = json.dumps({"stream": True, "ignore_eos": True, **body}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {place.netloc}\r\n"
        head += "Connection: close\r\nContent-Type: application/json\r\n"
        self._request = f"{head}Content-Length: {len(sent)}\r\n\r\n".encode() + sent
        self._parts: list[bytes] = []
        self._started_s = self._first_s = 0.0

    def send(self) -> None:
        self._started_s = time.perf_counter()
        self.socket.sendall(self._request)

    def read(self) -> bool:
        """Read what has arrived. False at the end of the answer."""
        part = self.socket.recv(1 << 16)
        self._parts.append(part)
        if not self._first_s and b'"content":"' in part.replace(b'"content":""', b""):
            self._first_s = time.perf_counter()
        return bool(part)

    def answer(self) -> Answer:
        self.socket.close()
        answer = Answer(self._first_s - self._started_s, b"".join(self._parts))
        if b" 200 " not in answer.body[:20] or b"data: [DONE]" not in answer.body[-64:]:
            raise SystemExit(f"{self.url} answered {answer.body[:600]!r}")
        return answer


def ask(url: str, *bodies: dict[str, Any]) -> list[Answer]:
    """A client with very low cost, because on two cores it competes with the servers."""
    streams = [_Stream(url, body) for body in bodies]
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            stream.send()
            selector.register(stream.socket, selectors.EVENT_READ, stream)
        while selector.get_map():
            for key, _ in selector.select():
                if not key.data.read():
                    selector.unregister(key.fileobj)
    return [stream.answer() for stream in streams]


def decode(server: Server, streams: int, way: dict[str, Any], number: int) -> float:
    """Tokens per second of this many concurrent streams."""
    bodies = [
        {
            "messages": [{"role": "user", "content": f"Tell me story {number} of {stream}."}],
            "max_tokens": STREAM_TOKENS,
            "seed": stream,
            **way,
        }
        for stream in range(streams)
    ]
    started = time.perf_counter()
    ask(server.url, *bodies)
    return streams * STREAM_TOKENS / (time.perf_counter() - started)


class Conversation:
    """A long conversation whose next turns are short."""

    def __init__(self, server: Server) -> None:
        self._url = server.url
        chance = Random(1)
        text = " ".join(chance.choice(WORDS) for _ in range(LONG_WORDS))
        self._messages = [{"role": "system", "content": text}, {"role": "user", "content": "So?"}]

    def turn_ms(self) -> float:
        """The time to first token of the next turn."""
        body = {"messages": self._messages, "max_tokens": 8, "temperature": 0}
        [answer] = ask(self._url, body)
        reply = {"role": "assistant", "content": answer.text}
        self._messages += [reply, {"role": "user", "content": "And then?"}]
        time.sleep(0.3)  # work after a turn must not count for the next one
        return answer.first_s * 1000


def processor_s(process_id: int) -> float:
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def processes(server: Server) -> list[int]:
    """The front and the runtime that it started."""
    children = Path(f"/proc/{server.process_id}/task/{server.process_id}/children").read_text()
    return [server.process_id, *map(int, children.split()[:1])]


@contextmanager
def both(setup: Setup, folder: Path) -> Iterator[tuple[Server, Server]]:
    with ExitStack() as stack:
        ours = stack.enter_context(rekindle(setup, folder / "rekindle.log"))
        yield ours, stack.enter_context(llamacpp(setup, folder / "llamacpp.log"))


def compare_streams(model: Path, folder: Path, rounds: int) -> None:
    setup = Setup(model=model, slots=max(STREAMS), context=16_384)
    raw = RawSteps(model, slots=setup.slots, threads=setup.threads, context=setup.context)
    print(
        f"{'tokens a second':22}{'ours':>9}{'llama.cpp':>11}{'ratio':>7}{'raw steps':>11}"
        "   processor ms a token"
    )
    with both(setup, folder) as servers, closing(raw):
        for label, way in WAYS.items():
            for streams in STREAMS:
                often = rounds * max(1, LONE_ROUNDS // streams)
                print(f"{streams:3} streams, {label:9}{_line(servers, raw, streams, way, often)}")


def _line(
    servers: tuple[Server, Server], raw: RawSteps, streams: int, way: dict[str, Any], rounds: int
) -> str:
    """Measure both servers and the raw steps in turns."""
    ours, theirs = servers
    own, other, limit, pids = [], [], [], processes(ours)
    for server in servers:  # exclude first-time work
        decode(server, streams, way, rounds)
    before = [processor_s(each) for each in pids]
    for number in range(rounds):
        own.append(decode(ours, streams, way, number))
        other.append(decode(theirs, streams, way, number))
        limit.append(raw.tokens_per_s(streams, STREAM_TOKENS))
    tokens = rounds * streams * STREAM_TOKENS
    front_ms, runtime_ms = (
        (processor_s(each) - start) * 1000 / tokens
        for each, start in zip(pids, before, strict=True)
    )
    ratio = median(one / two for one, two in zip(own, other, strict=True))
    return (
        f"{median(own):9.0f}{median(other):11.0f}{ratio:7.2f}{median(limit):11.0f}"
        f"   front {front_ms:.3f}, runtime {runtime_ms:.3f}"
    )


def compare_turns(model: Path, folder: Path, rounds: int) -> None:
    print(f"\n{'ms to the first token':22}{'ours':>9}{'llama.cpp':>11}")
    with both(Setup(model=model, slots=1, context=32_768), folder) as servers:
        talks = [Conversation(server) for server in servers]
        cold = [talk.turn_ms() for talk in talks]
        warm = [[talk.turn_ms() for talk in talks] for _ in range(2 * rounds)]
    print(f"{'29k tokens, cold':22}{cold[0]:9.0f}{cold[1]:11.0f}")
    own, other = (sorted(each) for each in zip(*warm, strict=True))
    print(f"{'its next turns':22}{median(own):9.1f}{median(other):11.1f}")
    print(f"{'the fastest of them':22}{own[0]:9.1f}{other[0]:11.1f}")


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds.")] = False,
    only: Annotated[str | None, typer.Option(help="Measure only streams or turns.")] = None,
) -> None:
    """Compare the two servers."""
    rounds = 2 if quick else 5
    models_dir = load_config({}).models_dir
    smollm2 = pull("smollm2", models_dir=models_dir, progress=progress_on(Console()))
    with tempfile.TemporaryDirectory(prefix="rekindle-bench-") as name:
        folder = Path(name)
        model = one_layer(smollm2, folder / "one-layer.gguf")
        if only != "turns":
            compare_streams(model, folder, rounds)
        if only != "streams":
            compare_turns(model, folder, rounds)


if __name__ == "__main__":
    typer.run(main)
