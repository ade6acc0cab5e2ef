"""Compiles what chooses tokens into the package, where there is a C compiler; without one the
package is pure, and NumPy does its work.

`python hatch_build.py` compiles in place.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ENGINE = Path(__file__).parent / "src/rekindle/engine"
LIBRARY = ENGINE / "_rows.so"
#: No two machines may add in another order, or round at another place. Errors are not asked for.
FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
LINKED = ("-fPIC", "-shared", "-pthread")
SOURCES = (ENGINE / "rows.c", ENGINE / "row_pool.c")


class CompiledRowsHook(BuildHookInterface):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name == "wheel" and compile_rows():
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"  # it knows nothing of Python
            build_data["artifacts"].append(str(LIBRARY.relative_to(self.root)))


def compile_rows() -> bool:
    """Whether there is compiled code now."""
    fresh = LIBRARY.with_suffix(f".{os.getpid()}")
    compiler = shlex.split(os.environ.get("CC", "cc"))
    command = [*compiler, *FLAGS, *LINKED, "-o", fresh, *SOURCES, "-lm"]
    try:
        subprocess.run(command, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"no compiled sampler, NumPy does its work: {error}", file=sys.stderr)
        LIBRARY.unlink(missing_ok=True)  # of an older source
        return False
    fresh.replace(LIBRARY)  # a server that runs keeps the old one
    return True


if __name__ == "__main__":
    sys.exit(not compile_rows())
