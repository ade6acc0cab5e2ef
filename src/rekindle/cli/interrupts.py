"""Lets Ctrl-C end the process without a traceback while Python imports modules.

This is the first module that a command imports, so it imports as little as possible itself.
"""

from __future__ import annotations

import signal


class QuietImports:
    """End the process at Ctrl-C, as the system does it, instead of raising KeyboardInterrupt.

    An exception in the middle of an import is printed with a traceback, and some native modules
    turn it into another one.
    """

    def __enter__(self) -> None:
        self._handler = signal.getsignal(signal.SIGINT)
        if self._handler is signal.default_int_handler:  # a shell may have us ignore Ctrl-C
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def __exit__(self, *_: object) -> None:
        if self._handler is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handler)
