"""Prints which modules the HTTP process loads, by package, and its memory in megabytes.

    python benchmarks/front_imports.py [MODULE]

MODULE launches a server. It is imported in a fresh process, which also builds the application, so
that the first request has nothing left to import.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

MODULE = "rekindle.front.launch"
PROBE = """
import importlib, json, resource, sys
launch = importlib.import_module(sys.argv[1])
launch.build_app(importlib.import_module("rekindle.config").Config(), None)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
unit = 1 if sys.platform == "darwin" else 1024  # bytes there, kibibytes elsewhere
print(json.dumps({"modules": sorted(sys.modules), "peak_bytes": peak * unit}))
"""


def package_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 2 else "(root)"


def main() -> None:
    module = sys.argv[1] if len(sys.argv) > 1 else MODULE
    command = [sys.executable, "-c", PROBE, module]
    found = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    ours = [name for name in found["modules"] if name.split(".")[0] == "rekindle"]
    for package, count in sorted(Counter(map(package_of, ours)).items()):
        print(f"{package:12}{count:5}")
    print(f"{'of ours':12}{len(ours):5}")
    print(f"{'in all':12}{len(found['modules']):5}")
    print(f"{'peak':12}{found['peak_bytes'] / 1e6:5.0f} MB")


if __name__ == "__main__":
    main()
