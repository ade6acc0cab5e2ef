"""Headers of an answer that say what of its request was left out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

IGNORED_TOOLS = "x-ignored-tools"  # there are none of these here
MOST_NAMED = 16  # in one header
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")


def notes(left_out: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """A header for each kind of which something was left out, with some of the names."""
    return {header: _names(names) for header, names in left_out.items() if names}


def _names(names: Sequence[str]) -> str:
    """Without what a header cannot hold."""
    return ", ".join(_UNSAFE.sub("?", name[:128]) for name in names[:MOST_NAMED])
