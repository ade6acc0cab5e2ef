"""Thousands of clients are connected at the same time, and the server forgets none of them.

Long: 10,000 clients, or as many as the limit on open files allows.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import struct
from collections import Counter
from collections.abc import Iterator
from enum import Enum

import httpx
import pytest

from tests.stress.test_overload import CHAT, body, is_at_rest, paused, soon
from tests.stress.test_soak import GROWN_HANDLES, Size, size_at_rest
from tests.support.rounds import rounds
from tests.support.server import Server, running
from tests.support.tiny import write_llama

OTHER_FILES = 500  # that the server and this process have open besides connections
USUAL_LIMIT = 1024  # of a shell: the server has to raise it
FILE_LIMIT = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
CLIENTS = min(rounds(1_200, 10_000), FILE_LIMIT - OTHER_FILES)
PLACES = CLIENTS * 9 // 10
CONNECTING = 200  # connections that are being opened at a time
ALL_DONE_S = rounds(60, 300)
CROWD_BYTES = (64 << 20) + CLIENTS * (64 << 10)  # that front and runtime may take for it
GROWN_BYTES = (16 << 20) + CLIENTS * (16 << 10)  # that a second crowd may add


class Habit(Enum):
    """What a client does after it has sent its request."""

    READS = 0
    STREAMS = 1
    HANGS_UP = 2
    RESETS = 3


@contextlib.contextmanager
def file_limit(soft: int) -> Iterator[None]:
    """Change the limit on open files of this process and of those that it starts."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that was started with the usual limit, as from a shell."""
    folder = tmp_path_factory.mktemp("server")
    model = write_llama(folder / "tiny.gguf", context=2048)
    flags = ("--threads", "1", "--parallel", "8", "--queue", str(PLACES - 8),
             "--ram-cache", "8MB", "--disk-cache", "0")  # fmt: skip
    with contextlib.ExitStack() as stack:
        with file_limit(min(USUAL_LIMIT, FILE_LIMIT)):
            started = stack.enter_context(running(model, folder, *flags))
        yield started


class Crowd:
    """All clients. Each has a connection of its own and sends one request."""

    def __init__(self, server: Server) -> None:
        url = httpx.URL(server.url)
        self._address = (url.host, url.port)
        self._connecting = asyncio.Semaphore(CONNECTING)
        self.may_go_on = asyncio.Event()  # until then nobody hangs up
        self.sent = 0
        self.refused = 0
        self.left = 0  # clients that hung up before they were answered
        self.statuses: Counter[int] = Counter()

    async def visit(self, number: int) -> None:
        habit = Habit(number % len(Habit))
        async with self._connecting:
            reader, writer = await asyncio.open_connection(*self._address)
            writer.write(self._request(number, stream=habit is Habit.STREAMS))
            await writer.drain()
            self.sent += 1
        try:
            await self._read(habit, reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    def _request(self, number: int, *, stream: bool) -> bytes:
        asked = body(f"client {number}", max_tokens=2, stream=stream, ignore_eos=True)
        content = json.dumps(asked).encode()
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        return head.encode() + content

    async def _read(
        self, habit: Habit, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        first = asyncio.ensure_future(reader.readline())
        await asyncio.wait(
            [first, going := asyncio.ensure_future(self.may_go_on.wait())],
            return_when=asyncio.FIRST_COMPLETED,
        )
        # A stream that waits for three seconds begins with status 200.
        is_early = first.done() and not self.may_go_on.is_set()
        self.refused += is_early and int(first.result().split()[1]) != httpx.codes.OK
        going.cancel()
        if not first.done() and habit in (Habit.HANGS_UP, Habit.RESETS):
            first.cancel()
            self.left += 1
            if habit is Habit.RESETS:  # close with a reset instead of a regular end
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, linger
                )
            return
        status, answer = int((await first).split()[1]), await reader.read()
        if status == httpx.codes.OK:
            ended = b"data: [DONE]" if habit is Habit.STREAMS else b'"finish_reason":"length"'
            assert ended in answer, answer[-500:]
        else:
            assert b'"code":"queue_full"' in answer, answer
            assert b"retry-after:" in answer
        self.statuses[status] += 1


async def gather(server: Server) -> Crowd:
    """Let all clients wait at the same time, and then let them go on."""
    crowd = Crowd(server)
    with paused(server):
        clients = [asyncio.ensure_future(crowd.visit(number)) for number in range(CLIENTS)]
        async with asyncio.timeout(ALL_DONE_S):
            while crowd.sent < CLIENTS or crowd.refused < CLIENTS - PLACES:
                await asyncio.sleep(0.05)
                for ended in (each for each in clients if each.done()):
                    ended.result()  # raises if the client failed
        crowd.may_go_on.set()
        await asyncio.sleep(0.5)  # most of the hang-ups arrive while the turns wait
    async with asyncio.timeout(ALL_DONE_S):
        await asyncio.gather(*clients)
    return crowd


@pytest.mark.long
def test_a_crowd_that_is_connected_at_the_same_time_is_answered_refused_or_forgotten(
    server: Server,
) -> None:
    """No turn makes progress until all clients have sent their requests.

    One in ten is refused. Of the others, half hang up while they wait, and half are answered. A
    second crowd finds the server as the first one did.
    """
    with server.client() as client, file_limit(FILE_LIMIT):
        before = size_at_rest(server)
        first = come_and_go(server, client)
        second = come_and_go(server, client)
    print(f"{before} before, {first} and {second} after {CLIENTS} clients each")
    assert first.memory_bytes <= before.memory_bytes + CROWD_BYTES
    assert second.memory_bytes <= first.memory_bytes + GROWN_BYTES
    assert second.handles <= first.handles + GROWN_HANDLES <= before.handles + 2 * GROWN_HANDLES
    assert "Traceback" not in server.log.read_text()


def come_and_go(server: Server, client: httpx.Client) -> Size:
    """Returns the size of the server afterwards."""
    crowd = asyncio.run(gather(server))
    soon(lambda: is_at_rest(client))
    assert client.post(CHAT, json=body(max_tokens=2)).is_success
    assert crowd.statuses[429] == crowd.refused == CLIENTS - PLACES
    assert crowd.statuses[200] + crowd.statuses[429] + crowd.left == CLIENTS
    assert crowd.statuses[200] > PLACES // 3
    assert crowd.left > PLACES // 3
    return size_at_rest(server)
