"""Tables and sentences that `rekindle cache` prints."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

SHORT_KEY = 12  # characters of a key that are nearly always unique
LEAST_PREVIEW = 20  # characters of a message, on a narrow terminal too
STATUS_COLOURS = {"hit": "green", "partial_hit": "yellow", "miss": "red"}
UNITS = (("day", 86400), ("h", 3600), ("min", 60), ("s", 1))

Json = dict[str, Any]


def entries_table(entries: Sequence[Json]) -> RenderableType:
    if not entries:
        return Text("Nothing is cached under a name yet.")
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("key", no_wrap=True)
    for name in ("model", "names", "tier"):
        table.add_column(name, overflow="fold", min_width=len(name))
    for name in ("tokens", "size", "hits"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("last used", "expires"):
        table.add_column(name, no_wrap=True)
    table.add_column("last message", min_width=LEAST_PREVIEW, no_wrap=True, overflow="ellipsis")
    short = _short_keys([entry["cache_key"] for entry in entries])
    for entry in entries:
        table.add_row(
            Text(short[entry["cache_key"]]),
            plain(entry["model"]),
            plain(", ".join(each["name"] for each in entry["names"])),
            plain(entry["tier"] or "none"),
            f"{entry['token_count']:,}",
            decimal(entry["size_bytes"]),
            str(entry["hit_count"]),
            ago(entry["last_used"]),
            expiry(entry),
            plain(entry["preview"]),
        )
    return table


def entry_table(entry: Json) -> RenderableType:
    segments = [f"{each['type']} {each['hash']}" for each in entry["segments"]]
    names = [f"{each['kind']} {each['name']}" for each in entry["names"]]
    return _pairs(
        {
            "key": entry["cache_key"],
            "model": entry["model"],
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
    """Every figure under the server's own name for it; bytes in readable units."""
    return _pairs({name.replace("_", " "): _figure(name, value) for name, value in stats.items()})


def explanation(result: Json) -> RenderableType:
    """Whether a request would hit, and both sides of the first difference."""
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


def plain(text: str, style: str = "") -> Text:
    """Clients chose this text: no markup, and no control codes for the terminal."""
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
    """The beginning of each key where that is unique."""
    beginnings = [key[:SHORT_KEY] for key in keys]
    return {key: key[:SHORT_KEY] if beginnings.count(key[:SHORT_KEY]) == 1 else key for key in keys}


def _pairs(rows: Mapping[str, str]) -> RenderableType:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, plain(value))
    return table
