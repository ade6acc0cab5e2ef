"""Front and runtime receive whole messages, however the bytes arrive."""

from __future__ import annotations

import socket

import pytest

from rekindle.protocol.events import Cancelled, Delta, TextDelta
from rekindle.protocol.frames import Events, FrameReader, Loading, ToFront, frame, receive
from rekindle.protocol.requests import Cancel, Stop

SENT: list[ToFront] = [Loading(0.5), Events([Delta(1, TextDelta("hé")), Cancelled(2)])]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_the_front_gets_whole_messages_from_any_pieces(size: int) -> None:
    received: list[ToFront | None] = []
    reader = FrameReader(received.append)
    sent = b"".join(frame(message) for message in SENT)
    for start in range(0, len(sent), size):
        reader.data_received(sent[start : start + size])
    reader.connection_lost(None)
    assert received == [*SENT, None]


def test_the_runtime_gets_messages_until_the_front_closes_the_socket() -> None:
    front, runtime = socket.socketpair()
    with runtime:
        with front:
            front.sendall(frame(Cancel(7)) + frame(Stop()) + frame(Cancel(8))[:-1])
        assert [message for message, _ in receive(runtime)] == [Cancel(7), Stop()]
