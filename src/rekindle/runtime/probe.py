"""Prints what the native libraries of the engines can do on this machine, as JSON.

The command line runs this in a process of its own: a library can end its process, and the command
line loads no model code.
"""

from __future__ import annotations

import sys

import msgspec

from rekindle.engine.registry import library_infos
from rekindle.errors import RekindleError

if __name__ == "__main__":
    try:
        print(msgspec.json.encode(library_infos()).decode())
    except RekindleError as error:
        sys.exit(str(error))
