"""What the log says about the cache: one line for each change of its state."""

from __future__ import annotations

from pathlib import Path

from rekindle.kvcache.disk.folder import Folder
from rekindle.kvcache.tiers.base import Tier
from rekindle.protocol.frames import LogLine


def unavailable_line(cache_dir: Path, state: str, reason: str) -> LogLine:
    """Why there is RAM only for now."""
    if state == "locked":
        return LogLine("warning", f"{reason} State is kept in RAM only until it is free")
    return LogLine(
        "warning",
        f"the disk cache in {cache_dir} cannot be used ({reason}): state is kept in RAM only and "
        "is lost at a restart; mend it, or choose another with --cache-dir",
    )


def opened_lines(folder: Folder) -> list[LogLine]:
    """What was found in a folder that is worth saying."""
    return [line for line in (_repair_line(folder), _superseded_line(folder)) if line]


def _repair_line(folder: Folder) -> LogLine | None:
    found = folder.recovery
    if not (found.rebuilt or found.lost or found.quarantined):
        return None
    return LogLine(
        "warning",
        f"the disk cache needed repair: index rebuilt: {found.rebuilt}, blocks lost: {found.lost}, "
        f"quarantined: {found.quarantined}, found again: {found.adopted}",
    )


def _superseded_line(folder: Folder) -> LogLine | None:
    if not folder.superseded_bytes:
        return None
    return LogLine(
        "info",
        f"{folder.superseded_bytes / 1e6:.1f} MB of this model's state come from another build of "
        "the engine, other engine settings or another secret: they are not used, and give way when "
        "room is needed",
    )


def state_line(tier: Tier, why: str) -> LogLine:
    """That a tier has begun or ceased to fail."""
    name = tier.name
    if tier.state == "full":
        text = f"the {name} is full ({why}): the {name} cache gives way, requests go on"
        return LogLine("warning", text)
    if tier.state == "failing":
        text = f"writing to the {name} cache failed ({why}): state is kept in RAM meanwhile"
        return LogLine("warning", text)
    return LogLine("info", f"the {name} cache works again")


def reads_line(tier: Tier, answers: bool) -> LogLine:
    if answers:
        return LogLine("info", f"the {tier.name} cache answers reads again")
    return LogLine(
        "warning",
        f"the {tier.name} does not answer reads: state that lies there alone is computed again "
        "until it does",
    )
