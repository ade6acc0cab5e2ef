"""Formats the tables and sentences that `rekindle cache` prints."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, OverflowMethod, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

SHORT_KEY = 12  # characters; this much of a key is nearly always unique
STATUS_COLOURS = {"hit": "green", "partial_hit": "yellow", "miss": "red"}
UNITS = (("day", 86400), ("h", 3600), ("min", 60), ("s", 1))

UNWRAPPED = 10_000  # columns

#: Columns whose text is shortened in a narrow terminal.
MAY_SHRINK = ("model", "names", "last message")

#: What `stats_table` calls the figures whose names in JSON do not explain themselves.
TITLES = {
    "total_entries": "entries",
    "by_tier": "entries by tier",
    "ram_bytes": "state in RAM",
    "disk_bytes": "state on disk",
    "unique_bytes": "state, shared blocks once",
    "logical_bytes": "state without sharing",
    "total_hits": "hits",
    "total_partial_hits": "partial hits",
    "total_misses": "misses",
    "evictions": "evicted blocks",
    "ram_limit_bytes": "limit in RAM",
    "disk_limit_bytes": "limit on disk",
    "disk_queued_bytes": "waiting to be written",
    "disk_written_bytes": "written to disk",
    "disk_read_bytes": "read from disk",
    "encoded_pictures": "encoded images",
    "picture_hits": "reused images",
    "picture_ram_bytes": "encoded images in RAM",
    "picture_disk_bytes": "encoded images on disk",
}

Json = dict[str, Any]


def entries_table(found: Sequence[Json], *, show_empty: bool = False) -> RenderableType:
    """One line per entry, without the columns that would be the same in all lines. Entries whose
    state is gone are counted, not listed."""
    entries = [entry for entry in found if show_empty or not _is_empty(entry)]
    hidden = len(found) - len(entries)
    some = "1 entry has" if hidden == 1 else f"{hidden} entries have"
    note = Text(f"{some} no stored state; --all shows {'it' if hidden == 1 else 'them'}.", "dim")
    if not entries:
        return note if hidden else Text("The cache has no entries yet.")
    return Group(_table(entries), note) if hidden else _table(entries)


def _is_empty(entry: Json) -> bool:
    return entry["tier"] is None and not entry["size_bytes"]


def _table(entries: Sequence[Json]) -> Table:
    short = _short_keys([entry["cache_key"] for entry in entries])
    cells: dict[str, Callable[[Json], Text]] = {
        "key": lambda entry: Text(short[entry["cache_key"]]),
        "tenant": lambda entry: plain(entry.get("tenant") or "shared"),
        "model": lambda entry: plain(entry["model"]),
        "names": lambda entry: plain(", ".join(each["name"] for each in entry["names"])),
        "tier": lambda entry: plain(entry["tier"] or "none"),
        "tokens": lambda entry: Text(f"{entry['token_count']:,}", justify="right"),
        "size": lambda entry: Text(decimal(entry["size_bytes"]), justify="right"),
        "hits": lambda entry: Text(str(entry["hit_count"]), justify="right"),
        "last used": lambda entry: Text(ago(entry["last_used"])),
        "expires": lambda entry: Text(expiry(entry)),
        "last message": lambda entry: plain(entry["preview"]),
    }
    if len({entry.get("tenant") for entry in entries}) == 1:  # only an admin sees several
        del cells["tenant"]
    if len({entry["model"] for entry in entries}) == 1:
        del cells["model"]
    if not any(entry["names"] for entry in entries):
        del cells["names"]
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in cells:
        if title in MAY_SHRINK:
            overflow: OverflowMethod = "ellipsis" if title == "last message" else "fold"
            table.add_column(title, overflow=overflow, no_wrap=title == "last message", min_width=8)
        else:  # a number that is cut off would be another number
            width = max(len(title), *(cells[title](entry).cell_len for entry in entries))
            table.add_column(title, no_wrap=True, min_width=width)
    for entry in entries:
        table.add_row(*(cell(entry) for cell in cells.values()))
    return table


def entry_table(entry: Json) -> RenderableType:
    segments = [f"{each['type']} {each['hash']}" for each in entry["segments"]]
    names = [f"{each['kind']} {each['name']}" for each in entry["names"]]
    return pairs(
        {
            "key": entry["cache_key"],
            "model": entry["model"],
            **({"tenant": entry["tenant"]} if entry.get("tenant") else {}),
            "names": "\n".join(names) or "none",
            "segments": "\n".join(segments) or "none",
            "tokens": f"{entry['token_count']:,}, {entry['stored_tokens']:,} of them stored",
            "size": decimal(entry["size_bytes"]),
            "tier": entry["tier"] or "none",
            "hits": str(entry["hit_count"]),
            "created": ago(entry["created_at"]),
            "last used": ago(entry["last_used"]),
            "expires": expiry(entry),
            "last message": entry["preview"] or "none",
        }
    )


def stats_table(stats: Json) -> RenderableType:
    """All figures of the server, with bytes in readable units."""
    return pairs(
        {
            TITLES.get(name, name.replace("_", " ")): _figure(name, value)
            for name, value in stats.items()
        }
    )


def explanation(result: Json) -> RenderableType:
    """Whether a request would hit, and the first difference as both sides have it."""
    status = Text(result["status"], style=STATUS_COLOURS.get(result["status"], ""))
    lines = [
        status.append(f": {result['reusable_tokens']:,} tokens can be reused ({result['reason']})")
    ]
    if result.get("invalidated_at"):
        lines.append(Text(f"changed: {result['invalidated_at']}"))
    if at := result.get("diverged_at"):
        where = "" if at["message"] is None else f" in messages[{at['message']}] ({at['role']})"
        lines.append(Text(f"first difference{where}:"))
        lines.append(Text("  stored: ").append(plain(_one_line(at["stored"]), "red")))
        lines.append(Text("  sent:   ").append(plain(_one_line(at["sent"]), "green")))
    return Group(*lines)


def show(view: RenderableType) -> None:
    """Print to the terminal. In a pipe, nothing is wrapped, so that other programs can read it."""
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    Console(width=UNWRAPPED if piped else None).print(view)


def plain(text: str, style: str = "") -> Text:
    """Format text that clients chose, without markup and without terminal control codes."""
    return Text("".join(c if c.isprintable() or c == "\n" else "·" for c in text), style=style)


def _one_line(text: str) -> str:
    return text.replace("\n", "⏎")


def ago(then: float) -> str:
    return f"{_span(time.time() - then)} ago"


def expiry(entry: Json) -> str:
    pinned = "pinned, " if entry["pinned"] else ""
    if entry["expires_at"] is None:
        return f"{pinned}never"
    left = entry["expires_at"] - time.time()
    return pinned + (f"in {_span(left)}" if left > 0 else "expired")


def _span(seconds: float) -> str:
    for unit, length in UNITS:
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {unit}" + ("s" if unit == "day" and count > 1 else "")
    return "0 s"


def _figure(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{each}: {count:,}" for each, count in value.items()) or "none"
    if name.endswith("_bytes"):
        return decimal(value)
    if name.endswith("_rate"):
        return f"{value:.0%}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _short_keys(keys: Sequence[str]) -> dict[str, str]:
    """Shorten the keys whose beginning is unique."""
    beginnings = [key[:SHORT_KEY] for key in keys]
    return {key: key[:SHORT_KEY] if beginnings.count(key[:SHORT_KEY]) == 1 else key for key in keys}


def pairs(rows: Mapping[str, str]) -> RenderableType:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, plain(value))
    return table
