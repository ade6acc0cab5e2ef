"""The entry point of a model's process: it loads, says that it is ready, and serves.

An exception that nobody expected, on whichever thread, ends the process at once.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import threading
import traceback
from typing import NoReturn

from rekindle.errors import RekindleError
from rekindle.protocol.frames import LoadFailed, frame, receive
from rekindle.protocol.requests import LoadModel
from rekindle.runtime.embedding.process import EmbeddingProcess
from rekindle.runtime.loading import engine_options
from rekindle.runtime.process import RuntimeProcess


def _load(load: LoadModel, sock: socket.socket) -> RuntimeProcess | EmbeddingProcess:
    if load.is_embedder:
        return EmbeddingProcess(engine_options(load), load.settings, sock)
    return RuntimeProcess(load, sock)


def main() -> None:
    """Entry point of the child process; its one argument is the socket's descriptor."""
    for stop in (signal.SIGINT, signal.SIGTERM):  # the front decides when we end: when it says
        signal.signal(stop, signal.SIG_IGN)  # so, or by hanging up
    faulthandler.enable()  # a crash in native code, or the front's watchdog, shows every stack
    threading.excepthook = lambda raised: _end(raised.exc_value)
    sock = socket.socket(fileno=int(sys.argv[1]))
    received = receive(sock)
    load = next(received).message
    assert isinstance(load, LoadModel)
    try:
        process = _load(load, sock)
    except RekindleError as error:
        sock.sendall(frame(LoadFailed(str(error))))
        return
    process.link.send(process.ready())
    threading.Thread(target=process.read, args=(received,), daemon=True).start()
    for daemon in process.daemons:
        threading.Thread(target=daemon, daemon=True).start()
    try:
        process.run()
        process.close()
    except Exception as error:
        _end(error)
    _end()


def _end(error: BaseException | None = None) -> NoReturn:
    """End the process though threads run: encoders may be in the middle of a template, and while
    one of us lives the front waits for answers that nobody will give."""
    if error is not None:
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if error is None else 1)


if __name__ == "__main__":
    main()
