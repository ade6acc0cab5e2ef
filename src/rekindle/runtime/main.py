"""Starts the process of one model: loads it, reports that it is ready, and serves requests.

An unexpected exception on any thread ends the process.
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
from rekindle.protocol.settings import LIBRARY_VARIABLE
from rekindle.runtime.embedding.process import EmbeddingProcess
from rekindle.runtime.loading import engine_options
from rekindle.runtime.process import RuntimeProcess


def _load(load: LoadModel, sock: socket.socket) -> RuntimeProcess | EmbeddingProcess:
    if load.is_embedder:
        return EmbeddingProcess(engine_options(load), load.settings, sock)
    return RuntimeProcess(load, sock)


def main() -> None:
    """Run the child process. Its only argument is the file descriptor of the socket."""
    for stop in (signal.SIGINT, signal.SIGTERM):  # only the front ends this process, with a
        signal.signal(stop, signal.SIG_IGN)  # message or by closing the socket
    faulthandler.enable()  # print all stacks after a native crash, or for the front's watchdog
    threading.excepthook = lambda raised: _end(raised.exc_value)
    sock = socket.socket(fileno=int(sys.argv[1]))
    received = receive(sock)
    load = next(received).message
    assert isinstance(load, LoadModel)
    if load.settings.llama_lib:
        os.environ[LIBRARY_VARIABLE] = str(load.settings.llama_lib)
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
    """End the process without waiting for its threads.

    An encoder may be inside a template, and the front would wait for answers that never come.
    """
    if error is not None:
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if error is None else 1)


if __name__ == "__main__":
    main()
