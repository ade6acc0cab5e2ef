"""Compiles what chooses tokens into the package, where there is a C compiler; without one the
package is pure, and NumPy does its work.

`python hatch_build.py` compiles in place, and needs nothing but Python and a compiler.
"""

from __future__ import annotations

import os
import platform
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
except ImportError:  # as a script
    BuildHookInterface = object

ENGINE = Path(__file__).parent / "src/rekindle/engine/sampling"
NAME = "_rows.so"
#: No two machines may add in another order, or round at another place. Errors are not asked for.
FLAGS = ("-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
LINKED = ("-fPIC", "-shared", "-pthread")
SOURCES = (ENGINE / "rows.c", ENGINE / "row_pool.c")


class CompiledRowsHook(BuildHookInterface):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        if version == "editable":
            compile_in_place()
            return
        self.folder = TemporaryDirectory()
        library = Path(self.folder.name, NAME)
        if compile_rows(library):
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform_tag()}"  # it knows nothing of Python
            build_data["force_include"][str(library)] = f"rekindle/engine/sampling/{NAME}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()


def platform_tag() -> str:
    """Python may be for several kinds of CPU; what is compiled is for this one."""
    here = sysconfig.get_platform().replace("universal2", platform.machine())
    return here.replace("-", "_").replace(".", "_")


def compile_in_place() -> bool:
    """An older library stays if this fails; it is not used for newer sources."""
    fresh = ENGINE / f".{os.getpid()}{NAME}"
    if not compile_rows(fresh):
        return False
    fresh.replace(ENGINE / NAME)  # a server that runs keeps the old one
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
        print(f"no compiled sampler, NumPy does its work: {error}", file=sys.stderr)
        return False
    return True


if __name__ == "__main__":
    sys.exit(not compile_in_place())
