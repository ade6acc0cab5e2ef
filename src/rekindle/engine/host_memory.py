"""Memory of the machine itself."""

from __future__ import annotations

import os
from pathlib import Path


def host_free_bytes() -> int:
    """Memory a new process can have without swapping."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    # Elsewhere only the total is known; half of it is a cautious guess.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
