"""Finds the GPUs of this machine without any driver library, and says when one is not used."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from rekindle.protocol.frames import Ready

NVIDIA, AMD, INTEL = "0x10de", "0x1002", "0x8086"  # PCI vendors
VENDORS = {NVIDIA: "NVIDIA GPU", AMD: "AMD GPU", INTEL: "Intel GPU"}
INTEL_INTEGRATED = "0000:00:02.0"  # its PCI address; it computes no faster than the CPU
ASK_DRIVER_S = 10


def machine_gpus(root: Path = Path("/")) -> list[str]:
    """Return the names of the GPUs that this process may use, as far as Linux knows them."""
    return _nvidia_gpus(root) or _ask_nvidia_driver() or _render_devices(root)


def _nvidia_gpus(root: Path) -> list[str]:
    """Read the names from the driver. In a container it may show GPUs that have no device file."""
    if not (root / "dev/nvidiactl").exists():
        return []
    names = []
    for file in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        with suppress(OSError):
            names += re.findall(r"^Model:\s*(.+?)\s*$", file.read_text(), re.MULTILINE)
    return names


def _ask_nvidia_driver() -> list[str]:
    """Ask nvidia-smi, which also knows GPUs inside the Windows subsystem for Linux."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, "--query-gpu=name", "--format=csv,noheader"]
    try:
        asked = subprocess.run(
            command, capture_output=True, text=True, timeout=ASK_DRIVER_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in asked.stdout.splitlines() if line.strip()]


def _render_devices(root: Path) -> list[str]:
    """List the graphics devices that can compute, by their vendor."""
    names = []
    for node in sorted((root / "sys/class/drm").glob("renderD*")):
        with suppress(OSError):
            vendor = (node / "device/vendor").read_text().strip()
            address = (node / "device").resolve().name
            if vendor in VENDORS and (vendor, address) != (INTEL, INTEL_INTEGRATED):
                names.append(VENDORS[vendor])
    return names


def unused_gpus(
    loaded: Iterable[Ready], *, own_library: bool, root: Path = Path("/")
) -> str | None:
    """Say that this machine has a GPU that the library of the loaded models cannot use.

    Only an engine whose library may lack GPU code counts its layers.
    """
    on_cpu = any(ready.layers and not ready.gpus for ready in loaded)
    gpus = machine_gpus(root) if on_cpu else []
    if not gpus:
        return None
    found = f"This machine has {' and '.join(dict.fromkeys(gpus))}"
    if own_library:
        return (
            f"{found}, but the library of `llama_lib` finds no GPU. Check the GPU's driver, or "
            "build the library again: rekindle build-gpu"
        )
    return (
        f"{found}, but the installed llama.cpp computes on the CPU. To build one that uses the "
        "GPU: rekindle build-gpu"
    )
