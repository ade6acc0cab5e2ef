"""Compiles the token sampler into the package if there is a C compiler.

Without a compiler the package is pure Python, and a NumPy implementation does the sampling. The
variable REKINDLE_PURE_WHEEL asks for a pure wheel.
`python hatch_build.py` compiles in place. It needs only Python and a compiler.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
import sysconfig
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # it runs as a script
    BuildHookInterface = object

ENGINE = Path(__file__).parent / "src/rekindle/engine/sampling"
NAME = "_rows.so"
#: Floating point must give the same bits on all machines. Nothing reads errno or FP exceptions.
FLAGS = ("-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
LINKED = ("-fPIC", "-shared", "-pthread")
SOURCES = (ENGINE / "rows.c", ENGINE / "row_pool.c")


class CompiledRowsHook(BuildHookInterface):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or os.environ.get("REKINDLE_PURE_WHEEL"):
            return
        if version == "editable":
            compile_in_place()
            return
        self.folder = TemporaryDirectory()
        library = Path(self.folder.name, NAME)
        if compile_rows(library):
            build_data["pure_python"] = False
            # The library does not depend on the Python version.
            build_data["tag"] = f"py3-none-{platform_tag(library)}"
            build_data["force_include"][str(library)] = f"rekindle/engine/sampling/{NAME}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()


def platform_tag(library: Path) -> str:
    """The wheel's platform. A universal Python still compiles for this CPU only.

    On Linux it is the oldest glibc that has all functions of the library, which package indexes
    want to know. The library uses nothing but glibc.
    """
    here = sysconfig.get_platform().replace("universal2", platform.machine())
    versions = re.findall(rb"\0GLIBC_(\d+)\.(\d+)", library.read_bytes())
    if here.startswith("linux-") and versions:
        major, minor = max((int(major), int(minor)) for major, minor in versions)
        here = here.replace("linux", f"manylinux_{major}_{minor}", 1)
    return here.replace("-", "_").replace(".", "_")


def compile_in_place() -> bool:
    """Compile next to the sources. On failure an older library stays, but does not match them."""
    fresh = ENGINE / f".{os.getpid()}{NAME}"
    if not compile_rows(fresh):
        return False
    fresh.replace(ENGINE / NAME)  # a running server keeps the old file
    return True


def compile_rows(library: Path) -> bool:
    sources = sorted(ENGINE.glob("*.[ch]"))
    source_hash = sha256(b"".join(each.read_bytes() for each in sources)).hexdigest()
    compiler = shlex.split(os.environ.get("CC", "cc"))
    defined = f'-DSOURCE_HASH="{source_hash}"'
    command = [*compiler, *FLAGS, *LINKED, defined, "-o", library, *SOURCES, "-lm"]
    try:
        subprocess.run(command, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"cannot compile the sampler, so NumPy is used instead: {error}", file=sys.stderr)
        return False
    return True


if __name__ == "__main__":
    sys.exit(not compile_in_place())
