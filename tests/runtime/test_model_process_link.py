"""Messages of a model process reach the front whole, in order, and without blocking."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from rekindle.protocol.events import Delta, TextDelta
from rekindle.protocol.frames import Events, FrameReader, LogLine, ToFront
from rekindle.runtime.model_process import Link

PATIENCE_S = 30.0


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, fronts = socket.socketpair()
    with ours, fronts:
        fronts.settimeout(PATIENCE_S)
        yield ours, fronts


def received(fronts: socket.socket, count: int) -> list[ToFront]:
    """Read `count` messages as the front does."""
    messages: list[ToFront] = []
    reader = FrameReader(lambda message: messages.append(message) if message else None)
    while len(messages) < count:
        data = fronts.recv(1 << 16)
        assert data, "the link was closed"
        reader.data_received(data)
    return messages


def test_a_message_is_in_the_socket_when_send_returns(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, fronts = ends
    link = Link(ours)
    link.send(Events([Delta(1, TextDelta("so"))]))
    fronts.setblocking(False)  # reading raises if the message is not in the socket yet
    assert received(fronts, 1) == [Events([Delta(1, TextDelta("so"))])]
    link.close()


def test_a_front_that_does_not_read_blocks_nobody_and_gets_all_in_order(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, fronts = ends
    link = Link(ours)
    text = "x" * 100_000  # few of them fit into a socket
    for number in range(50):
        link.send(LogLine("info", f"{number} {text}"))
    messages = received(fronts, 50)
    link.send(LogLine("info", "last"))
    messages += received(fronts, 1)
    link.close()
    numbers = [each.text.split()[0] for each in messages if isinstance(each, LogLine)]
    assert numbers == [*map(str, range(50)), "last"]


def test_frames_of_concurrent_threads_are_not_mixed(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, fronts = ends
    link = Link(ours)

    def send(name: str) -> None:
        for number in range(200):
            link.send(LogLine("info", f"{name} {number} {'x' * 5_000}"))

    threads = [threading.Thread(target=send, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    messages = received(fronts, 600)
    for thread in threads:
        thread.join()
    link.close()
    words = [each.text.split() for each in messages if isinstance(each, LogLine)]
    for name in "abc":
        assert [int(word[1]) for word in words if word[0] == name] == list(range(200))


def test_sending_to_a_closed_socket_is_not_an_error(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, fronts = ends
    link = Link(ours)
    fronts.close()
    for _ in range(3):
        link.send(LogLine("info", "x" * 1_000_000))
    link.close()
